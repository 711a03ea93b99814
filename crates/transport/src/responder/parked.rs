//! Deferred operations: requests whose memory is absent. The host executes them ([`Deferred`]). They keep their place
//! among the pending responses, so that responses keep their order whatever completes first:
//!
//! - A READ is fetched ahead, at most [`FETCH_BYTES_MAX`] at a time, from its acceptance on. It waits while earlier
//!   READs are fetched far enough ahead, or while a pending change of memory may concern it.
//! - A WRITE's ACK, and all responses behind it, wait until the write is done.
//! - The completion of a message waits for the writes before it: it is queued behind one of them.
//! - A request whose effect could be visible before those writes (an atomic, a FLUSH) is refused with an RNR NAK.

use std::collections::VecDeque;

use terrace_wire::{OpcodeInfo, Psn, Reth, Syndrome};

use super::{ABSENT, Incoming, Kept, OWED_MAX, Owed, Refusal, Responder, UNSETTLED};
use crate::common::{Call, Common};
use crate::host::{Completion, Deferred, Host, RemoteAccess, RemoteError};
use crate::types::{QpType, WcStatus};

/// Most bytes of a READ per fetch; a multiple of every path MTU. While they are sent, as many are fetched.
const FETCH_BYTES_MAX: u64 = 64 << 10;

/// Fetched bytes that the READs of a queue pair may hold before another READ begins to fetch. The oldest READ always
/// may. Otherwise many READs far from the front would hold the buffers that the oldest one needs.
const FETCH_AHEAD_BYTES_MAX: u64 = 256 << 10;

/// Parts of a READ that are fetched at a time: one is sent while the next is fetched.
const PARTS_MAX: usize = 2;

/// Most pending packets of WRITEs.
const WRITES_MAX: usize = 512;

/// The response to a READ.
#[derive(Debug)]
pub(super) struct ReadAnswer {
    pub(super) psn: Psn,
    pub(super) va: u64,
    pub(super) rkey: u32,
    /// XRC: the shared receive queue through whose protection domain the memory is reached.
    srqn: Option<u32>,
    pub(super) length: u64,
    pub(super) packets: u32,
    /// Packets of this response. A repetition has fewer than the peer requested if other pending responses have the
    /// rest.
    pub(super) end: u32,
    /// Packets sent.
    pub(super) sent: u32,
    pub(super) msn: u32,
    /// Whether this is a repetition: then it takes no responder resource that a new READ could need.
    pub(super) repeat: bool,
    /// Parts that are fetched or being fetched, oldest first.
    parts: VecDeque<Part>,
    fetch_state: FetchState,
}

/// Whether a READ waits to fetch, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchState {
    Sated,
    /// It waits for earlier READs.
    Turn,
    /// No buffer was free. The host wakes the queue pair when one is, and is not asked again until then, so that queue
    /// pairs that have waited longer come first.
    Room,
}

/// A part of a READ that the host fetches.
#[derive(Debug)]
struct Part {
    start: u64,
    end: u64,
    data: Box<dyn Deferred>,
}

/// Where the next packet's data is.
pub(super) enum Source<'a> {
    Memory,
    /// In a fetched part, at this offset.
    Part(&'a dyn Deferred, u64),
    /// Still being fetched.
    UnderWay,
}

impl ReadAnswer {
    pub(super) fn new(common: &Common, reth: Reth, psn: Psn, srqn: Option<u32>) -> ReadAnswer {
        let length = u64::from(reth.length);
        let packets = length.div_ceil(common.mtu()).max(1) as u32;
        ReadAnswer {
            psn,
            va: reth.va,
            rkey: reth.rkey,
            srqn,
            length,
            packets,
            end: packets,
            sent: 0,
            msn: 0,
            repeat: false,
            parts: VecDeque::new(),
            fetch_state: FetchState::Sated,
        }
    }

    /// Accesses the memory of the READ through its protection domain.
    pub(super) fn reach<H: Host, T>(
        &self,
        host: &H,
        access: impl FnOnce(&H) -> Result<T, RemoteError>,
    ) -> Result<T, RemoteError> {
        match self.srqn {
            None => access(host),
            // Without the shared receive queue there is no protection domain.
            Some(srqn) => host.with_srq(srqn, access).unwrap_or(Err(RemoteError::Access)),
        }
    }

    /// Checks the request, and begins to fetch absent memory unless `later` returns true.
    pub(super) fn prepare(
        &mut self,
        call: &mut Call<'_, impl Host>,
        later: impl FnOnce() -> bool,
    ) -> Result<(), RemoteError> {
        let (rkey, va, length) = (self.rkey, self.va, self.answered_bytes(call));
        match self.reach(call.host, |host| host.remote_check(rkey, va, length, RemoteAccess::Read)) {
            Err(RemoteError::NotReady) if later() => {
                self.fetch_state = FetchState::Turn;
                Ok(())
            }
            Err(RemoteError::NotReady) => self.fetch(call),
            result => result,
        }
    }

    /// Bytes in the packets of this response.
    fn answered_bytes(&self, common: &Common) -> u64 {
        self.length.min(u64::from(self.end) * common.mtu())
    }

    /// PSN of the next packet to send.
    pub(super) fn next_psn(&self) -> Psn {
        self.psn.plus(self.sent)
    }

    /// Whether it waits for a buffer, or for earlier READs.
    pub(super) fn is_hungry(&self) -> bool {
        self.fetch_state != FetchState::Sated
    }

    /// Whether no buffer was free for its next fetch.
    pub(super) fn lacks_room(&self) -> bool {
        self.fetch_state == FetchState::Room
    }

    /// Bytes that are fetched or being fetched, and not sent.
    fn fetched_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.end - part.start).sum()
    }

    /// Drops the fetched parts; true if there were any. Parts whose oldest is still being fetched cannot be dropped.
    fn give_up_room(&mut self) -> bool {
        let has_room = self.parts.front().is_some_and(|part| part.data.outcome().is_some());
        if has_room {
            self.parts.clear();
            self.fetch_state = FetchState::Turn;
        }
        has_room
    }

    /// Begins to fetch the next part. Records it if no buffer is free.
    pub(super) fn fetch(&mut self, call: &mut Call<'_, impl Host>) -> Result<(), RemoteError> {
        let start = self.parts.back().map_or(u64::from(self.sent) * call.mtu(), |part| part.end);
        let end = self.answered_bytes(call).min(start + FETCH_BYTES_MAX);
        self.fetch_state = FetchState::Sated;
        if start >= end || self.parts.len() == PARTS_MAX {
            return Ok(());
        }
        match self.reach(call.host, |host| host.fetch(self.rkey, self.va.wrapping_add(start), end - start)) {
            Ok(data) => {
                call.counters.fetches += 1;
                self.parts.push_back(Part { start, end, data });
                Ok(())
            }
            Err(RemoteError::NotReady) => {
                self.fetch_state = FetchState::Room;
                Ok(())
            }
            // The memory is no longer absent.
            Err(RemoteError::Retry) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether nothing can be sent before a fetch that has to wait.
    pub(super) fn is_blocked(&self) -> bool {
        self.parts.is_empty() && self.is_hungry()
    }

    /// Where the data at `offset` is.
    pub(super) fn source(&self, offset: u64) -> Result<Source<'_>, RemoteError> {
        match self.parts.front() {
            Some(part) if part.start <= offset => match part.data.outcome() {
                None => Ok(Source::UnderWay),
                Some(Ok(())) => Ok(Source::Part(&*part.data, offset - part.start)),
                Some(Err(error)) => Err(error),
            },
            _ => Ok(Source::Memory),
        }
    }

    /// Records that the packet with the data at `offset` was sent. If it was the first of a part, the next part is
    /// fetched meanwhile.
    pub(super) fn advance(&mut self, call: &mut Call<'_, impl Host>, offset: u64) {
        self.sent += 1;
        let next = offset + call.mtu();
        let Some(part) = self.parts.front() else { return };
        let (begins, end) = (part.start == offset, part.end);
        if begins && self.parts.len() == 1 {
            // The error is found again when that part is to be sent.
            let _ = self.fetch(call);
        }
        if next >= end {
            self.parts.pop_front();
        }
    }
}

/// Keys of pending changes of memory. Accesses by one key take effect in the order of their requests. Another
/// key may refer to the same bytes without its pager knowing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Keys {
    #[default]
    None,
    One(u32),
    Several,
}

impl Keys {
    fn and(self, other: Keys) -> Keys {
        match (self, other) {
            (Keys::None, keys) | (keys, Keys::None) => keys,
            (one, other) if one == other => one,
            _ => Keys::Several,
        }
    }

    /// Whether there is a key other than `rkey`.
    fn have_another(self, rkey: u32) -> bool {
        self != Keys::None && self != Keys::One(rkey)
    }
}

/// Pending writes, and the ACKs that wait for them.
#[derive(Debug, Default)]
pub(super) struct Settle {
    writes: VecDeque<Write>,
    keys: Keys,
}

#[derive(Debug)]
struct Write {
    psn: Psn,
    transfer: Box<dyn Deferred>,
    /// PSN and MSN of the latest ACK that waits for this write and for none after it.
    ack: Option<(Psn, u32)>,
}

/// State of the pending writes of an entry.
pub(super) enum Settled {
    /// Some are pending; this ACK need not wait for them.
    InPart(Option<(Psn, u32)>),
    All(Option<(Psn, u32)>),
    Failed(Psn, RemoteError),
}

impl Settle {
    /// Queues an ACK for everything up to `psn`, to be sent when the latest write is done.
    pub(super) fn owe_ack(&mut self, up_to: Psn, msn: u32) {
        let Some(write) = self.writes.back_mut() else { return };
        let psn = write.ack.map_or(up_to, |(psn, _)| if psn.is_before(up_to) { up_to } else { psn });
        write.ack = Some((psn, msn));
    }

    /// Removes the completed writes, in order.
    pub(super) fn look(&mut self) -> Settled {
        let mut ack = None;
        while let Some(write) = self.writes.front() {
            match write.transfer.outcome() {
                None => return Settled::InPart(ack),
                Some(Ok(())) => ack = write.ack.or(ack),
                Some(Err(error)) => return Settled::Failed(write.psn, error),
            }
            self.writes.pop_front();
        }
        Settled::All(ack)
    }
}

/// A deferred atomic or FLUSH.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) psn: Psn,
    pub(super) msn: u32,
    pub(super) rkey: u32,
    /// Whether the response has a value, or is empty.
    pub(super) returns_value: bool,
    pub(super) transfer: Box<dyn Deferred>,
}

impl Parked {
    /// The response, once the transfer has ended.
    pub(super) fn answer(&self) -> Option<Result<Owed, RemoteError>> {
        let outcome = self.transfer.outcome()?;
        let (psn, msn) = (self.psn, self.msn);
        Some(outcome.and_then(|()| {
            if !self.returns_value {
                return Ok(Owed::Done { psn, msn });
            }
            let mut value = [0; 8];
            self.transfer.read(0, &mut value)?;
            Ok(Owed::AtomicResult { psn, value: u64::from_ne_bytes(value), msn })
        }))
    }
}

impl Owed {
    /// The PSN at which this response waits for memory, if it does.
    fn waits_at(&self, mtu: u64) -> Option<Psn> {
        match self {
            Owed::Read(read) => {
                let under_way = matches!(read.source(u64::from(read.sent) * mtu), Ok(Source::UnderWay));
                (under_way || read.is_blocked()).then(|| read.next_psn())
            }
            Owed::Settle(_) | Owed::Parked(_) => self.next_psn(),
            _ => None,
        }
    }

    /// PSN of the oldest packet that this still has to answer, if any.
    pub(super) fn next_psn(&self) -> Option<Psn> {
        match self {
            Owed::Read(read) => Some(read.next_psn()),
            Owed::Settle(settle) => settle.writes.front().map(|write| write.psn),
            Owed::Parked(parked) => Some(parked.psn),
            Owed::Ack { psn, .. } | Owed::AtomicResult { psn, .. } | Owed::Done { psn, .. } => Some(*psn),
            Owed::Tell(_) => None,
        }
    }

    /// The keys by which this changes memory.
    fn keys(&self) -> Keys {
        match self {
            Owed::Settle(settle) => settle.keys,
            Owed::Parked(parked) => Keys::One(parked.rkey),
            _ => Keys::None,
        }
    }

    /// Whether this is a pending change of memory.
    pub(super) fn is_unsettled(&self) -> bool {
        matches!(self, Owed::Settle(_) | Owed::Parked(_))
    }
}

impl Responder {
    /// Has the deferred operations checked again.
    pub(crate) fn wake(&mut self) {
        self.parked = false;
        self.woken = true;
    }

    /// The PSN at which the oldest pending response waits for memory.
    pub(super) fn waits_at(&self, common: &Common) -> Option<Psn> {
        self.owed.front()?.waits_at(common.mtu())
    }

    /// Whether changes of memory that the peer requested are pending.
    pub(super) fn is_unsettled(&self) -> bool {
        self.owed.iter().any(Owed::is_unsettled)
    }

    /// Writes a packet's data, at once or deferred.
    pub(super) fn write(
        &mut self,
        call: &mut Call<'_, impl Host>,
        rkey: u32,
        va: u64,
        data: &[u8],
    ) -> Result<(), Refusal> {
        match call.host.remote_write(rkey, va, data) {
            Ok(()) => return Ok(()),
            Err(RemoteError::NotReady) if self.writes_under_way() < WRITES_MAX => {}
            Err(error) => return Err(error.into()),
        }
        let transfer = call.host.put(rkey, va, data)?;
        call.counters.puts += 1;
        let write = Write { psn: self.expected, transfer, ack: None };
        if !matches!(self.owed.back(), Some(Owed::Settle(_))) {
            self.owed.push_back(Owed::Settle(Settle::default()));
        }
        if let Some(Owed::Settle(settle)) = self.owed.back_mut() {
            settle.writes.push_back(write);
            settle.keys = settle.keys.and(Keys::One(rkey));
        }
        Ok(())
    }

    fn writes_under_way(&self) -> usize {
        let writes = |owed: &Owed| if let Owed::Settle(settle) = owed { settle.writes.len() } else { 0 };
        self.owed.iter().map(writes).sum()
    }

    /// Completes a receive when all writes before the message are done.
    pub(super) fn tell(&mut self, call: &Call<'_, impl Host>, completion: impl Completion) {
        match self.is_unsettled() {
            true => self.owed.push_back(Owed::Tell(completion.entry())),
            false => call.host.complete_receive(completion),
        }
    }

    /// Delivers the deferred completions that no longer wait for writes. READ responses before them do not matter.
    pub(super) fn tell_settled(&mut self, call: &Call<'_, impl Host>) {
        let mut index = 0;
        while let Some(owed) = self.owed.get(index) {
            match owed {
                Owed::Tell(wc) => {
                    call.host.complete_receive(*wc);
                    self.owed.remove(index);
                }
                owed if owed.is_unsettled() => return,
                _ => index += 1,
            }
        }
    }

    /// Limits deferred completions to the number of pending responses. An unreliable peer gets no RNR NAK: its deferred
    /// completions are limited by the posted receives.
    pub(super) fn require_room_to_tell(&self, common: &Common) -> Result<(), Refusal> {
        let is_full = self.owed.len() >= OWED_MAX && !common.is(QpType::Uc);
        if is_full && self.is_unsettled() { Err(ABSENT) } else { Ok(()) }
    }

    /// While writes are pending, no refusal breaks the connection: its NAK would acknowledge them, and deferred
    /// completions could not be delivered any more. The peer sends the bad packet again, and is refused then.
    pub(super) fn postpone(&mut self, info: &OpcodeInfo, refusal: Refusal) -> Refusal {
        let for_now = matches!(refusal, Refusal::NotReady | Refusal::Rnr { .. });
        if for_now || !self.is_unsettled() {
            return refusal;
        }
        let is_new = |incoming: &mut Incoming| matches!(incoming, Incoming::Send { offset: 0, .. });
        if info.position.is_first()
            && let Some(Incoming::Send { receive, .. }) = self.incoming.take_if(is_new)
        {
            self.give_back(receive);
        }
        UNSETTLED
    }

    /// Whether a new READ by this key must not be fetched yet: earlier READs wait to fetch themselves or are
    /// fetched far enough ahead, or memory is being changed by another key.
    pub(super) fn defers_fetching(&self, rkey: u32) -> bool {
        let (mut fetched_bytes, mut keys) = (0, Keys::None);
        for owed in &self.owed {
            match owed {
                Owed::Read(read) if read.is_hungry() => return true,
                Owed::Read(read) => fetched_bytes += read.fetched_bytes(),
                other => keys = keys.and(other.keys()),
            }
        }
        fetched_bytes >= FETCH_AHEAD_BYTES_MAX || keys.have_another(rkey)
    }

    /// Starts the fetches of waiting READs, oldest first.
    pub(super) fn schedule(&mut self, call: &mut Call<'_, impl Host>) {
        if !std::mem::take(&mut self.woken) || !std::mem::take(&mut self.hungry) {
            return;
        }
        let (mut fetched_bytes, mut keys) = (0, Keys::None);
        for (index, owed) in self.owed.iter_mut().enumerate() {
            let Owed::Read(read) = owed else {
                keys = keys.and(owed.keys());
                continue;
            };
            if read.is_hungry() {
                let is_early = self.hungry || fetched_bytes >= FETCH_AHEAD_BYTES_MAX;
                if index > 0 && (is_early || keys.have_another(read.rkey)) {
                    read.fetch_state = FetchState::Turn;
                } else {
                    // The error is found again when that READ is to be sent.
                    let _ = read.fetch(call);
                }
            }
            fetched_bytes += read.fetched_bytes();
            self.hungry |= read.is_hungry();
        }
        self.preempt();
    }

    /// When the oldest READ is blocked, the newest READ with fetched data gives it up: this queue pair then goes on
    /// whatever others hold.
    pub(super) fn preempt(&mut self) {
        let Some(Owed::Read(first)) = self.owed.front() else { return };
        if !first.is_blocked() {
            return;
        }
        let others = self.owed.iter_mut().skip(1).rev();
        let mut reads = others.filter_map(|owed| if let Owed::Read(read) = owed { Some(read) } else { None });
        // The host wakes the queue pair when the buffers are free.
        self.hungry |= reads.any(ReadAnswer::give_up_room);
    }

    /// Keeps the result of an atomic for duplicates.
    pub(super) fn remember_value(&mut self, at: Psn, value: u64, msn: u32) {
        if let Some(kept) = self.history.iter_mut().rev().find(|kept| kept.psn == at) {
            kept.what = Kept::Atomic { value, msn };
        }
    }

    /// Drops the pending responses from `first` on; their deferred completions are flushed.
    pub(super) fn forget_owed(&mut self, call: &mut Call<'_, impl Host>, first: usize) {
        for owed in self.owed.drain(first..) {
            if let Owed::Tell(wc) = owed {
                call.fail_receive(wc.wr_id, wc.srqn, WcStatus::Flushed);
            }
        }
        self.parked = false;
    }

    /// Queues an ACK that has waited for writes before all others.
    pub(super) fn owe_first(&mut self, common: &Common, ack: Option<(Psn, u32)>) {
        if let Some((psn, msn)) = ack
            && !common.is(QpType::Uc)
        {
            self.owed.push_front(Owed::Ack { psn, syndrome: Syndrome::Ack { credits: 31 }, msn });
        }
    }
}
