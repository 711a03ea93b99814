//! A work request of the session.

use std::sync::Arc;

use smallvec::SmallVec;
use terrace_transport::{SendOp, SendWr, Sge, Wc, WcStatus};

use crate::pages::PageBitmap;
use crate::proto::Mode;
use crate::region::{Knowledge, Region};
use crate::request::{self, Local, Remote};

/// The sequence number of a work request in its session.
pub(super) type Seq = u64;

/// The ordering class of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// RDMA READ.
    Read,
    /// RDMA WRITE without immediate data.
    Write,
    /// Compare and swap, fetch and add: both read and write remote memory, and write local memory.
    Atomic,
    /// SENDs, immediate data, ATOMIC WRITE, FLUSH and local operations of the NIC: an observer of one may rely on the
    /// effects of all earlier requests.
    Signal,
}

impl Kind {
    fn of(op: &SendOp) -> Kind {
        match op {
            SendOp::Read { .. } => Kind::Read,
            SendOp::Write { .. } => Kind::Write,
            SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::MaskedCompareSwap { .. }
            | SendOp::MaskedFetchAdd { .. } => Kind::Atomic,
            SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::SendInvalidate(_)
            | SendOp::WriteImm { .. }
            | SendOp::AtomicWrite { .. }
            | SendOp::Flush { .. }
            | SendOp::Append { .. }
            | SendOp::LocalInvalidate(_)
            | SendOp::BindWindow(_)
            | SendOp::Nop => Kind::Signal,
        }
    }
}

/// The route by which a request is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// The queue pair executes the unchanged request.
    QueuePair,
    /// READs on the queue pair, whose data is compared with the signature page.
    Checked,
    /// A READ by RPC.
    Fetch,
    /// A WRITE by RPC.
    Store,
}

/// A work request.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) wr: SendWr,
    /// Bytes to send, or to read.
    pub(super) length: u64,
    pub(super) kind: Kind,
    pub(super) route: Route,
    pub(super) remote: Option<Remote>,
    /// The region, if the request accesses an extended region within its bounds.
    pub(super) region: Option<Arc<Region>>,
    /// Whether the target is known to be a plain region, or an extended one in plain mode.
    pub(super) is_plain: bool,
    pub(super) issued: bool,
    /// Whether its completion was reported before those of older requests.
    pub(super) completed: bool,
    /// Whether the session's `checked_count` includes it.
    pub(super) is_counted: bool,
    /// The number of its posts that are queued or on the queue pair.
    pub(super) posts: u32,
    /// The number of its RPCs that are unsent or unanswered.
    pub(super) calls: u32,
    /// Pages of a checked READ that matched the signature page, to be fetched when all of its posts have completed.
    pub(super) suspects: PageBitmap,
    /// Buffers of this READ into which an RPC of an earlier READ may write after this READ's data has arrived.
    pub(super) overwritten: SmallVec<[Local; 1]>,
    /// The status of its failure, and the vendor error.
    pub(super) failure: Option<(WcStatus, u32)>,
    /// The NIC's completion of a request on the route `QueuePair`.
    pub(super) wc: Option<Wc>,
}

impl Entry {
    pub(super) fn new(wr: SendWr, known: &Knowledge) -> Entry {
        let length = match wr.op {
            SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::MaskedCompareSwap { .. }
            | SendOp::MaskedFetchAdd { .. } => 8,
            _ => wr.payload.len(),
        };
        let remote = Remote::of(&wr.op, length, known);
        let is_plain = match known {
            Knowledge::Unknown => false,
            Knowledge::Plain => true,
            Knowledge::Extended(region) => region.description().mode == Mode::Plain,
        };
        let region = match (known, &remote) {
            (Knowledge::Extended(region), Some(remote)) if !is_plain => {
                region.layout().covers(remote.va, remote.length).then(|| Arc::clone(region))
            }
            _ => None,
        };
        Entry {
            length,
            kind: Kind::of(&wr.op),
            route: Route::QueuePair,
            remote,
            region,
            is_plain,
            issued: false,
            completed: false,
            is_counted: false,
            posts: 0,
            calls: 0,
            suspects: PageBitmap::default(),
            overwritten: SmallVec::new(),
            failure: None,
            wc: None,
            wr,
        }
    }

    /// The elements of its scatter/gather list; none for a payload outside the program's memory.
    pub(super) fn sges(&self) -> &[Sge] {
        self.wr.payload.sges().unwrap_or_default()
    }

    /// Whether no post or call of it is in flight.
    pub(super) fn is_done(&self) -> bool {
        self.issued && self.posts == 0 && self.calls == 0
    }

    /// The smallest range that encloses its buffers.
    pub(super) fn local_bounds(&self) -> Local {
        let used = || self.sges().iter().filter(|sge| sge.length > 0);
        let start = used().map(|sge| sge.addr).min().unwrap_or_default();
        let end = used().map(|sge| sge.addr.saturating_add(sge.length.into())).max().unwrap_or_default();
        Local { addr: start, length: end - start }
    }

    /// Whether its buffers overlap a range of local memory.
    pub(super) fn overlaps_local(&self, local: &Local) -> bool {
        self.sges().iter().any(|sge| Local::from(sge).overlaps(local))
    }

    /// Whether the buffers of two requests overlap.
    pub(super) fn shares_local_memory(&self, other: &Entry) -> bool {
        self.sges().iter().any(|sge| other.overlaps_local(&sge.into()))
    }

    /// Whether two requests access the same memory of the peer.
    pub(super) fn overlaps_remote(&self, other: &Entry) -> bool {
        matches!((&self.remote, &other.remote), (Some(left), Some(right)) if left.overlaps(right))
    }

    /// Whether it is a READ that may need RPCs.
    pub(super) fn may_fetch(&self) -> bool {
        matches!(self.route, Route::Checked | Route::Fetch)
    }

    /// Records a failure, unless one is recorded already.
    pub(super) fn fail(&mut self, status: WcStatus, vendor_err: u32) {
        self.failure.get_or_insert((status, vendor_err));
    }

    /// The completion; `None` for an unsignaled success.
    pub(super) fn completion(&self, qpn: u32, signal_all: bool) -> Option<Wc> {
        request::completion(&self.wr, self.length, self.failure, self.wc, qpn, signal_all)
    }
}
