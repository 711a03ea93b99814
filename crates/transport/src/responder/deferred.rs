//! Deferred operations: requests for absent memory. The host executes them ([`Deferred`]). They keep their place
//! among the pending responses, so that responses keep their order whatever completes first:
//!
//! - A READ is fetched ahead from its acceptance on (`read.rs`). It waits while earlier
//!   READs are fetched far enough ahead, or while a pending change of memory may concern it.
//! - A WRITE's ACK, and all responses behind it, wait until the write is done.
//! - The completion of a message waits for the writes before it: it is queued behind one of them.
//! - A request whose effect could be visible before those writes (an atomic, a FLUSH) is refused with an RNR NAK.

use terrace_wire::{OpcodeInfo, Psn, Syndrome};

use super::read::ReadResponse;
use super::refusal::{ABSENT, CHANGE_PENDING, Refusal};
use super::resource::Outcome;
use super::response::{Keys, PendingWrites, Response};
use super::{Incoming, PENDING_MAX, Responder};
use crate::common::{Call, Common};
use crate::data::Data;
use crate::host::{Completion, Host, RemoteError};
use crate::types::{QpType, WcStatus};

/// Fetched bytes that the READs of a queue pair may hold before another READ begins to fetch. The oldest READ always
/// may. Otherwise many READs far from the front would hold the buffers that the oldest one needs.
const FETCH_AHEAD_BYTES_MAX: u64 = 256 << 10;

/// Most pending packets of WRITEs.
const WRITES_MAX: usize = 512;

impl Responder {
    /// Has the next `emit` check the deferred operations again.
    pub(crate) fn wake(&mut self) {
        self.blocked = false;
        self.schedule_due = true;
    }

    /// The PSN at which the oldest pending response waits for memory.
    pub(super) fn blocked_psn(&self, common: &Common) -> Option<Psn> {
        self.pending.front()?.blocked_psn(common.mtu())
    }

    /// Whether changes of memory that the peer requested are pending.
    pub(super) fn has_pending_changes(&self) -> bool {
        self.pending.iter().any(Response::is_pending_change)
    }

    /// Writes the data of a packet or run, at once or deferred.
    pub(super) fn write(
        &mut self,
        call: &mut Call<'_, impl Host>,
        rkey: u32,
        va: u64,
        data: Data<'_>,
    ) -> Result<(), Refusal> {
        match call.host.remote_write(rkey, va, data) {
            Ok(()) => return Ok(()),
            Err(RemoteError::NotReady) if self.pending_writes() < WRITES_MAX => {}
            Err(error) => return Err(error.into()),
        }
        let transfer = call.host.put(rkey, va, data)?;
        call.counters.puts += 1;
        if !matches!(self.pending.back(), Some(Response::Writes(_))) {
            self.pending.push_back(Response::Writes(PendingWrites::default()));
        }
        if let Some(Response::Writes(writes)) = self.pending.back_mut() {
            writes.push(self.expected, rkey, transfer);
        }
        Ok(())
    }

    fn pending_writes(&self) -> usize {
        let writes =
            |response: &Response| if let Response::Writes(writes) = response { writes.len() } else { 0 };
        self.pending.iter().map(writes).sum()
    }

    /// Completes a receive. The completion is deferred until all writes before the message are done.
    pub(super) fn complete_receive(&mut self, call: &Call<'_, impl Host>, completion: impl Completion) {
        match self.has_pending_changes() {
            true => self.pending.push_back(Response::Completion(completion.entry())),
            false => call.host.complete_receive(completion),
        }
    }

    /// Delivers the deferred completions that no longer wait for writes. READ responses before them do not matter.
    pub(super) fn deliver_completions(&mut self, call: &Call<'_, impl Host>) {
        let mut index = 0;
        while let Some(response) = self.pending.get(index) {
            match response {
                Response::Completion(wc) => {
                    call.host.complete_receive(*wc);
                    self.pending.remove(index);
                }
                response if response.is_pending_change() => return,
                _ => index += 1,
            }
        }
    }

    /// Limits deferred completions to the number of pending responses. An unreliable peer gets no RNR NAK: its deferred
    /// completions are limited by the posted receives.
    pub(super) fn require_completion_room(&self, common: &Common) -> Result<(), Refusal> {
        let is_full = self.pending.len() >= PENDING_MAX && !common.is(QpType::Uc);
        if is_full && self.has_pending_changes() { Err(ABSENT) } else { Ok(()) }
    }

    /// While writes are pending, no refusal breaks the connection: its NAK would acknowledge them, and deferred
    /// completions could not be delivered any more. The peer sends the bad packet again, and is refused then.
    pub(super) fn postpone(
        &mut self,
        call: &Call<'_, impl Host>,
        info: &OpcodeInfo,
        refusal: Refusal,
    ) -> Refusal {
        let for_now = matches!(refusal, Refusal::NotReady | Refusal::Rnr { .. });
        if for_now || !self.has_pending_changes() {
            return refusal;
        }
        let is_new = |incoming: &mut Incoming| matches!(incoming, Incoming::Send { offset: 0, .. });
        if info.position.is_first()
            && let Some(Incoming::Send { receive, .. }) = self.incoming.take_if(is_new)
        {
            self.give_back(call, receive);
        }
        CHANGE_PENDING
    }

    /// Whether a new READ by this key must not be fetched yet: earlier READs wait to fetch themselves or are
    /// fetched far enough ahead, or memory is being changed by another key.
    pub(super) fn defers_fetching(&self, rkey: u32) -> bool {
        let (mut fetched_bytes, mut keys) = (0, Keys::None);
        for response in &self.pending {
            match response {
                Response::Read(read) if read.is_waiting() => return true,
                Response::Read(read) => fetched_bytes += read.fetched_bytes(),
                other => keys = keys.and(other.keys()),
            }
        }
        fetched_bytes >= FETCH_AHEAD_BYTES_MAX || keys.have_another(rkey)
    }

    /// Starts the fetches of waiting READs, oldest first.
    pub(super) fn schedule(&mut self, call: &mut Call<'_, impl Host>) {
        if !std::mem::take(&mut self.schedule_due) || !std::mem::take(&mut self.reads_waiting) {
            return;
        }
        let (mut fetched_bytes, mut keys) = (0, Keys::None);
        for (index, response) in self.pending.iter_mut().enumerate() {
            let Response::Read(read) = response else {
                keys = keys.and(response.keys());
                continue;
            };
            if read.is_waiting() {
                let is_early = self.reads_waiting || fetched_bytes >= FETCH_AHEAD_BYTES_MAX;
                if index > 0 && (is_early || keys.have_another(read.rkey)) {
                    read.defer_fetch();
                } else {
                    // The error is found again when that READ is to be sent.
                    let _ = read.fetch(call);
                }
            }
            fetched_bytes += read.fetched_bytes();
            self.reads_waiting |= read.is_waiting();
        }
        self.preempt();
    }

    /// When the oldest READ is blocked, the newest READ with fetched data releases its buffers. The queue
    /// pair then makes progress whatever buffers others hold.
    pub(super) fn preempt(&mut self) {
        let Some(Response::Read(first)) = self.pending.front() else { return };
        if !first.is_blocked() {
            return;
        }
        let others = self.pending.iter_mut().skip(1).rev();
        let mut reads =
            others.filter_map(|response| if let Response::Read(read) = response { Some(read) } else { None });
        // The host wakes the queue pair when the buffers are free.
        self.reads_waiting |= reads.any(ReadResponse::release_buffers);
    }

    /// Records the result of an atomic in its responder resource, for duplicates.
    pub(super) fn record_value(&mut self, at: Psn, value: u64, msn: u32) {
        if let Some(resource) = self.resources.iter_mut().rev().find(|resource| resource.psn == at) {
            resource.outcome = Outcome::Atomic { value, msn };
        }
    }

    /// Drops the pending responses from `first` on; their deferred completions are flushed.
    pub(super) fn drop_pending(&mut self, call: &mut Call<'_, impl Host>, first: usize) {
        for response in self.pending.drain(first..) {
            if let Response::Completion(wc) = response {
                call.fail_receive(wc.wr_id, wc.srqn, WcStatus::Flushed);
            }
        }
        self.blocked = false;
    }

    /// Queues an ACK that was deferred by writes, in front of all other responses.
    pub(super) fn queue_deferred_ack(&mut self, common: &Common, ack: Option<(Psn, u32)>) {
        if let Some((psn, msn)) = ack
            && !common.is(QpType::Uc)
        {
            self.pending.push_front(Response::Ack { psn, syndrome: Syndrome::Ack { credits: 31 }, msn });
        }
    }
}
