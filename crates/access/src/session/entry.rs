//! A work request of the session, and the memory that it touches.

use std::sync::Arc;

use smallvec::SmallVec;
use terrace_transport::{SendFlags, SendOp, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus};

use crate::pages::PageBitmap;
use crate::proto::Mode;
use crate::region::{Knowledge, Region};

/// Number of a work request since the session began.
pub(super) type Seq = u64;

/// The kind of a request, as far as order depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// RDMA READ.
    Read,
    /// RDMA WRITE without immediate data.
    Write,
    /// Compare and swap, fetch and add: both reads and writes, there and here.
    Atomic,
    /// SENDs, immediate data, ATOMIC WRITE, FLUSH and local operations of the NIC: an observer of one may rely on all
    /// earlier requests.
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
            | SendOp::LocalInvalidate(_)
            | SendOp::BindWindow(_) => Kind::Signal,
        }
    }
}

/// How a request is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Unchanged, by the queue pair.
    Queue,
    /// A READ whose data is inspected, because it may be missing.
    Checked,
    /// A READ by RPC.
    Fetch,
    /// A WRITE by RPC.
    Store,
}

/// The memory of the peer that a request touches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    pub(super) rkey: u32,
    pub(super) va: u64,
    pub(super) length: u64,
    pub(super) writes: bool,
    /// The region underneath and the offset on its grid, of an extended region; `None` for a plain one.
    place: Place,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// It may be any memory of the peer's.
    Unknown,
    Plain,
    Grid {
        region_id: u64,
        offset: u64,
    },
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
        let place = match known {
            Knowledge::Unknown => Place::Unknown,
            Knowledge::Plain => Place::Plain,
            Knowledge::Extended(region) if region.layout().covers(va, length) => {
                Place::Grid { region_id: region.description().region_id, offset: region.layout().grid(va) }
            }
            Knowledge::Extended(_) => Place::Unknown,
        };
        (length > 0).then_some(Remote { rkey, va, length, writes, place })
    }

    /// Whether two requests may touch the same memory. A plain registration of memory that is part of an extended
    /// region, too, is not recognized.
    pub(super) fn overlaps(&self, other: &Remote) -> bool {
        match (self.place, other.place) {
            (Place::Unknown, _) | (_, Place::Unknown) => true,
            (
                Place::Grid { region_id: left, offset: start },
                Place::Grid { region_id: right, offset: other_start },
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
    /// Bytes sent, or read.
    pub(super) length: u64,
    pub(super) kind: Kind,
    pub(super) way: Way,
    pub(super) remote: Option<Remote>,
    /// The region of an access to an extended region within its bounds.
    pub(super) region: Option<Arc<Region>>,
    /// Whether its target is known to be all in memory, or to be served as if it were.
    pub(super) is_plain: bool,
    pub(super) issued: bool,
    /// Whether its completion was reported before older ones'.
    pub(super) completed: bool,
    /// Whether the session counts it among the READs that may need calls.
    pub(super) is_counted: bool,
    /// Work requests on the queue pair that it waits for.
    pub(super) posts: u32,
    /// RPCs that it waits for, sent or not.
    pub(super) calls: u32,
    /// Pages of a checked READ that looked absent, to be fetched when all of its posts are back.
    pub(super) suspects: PageBitmap,
    /// Buffers of this READ into which an RPC of an earlier READ may put data after this one's has come.
    pub(super) overwritten: SmallVec<[Local; 1]>,
    /// The status of its failure, and the NIC's code.
    pub(super) failure: Option<(WcStatus, u32)>,
    /// The NIC's completion of a request that it carried out unchanged.
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
            way: Way::Queue,
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

    /// The elements of its list; none for a payload that is not the program's memory.
    pub(super) fn sges(&self) -> &[Sge] {
        self.wr.payload.sges().unwrap_or_default()
    }

    /// Whether no post or call of it is in flight.
    pub(super) fn is_done(&self) -> bool {
        self.issued && self.posts == 0 && self.calls == 0
    }

    /// Whether a range of local memory is among its own.
    pub(super) fn touches(&self, local: &Local) -> bool {
        self.sges().iter().any(|sge| Local::from(sge).overlaps(local))
    }

    /// Whether two requests use the same local memory.
    pub(super) fn shares_memory(&self, other: &Entry) -> bool {
        self.sges().iter().any(|sge| other.touches(&sge.into()))
    }

    /// Whether two requests touch the same memory of the peer's.
    pub(super) fn meets(&self, other: &Entry) -> bool {
        matches!((&self.remote, &other.remote), (Some(left), Some(right)) if left.overlaps(right))
    }

    /// Whether it is a READ of which part may come by RPC, now or later.
    pub(super) fn may_fetch(&self) -> bool {
        matches!(self.way, Way::Checked | Way::Fetch)
    }

    /// Records a failure; the first one counts.
    pub(super) fn fail(&mut self, status: WcStatus, vendor_err: u32) {
        self.failure.get_or_insert((status, vendor_err));
    }

    /// The completion, if it has one.
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
        SendOp::LocalInvalidate(_) => WcOpcode::LocalInv,
        SendOp::BindWindow(_) => WcOpcode::BindMw,
    }
}
