//! Services that the transport needs from the NIC around it: memory, shared receives, buffers for packets.

use std::fmt::Debug;
use std::net::SocketAddr;

use terrace_wire::{Path, Psn, Time};

use crate::append::StagingReservation;
use crate::data::Data;
use crate::types::{BindWindow, Payload, QpEvent, RecvWr, Sge, Wc};

/// Why a local scatter or gather failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocalError {
    /// The lkey is unknown, belongs to another protection domain, does not cover the range or does not permit
    /// the access; or the memory behind it is gone.
    #[error("local protection error")]
    Protection,
}

/// Why a peer's access failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteError {
    /// The rkey is unknown, belongs to another protection domain, does not cover the range or does not permit
    /// the access; or the memory behind it is gone.
    #[error("remote access error")]
    Access,
    /// An atomic's address is not a multiple of 8, or the request makes no sense for this region.
    #[error("invalid request")]
    Invalid,
    /// The region could not execute the request (a flush that failed).
    #[error("remote operation error")]
    Operation,
    /// The memory is absent: [`Host::fetch`], [`Host::put`] and the like execute the access. From those themselves:
    /// no buffer is free; the queue pair is woken when one is.
    #[error("the memory is not there yet")]
    NotReady,
    /// The memory is absent and being fetched: the peer must retry. From [`Host::fetch`] and the like: the memory is
    /// no longer absent.
    #[error("the memory is being fetched")]
    Retry,
}

/// A deferred access to absent memory, executed outside the queue pair. When it has ended, the owner of
/// the queue pair calls [`Qp::wake`](crate::Qp::wake). Dropping it does not cancel it.
pub trait Deferred: Send + Debug {
    /// Its result; `None` while it is pending.
    fn outcome(&self) -> Option<Result<(), RemoteError>>;
    /// Copies the result of a finished read, from `offset` within the requested range; for an atomic, the 8 bytes
    /// before the operation; for an APPEND, the 8 bytes of the record's offset.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RemoteError>;
}

/// A peer's kind of access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteAccess {
    Read,
    Write,
    Atomic,
    /// FLUSH, with the FETH's placement bits.
    Flush,
}

/// An atomic operation on 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    CompareSwap {
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        add: u64,
    },
    /// Stores; the old value is returned and ignored.
    Write {
        value: u64,
    },
    /// Compares and stores the bits in the masks.
    MaskedCompareSwap {
        compare: u64,
        swap: u64,
        compare_mask: u64,
        swap_mask: u64,
    },
    /// Adds fields, of which `boundary` has the highest bits.
    MaskedFetchAdd {
        add: u64,
        boundary: u64,
    },
}

/// A completion for the host, which has the entry built in its place. A closure would do, but compilers leave
/// the bodies of closures out of line, and then build the entry elsewhere first.
pub trait Completion {
    /// Builds the entry.
    fn entry(self) -> Wc;
}

impl Completion for Wc {
    #[inline(always)]
    fn entry(self) -> Wc {
        self
    }
}

/// The NIC around a queue pair. One is made for each call into the queue pair; it knows the queue pair's
/// protection domain and number, and checks keys against both. What the call completes goes to it at once, in order.
pub trait Host {
    /// Whether ordinary messages and their ACKs may take the fast paths. The general paths have the same effects: a
    /// test compares the two.
    const HAS_FAST_PATHS: bool = true;
    /// Takes the completion of a send work request.
    fn complete_send(&self, completion: impl Completion);
    /// Takes the completion of a receive work request.
    fn complete_receive(&self, completion: impl Completion);
    /// Takes an event of the queue pair.
    fn raise(&self, event: QpEvent);
    /// The queue pair fails, or a request of it does: its peer may no longer access memory without packets. Called
    /// before the completions and events that say so, perhaps more than once.
    fn withdraw(&self) {}
    /// Copies `out.len()` bytes from `offset` in the list's concatenation.
    fn gather(&self, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), LocalError>;
    /// Copies `data` to `offset` in the list's concatenation. The caller has checked the length.
    fn scatter(&self, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), LocalError>;
    /// The same for a receive's list. A receive of a shared receive queue is checked against that queue's protection
    /// domain.
    fn scatter_to_receive(&self, sges: &[Sge], offset: u64, data: Data<'_>) -> Result<(), LocalError>;
    /// Checks the whole range without accessing it. `NotReady` and `Retry` mean that part of it is absent.
    fn remote_check(&self, rkey: u32, va: u64, len: u64, access: RemoteAccess) -> Result<(), RemoteError>;
    fn remote_read(&self, rkey: u32, va: u64, out: &mut [u8]) -> Result<(), RemoteError>;
    fn remote_write(&self, rkey: u32, va: u64, data: Data<'_>) -> Result<(), RemoteError>;
    /// Performs the operation and returns the previous value, as the host's integer.
    fn remote_atomic(&self, rkey: u32, va: u64, op: AtomicOp) -> Result<u64, RemoteError>;
    /// `placement` and `selectivity` are the FETH's fields; selectivity 1 means the whole region.
    fn remote_flush(
        &self,
        rkey: u32,
        va: u64,
        len: u64,
        placement: u8,
        selectivity: u8,
    ) -> Result<(), RemoteError>;
    /// Reads a range of absent memory. A host without absent memory needs neither this nor the next three.
    fn fetch(&self, _rkey: u32, _va: u64, _len: u64) -> Result<Box<dyn Deferred>, RemoteError> {
        Err(RemoteError::Operation)
    }
    /// Writes to absent memory; the data is copied before this returns.
    fn put(&self, _rkey: u32, _va: u64, _data: Data<'_>) -> Result<Box<dyn Deferred>, RemoteError> {
        Err(RemoteError::Operation)
    }
    /// Performs an atomic operation on absent memory.
    fn put_atomic(&self, _rkey: u32, _va: u64, _op: AtomicOp) -> Result<Box<dyn Deferred>, RemoteError> {
        Err(RemoteError::Operation)
    }
    /// Flushes a range that [`Host::remote_flush`] cannot flush at once.
    fn flush(
        &self,
        _rkey: u32,
        _va: u64,
        _len: u64,
        _placement: u8,
        _selectivity: u8,
    ) -> Result<Box<dyn Deferred>, RemoteError> {
        Err(RemoteError::Operation)
    }
    /// Checks whether the peer may append to the region of this key. A host without such regions needs neither this nor
    /// the next three.
    fn check_append(&self, _rkey: u32) -> Result<(), RemoteError> {
        Err(RemoteError::Access)
    }
    /// Reserves memory for a record of several packets. `None` if too much is reserved already: the peer must retry.
    fn reserve_staging(&self, _bytes: u32) -> Option<StagingReservation> {
        None
    }
    /// Copies the data of the run that the call is about; `out` has its length. A host without runs does not need this.
    fn copy_run(&self, _out: &mut [u8]) -> Result<(), RemoteError> {
        Err(RemoteError::Operation)
    }
    /// Appends a record to a region; the data is copied before this returns. Records of a region take their places in
    /// the order of these calls. With `commit`, the record and all before it are persistent when the access has ended.
    /// `NotReady` without any effect if there is no space to keep the request; the queue pair is woken when there is.
    fn append(&self, _rkey: u32, _record: &[u8], _commit: bool) -> Result<Box<dyn Deferred>, RemoteError> {
        Err(RemoteError::Access)
    }
    /// Whether the peer may READ this region whatever the queue pair's own access flags are.
    fn permits_reads_of(&self, _rkey: u32) -> bool {
        false
    }
    /// Invalidates a key on behalf of the peer's SEND with invalidate.
    fn remote_invalidate(&self, rkey: u32) -> Result<(), RemoteError>;
    /// Invalidates a key on behalf of a local work request.
    fn local_invalidate(&self, rkey: u32) -> Result<(), LocalError>;
    fn bind_window(&self, bind: &BindWindow) -> Result<(), LocalError>;
    /// Runs `act` for an XRC request with the host as that shared receive queue sees it: with its receives, and
    /// with memory through its protection domain. `None` where the queue pair's XRC domain has no such queue.
    fn with_srq<T>(&self, _srqn: u32, _act: impl FnOnce(&Self) -> T) -> Option<T>
    where
        Self: Sized,
    {
        None
    }
    /// The oldest receive of the shared receive queue, or of the receive queue that the host keeps.
    fn take_shared_receive(&self) -> Option<RecvWr>;
    /// Takes back what [`Host::take_shared_receive`] has returned and no message has used: it is the oldest again. A host
    /// that cannot take it back returns it, and the queue pair keeps it for its own next message.
    fn return_shared_receive(&self, receive: RecvWr) -> Option<RecvWr> {
        Some(receive)
    }
    /// Whether a request of this peer that would consume a receive is refused as if no receive were posted (fault
    /// injection to observe the peer's RNR handling).
    fn withholds_receive(&self, _peer: &SocketAddr) -> bool {
        false
    }
    /// Whether [`Host::withholds_receive`] can ever be true. If not, messages may take the fast path, which does not call
    /// it: each call may count.
    fn may_withhold_receives(&self) -> bool {
        false
    }
    /// Accounts for a packet of `len` bytes of an unreliable service. Returns until when the queue pair must pause if
    /// the port exceeds its rate limit. These packets are not acknowledged, so no window limits their sender.
    fn pace(&self, _now: Time, _len: usize) -> Option<Time> {
        None
    }
    /// Bytes that requests of a reliable connection may bring into flight while so many bytes of its queue pair are in
    /// flight, as [`Qp::in_flight_bytes`](crate::Qp::in_flight_bytes) counts them. A packet may exceed what is left; with
    /// 0 none may be sent. If that is so while nothing is in flight, no ACK resumes the queue pair. Then
    /// [`Qp::is_blocked_by_budget`](crate::Qp::is_blocked_by_budget) is true, and the owner calls
    /// [`Qp::poll_transmit`](crate::Qp::poll_transmit) when there is budget.
    fn budget(&self, _in_flight_bytes: u64) -> u64 {
        u64::MAX
    }
}

/// Buffer for outgoing packets. Its consumer adds the ICRC.
pub trait Sink {
    /// Longest data of a run in bytes; 0 for a sink that takes no runs. A run is consecutive packets of a SEND, WRITE or APPEND
    /// with more data than the longest packet has bytes (4608), pushed as one: with the headers of the first one, but the opcode of a packet
    /// that had all of the data. For [`Qp::handle_run`] at the peer.
    ///
    /// [`Qp::handle_run`]: crate::Qp::handle_run
    const RUN_BYTES_MAX: u64 = 0;
    /// Buffer for a packet of `len` bytes from the BTH to the pad, or `None` when the sink is full: try again after
    /// the sink was drained. The content is unspecified; every byte must be written.
    fn push(&mut self, path: &Path, len: usize) -> Option<&mut [u8]>;
    /// Removes the last pushed packet.
    fn cancel(&mut self);
    /// Piggybacks an acknowledgement of everything up to `psn` on the last pushed packet, for [`Qp::handle_packet`] at
    /// the peer; false if there is no such packet, or the sink cannot piggyback.
    ///
    /// [`Qp::handle_packet`]: crate::Qp::handle_packet
    fn carry_ack(&mut self, _psn: Psn) -> bool {
        false
    }
    /// Lets what was pushed leave now: the queue pair has other work before it is done. A sink that sends what was
    /// pushed when it is full or done need do nothing.
    fn flush(&mut self) {}
}

/// Takes nothing.
impl Sink for () {
    fn push(&mut self, _path: &Path, _len: usize) -> Option<&mut [u8]> {
        None
    }

    fn cancel(&mut self) {}
}

impl Payload {
    /// Copies `out.len()` bytes from `offset` on. An empty `out` needs no valid SGE.
    ///
    /// # Errors
    /// As for [`Host::gather`].
    #[inline]
    pub(crate) fn gather(&self, host: &impl Host, offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        match self {
            Payload::Sge(_) | Payload::Sges(_) if out.is_empty() => Ok(()),
            Payload::Sge(_) | Payload::Sges(_) => host.gather(self.sges().unwrap_or_default(), offset, out),
            Payload::Inline(bytes) => {
                let start = offset as usize;
                out.copy_from_slice(&bytes[start..start + out.len()]);
                Ok(())
            }
            Payload::Provided(provided) => match provided.source.copy(provided.offset + offset, out) {
                true => Ok(()),
                false => Err(LocalError::Protection),
            },
            Payload::Masked(masked) => {
                let masks = masked.wire_masks();
                let start = offset as usize;
                out.copy_from_slice(&masks[start..start + out.len()]);
                Ok(())
            }
        }
    }
}
