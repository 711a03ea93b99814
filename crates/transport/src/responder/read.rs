//! The response to a READ. Absent memory is fetched ahead, at most [`FETCH_BYTES_MAX`] at a time.

use std::collections::VecDeque;

use terrace_wire::{Psn, Reth};

use crate::common::{Call, Common};
use crate::host::{Deferred, Host, RemoteAccess, RemoteError};

/// Most bytes of a READ per fetch; a multiple of every path MTU. While they are sent, as many are fetched.
const FETCH_BYTES_MAX: u64 = 64 << 10;

/// Parts of a READ that are fetched at a time: one is sent while the next is fetched.
const PARTS_MAX: usize = 2;

/// The response to a READ.
#[derive(Debug)]
pub(super) struct ReadResponse {
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
    /// It need not wait: its next part is being fetched, or is fetched when it is to be sent.
    Scheduled,
    /// It waits for earlier READs.
    AwaitsReads,
    /// No buffer was free. The host wakes the queue pair when one is. Until then the host gets no other request, so that
    /// queue pairs that have waited longer come first.
    AwaitsBuffer,
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
    Fetching,
}

impl ReadResponse {
    pub(super) fn new(common: &Common, reth: Reth, psn: Psn, srqn: Option<u32>) -> ReadResponse {
        let length = u64::from(reth.length);
        let packets = length.div_ceil(common.mtu()).max(1) as u32;
        ReadResponse {
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
            fetch_state: FetchState::Scheduled,
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
                self.fetch_state = FetchState::AwaitsReads;
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
    pub(super) fn is_waiting(&self) -> bool {
        self.fetch_state != FetchState::Scheduled
    }

    /// Whether no buffer was free for its next fetch.
    pub(super) fn awaits_buffer(&self) -> bool {
        self.fetch_state == FetchState::AwaitsBuffer
    }

    /// Bytes that are fetched or being fetched, and not sent.
    pub(super) fn fetched_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.end - part.start).sum()
    }

    /// Has it wait for earlier READs before it fetches.
    pub(super) fn defer_fetch(&mut self) {
        self.fetch_state = FetchState::AwaitsReads;
    }

    /// Drops the fetched parts; true if there were any. Parts whose oldest is still being fetched cannot be dropped.
    pub(super) fn release_buffers(&mut self) -> bool {
        let has_buffers = self.parts.front().is_some_and(|part| part.data.outcome().is_some());
        if has_buffers {
            self.parts.clear();
            self.fetch_state = FetchState::AwaitsReads;
        }
        has_buffers
    }

    /// Begins to fetch the next part. Records it if no buffer is free.
    pub(super) fn fetch(&mut self, call: &mut Call<'_, impl Host>) -> Result<(), RemoteError> {
        let start = self.parts.back().map_or(u64::from(self.sent) * call.mtu(), |part| part.end);
        let end = self.answered_bytes(call).min(start + FETCH_BYTES_MAX);
        self.fetch_state = FetchState::Scheduled;
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
                self.fetch_state = FetchState::AwaitsBuffer;
                Ok(())
            }
            // The memory is no longer absent.
            Err(RemoteError::Retry) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether nothing can be sent before a fetch that has to wait.
    pub(super) fn is_blocked(&self) -> bool {
        self.parts.is_empty() && self.is_waiting()
    }

    /// Where the data at `offset` is.
    pub(super) fn source(&self, offset: u64) -> Result<Source<'_>, RemoteError> {
        match self.parts.front() {
            Some(part) if part.start <= offset => match part.data.outcome() {
                None => Ok(Source::Fetching),
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
