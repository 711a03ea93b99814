//! A work request of the session, and the memory that it accesses.

use std::sync::Arc;

use smallvec::SmallVec;
use terrace_transport::{SendFlags, SendOp, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus};

use crate::pages::PageBitmap;
use crate::proto::Mode;
use crate::region::{Knowledge, Region};

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
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => Kind::Atomic,
            SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::SendInvalidate(_)
            | SendOp::WriteImm { .. }
            | SendOp::AtomicWrite { .. }
            | SendOp::Flush { .. }
            | SendOp::Append { .. }
            | SendOp::LocalInvalidate(_)
            | SendOp::BindWindow(_) => Kind::Signal,
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

/// The peer's memory that a request accesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    pub(super) rkey: u32,
    pub(super) va: u64,
    pub(super) length: u64,
    pub(super) writes: bool,
    location: Location,
}

#[derive(Clone, Copy, Debug)]
/// The identity of accessed memory, for the detection of overlaps.
enum Location {
    /// Possibly any memory of the peer.
    Unknown,
    /// A plain region: its rkey and addresses identify the memory.
    Plain,
    /// An extended region: the registration and the offset on its grid.
    Grid { region_id: u64, offset: u64 },
}

impl Remote {
    fn of(op: &SendOp, length: u64, known: &Knowledge) -> Option<Remote> {
        let (va, rkey, length, writes) = match *op {
            SendOp::Read { va, rkey } => (va, rkey, length, false),
            SendOp::Write { va, rkey } | SendOp::WriteImm { va, rkey, .. } => (va, rkey, length, true),
            SendOp::CompareSwap { va, rkey, .. }
            | SendOp::FetchAdd { va, rkey, .. }
            | SendOp::AtomicWrite { va, rkey } => (va, rkey, 8, true),
            SendOp::Flush { va, rkey, length, .. } => (va, rkey, length.into(), false),
            _ => return None,
        };
        let location = match known {
            Knowledge::Unknown => Location::Unknown,
            Knowledge::Plain => Location::Plain,
            Knowledge::Extended(region) if region.layout().covers(va, length) => {
                Location::Grid { region_id: region.description().region_id, offset: region.layout().grid(va) }
            }
            Knowledge::Extended(_) => Location::Unknown,
        };
        (length > 0).then_some(Remote { rkey, va, length, writes, location })
    }

    /// Whether two requests may access the same memory. Overlaps between a plain and an extended registration of the
    /// same memory are not detected.
    pub(super) fn overlaps(&self, other: &Remote) -> bool {
        match (self.location, other.location) {
            (Location::Unknown, _) | (_, Location::Unknown) => true,
            (
                Location::Grid { region_id: left, offset: start },
                Location::Grid { region_id: right, offset: other_start },
            ) => left == right && ranges_overlap(start, self.length, other_start, other.length),
            _ => self.rkey == other.rkey && ranges_overlap(self.va, self.length, other.va, other.length),
        }
    }
}

/// A range of the program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Local {
    pub(super) addr: u64,
    pub(super) length: u64,
}

impl Local {
    pub(super) fn overlaps(&self, other: &Local) -> bool {
        ranges_overlap(self.addr, self.length, other.addr, other.length)
    }
}

impl From<&Sge> for Local {
    fn from(sge: &Sge) -> Local {
        Local { addr: sge.addr, length: sge.length.into() }
    }
}

fn ranges_overlap(start: u64, length: u64, other_start: u64, other_length: u64) -> bool {
    length > 0
        && other_length > 0
        && start <= other_start.saturating_add(other_length - 1)
        && other_start <= start.saturating_add(length - 1)
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
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => 8,
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
        let (status, vendor_err) = self.failure.unwrap_or_default();
        let failed = status != WcStatus::Success;
        if !failed && !signal_all && !self.wr.flags.contains(SendFlags::SIGNALED) {
            return None;
        }
        let wc = match self.wc {
            Some(wc) if wc.status == status => wc,
            _ => Wc {
                status,
                opcode: completion_opcode(&self.wr.op),
                vendor_err,
                byte_len: self.length.min(u32::MAX.into()) as u32,
                qpn,
                flags: WcFlags::empty(),
                solicited: failed,
                ..Wc::default()
            },
        };
        Some(Wc { wr_id: self.wr.wr_id, ..wc })
    }
}

fn completion_opcode(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInvalidate(_) => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::RdmaWrite,
        SendOp::Read { .. } => WcOpcode::RdmaRead,
        SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::AtomicWrite { .. } => WcOpcode::AtomicWrite,
        SendOp::Flush { .. } => WcOpcode::Flush,
        SendOp::Append { .. } => WcOpcode::Append,
        SendOp::LocalInvalidate(_) => WcOpcode::LocalInv,
        SendOp::BindWindow(_) => WcOpcode::BindMw,
    }
}
