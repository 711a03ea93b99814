//! The transport's host: memory through the queue pair's protection domain, shared receives, and where completions go.

use std::net::SocketAddr;
use std::sync::Arc;

use terrace_hostmem::{AtomicOp as MemoryAtomic, CopySource, SharedBytes, Unordered};
use terrace_memory::{Absence, Access, AccessError, AccessNeed, Accessor, FlushScope, Transfer, WindowBind};
use terrace_shm::KeyMemo;
use terrace_transport::{
    AtomicOp, BindWindow, Completion, Data, Deferred, Host, LocalError, PACKET_BYTES_MAX, Qp, QpEvent,
    RecvWr, RemoteAccess, RemoteError, Sge, StagingReservation, Time,
};

use crate::ack::AckEvent;
use crate::cq::poll::CompletionBypass;
use crate::device::Device;
use crate::events::AsyncEvent;
use crate::qp::{CompletionHook, NicState, QpCore, QueuePair};
use crate::srq::Srq;

/// The host of one queue pair. Memory errors become the transport's here and nowhere else.
pub(crate) struct QpHost<'a> {
    qp: &'a QueuePair,
    nic: &'a NicState,
    /// Where completions may bypass their queue to.
    bypass: Option<&'a CompletionBypass<'a>>,
    /// With XRC, the shared receive queue that the request names: it lends its protection domain.
    named_srq: Option<Arc<Srq>>,
    /// The data of the run that the call is about.
    run: Option<SharedBytes<'a>>,
}

impl QpCore {
    /// The transport's queue pair, and the host for a call into it.
    #[inline(always)]
    pub fn parts<'a>(
        &'a mut self,
        qp: &'a QueuePair,
        bypass: Option<&'a CompletionBypass<'a>>,
    ) -> (&'a mut Qp, QpHost<'a>) {
        (&mut self.qp, QpHost::new(qp, &self.nic, bypass))
    }
}

impl<'a> QpHost<'a> {
    /// The host for one call into the transport.
    #[inline(always)]
    pub fn new(qp: &'a QueuePair, nic: &'a NicState, bypass: Option<&'a CompletionBypass<'a>>) -> QpHost<'a> {
        QpHost { qp, nic, bypass, named_srq: None, run: None }
    }

    /// The same for a call about a run with these data.
    pub fn with_run(self, run: Option<SharedBytes<'a>>) -> QpHost<'a> {
        QpHost { run, ..self }
    }

    #[inline(always)]
    fn device(&self) -> &'a Arc<Device> {
        self.qp.device()
    }

    #[inline(always)]
    fn pd(&self) -> u32 {
        self.named_srq.as_ref().map_or(self.qp.pd(), |srq| srq.pd()).handle()
    }

    fn local(&self) -> Accessor {
        Accessor::local(self.pd(), self.qp.qpn())
    }

    /// The accessor of receives: those of a shared receive queue are in that queue's protection domain.
    fn receiver(&self) -> Accessor {
        match self.qp.srq() {
            Some(srq) => Accessor::local(srq.pd().handle(), self.qp.qpn()),
            None => self.local(),
        }
    }

    #[inline]
    fn scatter_as(&self, who: Accessor, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), LocalError> {
        self.scatter_parts(who, sges, offset, data.len(), |at, len| Some(&data[at..at + len]))
    }

    #[inline(never)]
    fn scatter_run(&self, sges: &[Sge], offset: u64) -> Result<(), LocalError> {
        let run = self.run.ok_or(LocalError::Protection)?;
        let part = |at, len| run.part(at, len).map(Unordered);
        self.scatter_parts(self.receiver(), sges, offset, run.bytes(), part)
    }

    /// Copies `len` bytes to `offset` in the list's concatenation, by the parts that `part` gives for a place and a length.
    #[inline(always)]
    fn scatter_parts<S: CopySource>(
        &self,
        who: Accessor,
        sges: &[Sge],
        offset: u64,
        len: usize,
        part: impl Fn(usize, usize) -> Option<S>,
    ) -> Result<(), LocalError> {
        let mut done = 0;
        for piece in Pieces::new(sges, offset, len) {
            let part = part(done, piece.len).ok_or(LocalError::Protection)?;
            let keys = &self.qp.keys;
            let written = self.device().memory.write_from(who, piece.lkey, &keys.received, piece.addr, part);
            written.map_err(local_error)?;
            done += piece.len;
        }
        covers(done, len)
    }

    fn remote(&self, rkey: u32) -> Accessor {
        let absence = if self.qp.magic.contains(rkey) { Absence::Magic } else { Absence::Wait };
        Accessor::remote(self.pd(), self.qp.qpn()).with_absence(absence)
    }

    /// A pager's transfer as the transport's deferred operation. Requests the callbacks: the pager's device has work
    /// now.
    fn deferred(
        &self,
        transfer: Result<Arc<dyn Transfer>, AccessError>,
    ) -> Result<Box<dyn Deferred>, RemoteError> {
        self.device().callbacks.request();
        match transfer {
            Ok(transfer) => Ok(Box::new(Carried(transfer))),
            Err(error) => Err(remote_error(error)),
        }
    }

    /// The same for a change of memory, which ends with the connection.
    fn deferred_change(
        &self,
        transfer: Result<Arc<dyn Transfer>, AccessError>,
    ) -> Result<Box<dyn Deferred>, RemoteError> {
        if let Ok(transfer) = &transfer {
            self.qp.changes.add(transfer);
        }
        self.deferred(transfer)
    }
}

impl Host for QpHost<'_> {
    // Each arm makes its own entry, so that it is made in its place: see `Entries`.
    #[inline(always)]
    fn complete_send(&self, completion: impl Completion) {
        let cq = self.qp.send_cq();
        // Room is reserved only for what the queue counts.
        if let Some(hook) = &self.nic.hook {
            return complete_to_hook(self.device(), hook, completion);
        }
        match self.bypass.and_then(|bypass| bypass.room(cq)) {
            Some(mut room) => room.push(completion.entry()),
            None => {
                cq.push(completion.entry());
            }
        }
    }

    #[inline(always)]
    fn complete_receive(&self, completion: impl Completion) {
        match (self.qp.xrcd(), self.bypass.and_then(|bypass| bypass.room(self.qp.recv_cq()))) {
            (None, Some(mut room)) => room.push(completion.entry()),
            (None, None) => {
                if self.qp.recv_cq().push(completion.entry()) {
                    self.qp.schedule.ack.note(AckEvent::Woken);
                }
            }
            (Some(xrcd), _) => {
                // A destroyed shared receive queue takes its completions along.
                let wc = completion.entry();
                if xrcd.srq(wc.srqn).is_some_and(|srq| srq.complete(wc)) {
                    self.qp.schedule.ack.note(AckEvent::Woken);
                }
            }
        }
    }

    #[cold]
    fn withdraw(&self) {
        if self.nic.local.serves_peers() {
            self.device().memory.set_queue_pair(self.qp.qpn(), None);
        }
    }

    #[cold]
    fn raise(&self, event: QpEvent) {
        if !self.qp.init.raises_events {
            return;
        }
        let qp = self.qp.strong();
        self.device().events.raise(match event {
            QpEvent::Fatal => AsyncEvent::QpFatal(qp),
            QpEvent::RequestError => AsyncEvent::QpRequestError(qp),
            QpEvent::AccessError => AsyncEvent::QpAccessError(qp),
            QpEvent::CommunicationEstablished => AsyncEvent::CommunicationEstablished(qp),
            QpEvent::SqDrained => AsyncEvent::SqDrained(qp),
            // Receives in memory are the queue pair's own: they complete as flushed.
            QpEvent::LastWqeReached if qp.srq().is_none() => return,
            QpEvent::LastWqeReached => AsyncEvent::LastWqeReached(qp),
        });
    }

    fn gather(&self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        let (memory, who, memo) = (&self.device().memory, self.local(), &self.qp.keys.sent);
        // Only a run is so long: string instructions copy it faster into a ring than vectors do.
        let is_unordered = out.len() as u64 > PACKET_BYTES_MAX;
        let mut done = 0;
        for piece in Pieces::new(sges, offset, out.len()) {
            let part = &mut out[done..done + piece.len];
            let read = match is_unordered {
                false => memory.read_again(who, piece.lkey, memo, piece.addr, part),
                true => memory.read_unordered(who, piece.lkey, memo, piece.addr, part),
            };
            read.map_err(local_error)?;
            done += piece.len;
        }
        covers(done, out.len())
    }

    fn scatter(&self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), LocalError> {
        self.scatter_as(self.local(), sges, offset, data)
    }

    #[inline(always)]
    fn scatter_to_receive(&self, sges: &[Sge], offset: u64, data: Data<'_>) -> Result<(), LocalError> {
        match data {
            Data::Bytes(bytes) => self.scatter_as(self.receiver(), sges, offset, bytes),
            Data::Run(_) => self.scatter_run(sges, offset),
        }
    }

    fn remote_check(&self, rkey: u32, va: u64, len: u64, access: RemoteAccess) -> Result<(), RemoteError> {
        let need = match access {
            RemoteAccess::Read => AccessNeed::Read,
            RemoteAccess::Write => AccessNeed::Write,
            RemoteAccess::Atomic => AccessNeed::Atomic,
            // The flush itself checks what its placement needs; a range that is covered is covered for both.
            RemoteAccess::Flush => return Ok(()),
        };
        self.device().memory.announce(self.remote(rkey), rkey, va, len, need).map_err(remote_error)
    }

    fn remote_read(&self, rkey: u32, va: u64, out: &mut [u8]) -> Result<(), RemoteError> {
        self.device().memory.read(self.remote(rkey), rkey, va, out).map_err(remote_error)
    }

    fn remote_write(&self, rkey: u32, va: u64, data: Data<'_>) -> Result<(), RemoteError> {
        let (memory, who, memo) = (&self.device().memory, self.remote(rkey), &KeyMemo::default());
        let written = match data {
            Data::Bytes(bytes) => memory.write_from(who, rkey, memo, va, bytes),
            Data::Run(_) => memory.write_from(who, rkey, memo, va, self.run.ok_or(RemoteError::Operation)?),
        };
        written.map_err(remote_error)
    }

    fn remote_atomic(&self, rkey: u32, va: u64, op: AtomicOp) -> Result<u64, RemoteError> {
        self.device().memory.atomic(self.remote(rkey), rkey, va, memory_atomic(op)).map_err(remote_error)
    }

    fn remote_flush(
        &self,
        rkey: u32,
        va: u64,
        len: u64,
        placement: u8,
        selectivity: u8,
    ) -> Result<(), RemoteError> {
        let scope = FlushScope::from_selectivity(selectivity).ok_or(RemoteError::Invalid)?;
        self.device().memory.flush(self.remote(rkey), rkey, va, len, placement, scope).map_err(remote_error)
    }

    fn fetch(&self, rkey: u32, va: u64, len: u64) -> Result<Box<dyn Deferred>, RemoteError> {
        self.deferred(self.device().memory.fetch(self.remote(rkey), rkey, va, len, &self.qp.waker))
    }

    fn put(&self, rkey: u32, va: u64, data: Data<'_>) -> Result<Box<dyn Deferred>, RemoteError> {
        let put = |bytes: &[u8]| {
            self.deferred_change(self.device().memory.put(self.remote(rkey), rkey, va, bytes, &self.qp.waker))
        };
        match data {
            Data::Bytes(bytes) => put(bytes),
            Data::Run(_) => {
                let run = self.run.ok_or(RemoteError::Operation)?;
                run.with_bytes(put).unwrap_or(Err(RemoteError::Operation))
            }
        }
    }

    fn put_atomic(&self, rkey: u32, va: u64, op: AtomicOp) -> Result<Box<dyn Deferred>, RemoteError> {
        self.deferred_change(self.device().memory.put_atomic(
            self.remote(rkey),
            rkey,
            va,
            memory_atomic(op),
            &self.qp.waker,
        ))
    }

    fn flush(
        &self,
        rkey: u32,
        va: u64,
        len: u64,
        placement: u8,
        selectivity: u8,
    ) -> Result<Box<dyn Deferred>, RemoteError> {
        let scope = FlushScope::from_selectivity(selectivity).ok_or(RemoteError::Invalid)?;
        self.deferred(self.device().memory.flush_paged(
            self.remote(rkey),
            rkey,
            va,
            len,
            placement,
            scope,
            &self.qp.waker,
        ))
    }

    fn check_append(&self, rkey: u32) -> Result<(), RemoteError> {
        self.device().memory.check_append(self.remote(rkey), rkey).map_err(remote_error)
    }

    fn reserve_staging(&self, bytes: u32) -> Option<StagingReservation> {
        self.device().staging.reserve(bytes)
    }

    fn copy_run(&self, out: &mut [u8]) -> Result<(), RemoteError> {
        let run = self.run.ok_or(RemoteError::Operation)?;
        run.copy_into(out).map_err(|_| RemoteError::Operation)
    }

    fn append(&self, rkey: u32, record: &[u8], commit: bool) -> Result<Box<dyn Deferred>, RemoteError> {
        self.deferred(self.device().memory.append(self.remote(rkey), rkey, record, commit, &self.qp.waker))
    }

    fn permits_reads_of(&self, rkey: u32) -> bool {
        self.qp.table_keys.contains(rkey)
    }

    fn remote_invalidate(&self, rkey: u32) -> Result<(), RemoteError> {
        self.device().memory.invalidate(self.remote(rkey), rkey).map_err(remote_error)
    }

    fn local_invalidate(&self, rkey: u32) -> Result<(), LocalError> {
        self.device().memory.invalidate(self.local(), rkey).map_err(local_error)
    }

    fn bind_window(&self, bind: &BindWindow) -> Result<(), LocalError> {
        let access = Access::from_verbs(bind.access).map_err(|_| LocalError::Protection)?;
        let bind = WindowBind {
            window_key: bind.window_rkey,
            new_key: bind.new_rkey,
            region_key: bind.region_lkey,
            addr: bind.addr,
            len: bind.length,
            access,
            pd: self.pd(),
            qpn: self.qp.qpn(),
        };
        self.device().memory.bind_window(&bind).map_err(|error| {
            tracing::debug!(%error, qpn = self.qp.qpn(), "memory window bind refused");
            LocalError::Protection
        })
    }

    fn with_srq<T>(&self, srqn: u32, act: impl FnOnce(&Self) -> T) -> Option<T> {
        let srq = self.qp.xrcd()?.srq(srqn)?;
        Some(act(&QpHost { named_srq: Some(srq), ..*self }))
    }

    fn take_shared_receive(&self) -> Option<RecvWr> {
        match self.named_srq.as_ref().or(self.qp.srq()) {
            Some(srq) => srq.take(),
            None => self.qp.take_receive_entry(),
        }
    }

    fn return_shared_receive(&self, receive: RecvWr) -> Option<RecvWr> {
        // A receive in memory stays with its queue pair: the next entry of the queue is behind it.
        let Some(srq) = self.named_srq.as_ref().or(self.qp.srq()) else { return Some(receive) };
        srq.put_back(receive);
        None
    }

    #[inline(always)]
    fn withholds_receive(&self, peer: &SocketAddr) -> bool {
        self.device().faults.as_ref().is_some_and(|faults| faults.withholds_receive(peer.ip()))
    }

    #[inline(always)]
    fn may_withhold_receives(&self) -> bool {
        self.device().faults.is_some()
    }

    fn pace(&self, now: Time, len: usize) -> Option<Time> {
        self.device().rate_limiter.reserve(now, len)
    }

    fn budget(&self, in_flight_bytes: u64) -> u64 {
        let NicState { budget, counted_bytes, granted_bytes, local, .. } = self.nic;
        match budget {
            // A ring loses no packets: what is in flight there takes no space of any receive buffer.
            Some(_) if local.has_tx_ring() => u64::MAX,
            Some(_) if *granted_bytes > 0 && in_flight_bytes == 0 => *granted_bytes,
            Some(budget) => self.device().in_flight.left(budget, *counted_bytes, in_flight_bytes),
            None => u64::MAX,
        }
    }
}

#[cold]
#[inline(never)]
fn complete_to_hook(device: &Device, hook: &Arc<dyn CompletionHook>, completion: impl Completion) {
    hook.completed(completion.entry());
    device.callbacks.request();
}

/// An access that a pager carries out.
#[derive(Debug)]
struct Carried(Arc<dyn Transfer>);

impl Deferred for Carried {
    fn outcome(&self) -> Option<Result<(), RemoteError>> {
        self.0.outcome().map(|outcome| outcome.map_err(remote_error))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RemoteError> {
        self.0.read(offset, out).map_err(remote_error)
    }
}

fn memory_atomic(op: AtomicOp) -> MemoryAtomic {
    match op {
        AtomicOp::CompareSwap { compare, swap } => MemoryAtomic::CompareSwap { compare, swap },
        AtomicOp::FetchAdd { add } => MemoryAtomic::FetchAdd { add },
        AtomicOp::Write { value } => MemoryAtomic::Write { value },
        AtomicOp::MaskedCompareSwap { compare, swap, compare_mask, swap_mask } => {
            MemoryAtomic::MaskedCompareSwap { compare, swap, compare_mask, swap_mask }
        }
        AtomicOp::MaskedFetchAdd { add, boundary } => MemoryAtomic::MaskedFetchAdd { add, boundary },
    }
}

/// A contiguous part of a scatter/gather list.
struct Piece {
    addr: u64,
    len: usize,
    lkey: u32,
}

/// The parts of a list that `len` bytes from `offset` on fall into.
struct Pieces<'a> {
    sges: std::slice::Iter<'a, Sge>,
    skip: u64,
    left: usize,
}

impl<'a> Pieces<'a> {
    #[inline]
    fn new(sges: &'a [Sge], offset: u64, len: usize) -> Pieces<'a> {
        Pieces { sges: sges.iter(), skip: offset, left: len }
    }
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    #[inline]
    fn next(&mut self) -> Option<Piece> {
        while self.left > 0 {
            let sge = self.sges.next()?;
            let length = u64::from(sge.length);
            if self.skip >= length {
                self.skip -= length;
                continue;
            }
            let skip = std::mem::take(&mut self.skip);
            let len = self.left.min((length - skip) as usize);
            self.left -= len;
            return Some(Piece { addr: sge.addr.wrapping_add(skip), len, lkey: sge.lkey });
        }
        None
    }
}

/// A list that is shorter than what it should hold is the caller's mistake, and is refused like a bad address.
fn covers(done: usize, wanted: usize) -> Result<(), LocalError> {
    if done == wanted { Ok(()) } else { Err(LocalError::Protection) }
}

fn local_error(error: AccessError) -> LocalError {
    tracing::debug!(%error, "local access refused");
    LocalError::Protection
}

/// The error that a peer gets (IBTA volume 1, table 59: remote access error for keys, ranges and permissions).
pub(crate) fn remote_error(error: AccessError) -> RemoteError {
    match error {
        AccessError::NotReady => return RemoteError::NotReady,
        AccessError::Retry => return RemoteError::Retry,
        _ => tracing::debug!(%error, "remote access refused"),
    }
    match error {
        AccessError::UnknownKey
        | AccessError::WrongPd
        | AccessError::WrongQp
        | AccessError::OutOfRange
        | AccessError::Permission
        | AccessError::Fault => RemoteError::Access,
        AccessError::Misaligned => RemoteError::Invalid,
        AccessError::Device
        | AccessError::NoSpace
        | AccessError::Flush
        | AccessError::NotReady
        | AccessError::Retry => RemoteError::Operation,
    }
}
