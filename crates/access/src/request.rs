//! What a work request accesses, and its completion: for sessions and for optimistic access.

use terrace_transport::{SendFlags, SendOp, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus};

use crate::proto::Status;
use crate::region::Knowledge;

/// The peer's memory that a request accesses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub(crate) rkey: u32,
    pub(crate) va: u64,
    pub(crate) length: u64,
    pub(crate) writes: bool,
    location: Location,
}

/// The identity of accessed memory, for the detection of overlaps.
#[derive(Clone, Copy, Debug)]
enum Location {
    /// Possibly any memory of the peer.
    Unknown,
    /// A plain region: its addresses identify the memory.
    Plain,
    /// An extended region: the registration and the offset on its grid.
    Grid { region_id: u64, offset: u64 },
}

impl Remote {
    pub(crate) fn of(op: &SendOp, length: u64, known: &Knowledge) -> Option<Remote> {
        let (va, rkey, length, writes) = match *op {
            SendOp::Read { va, rkey } => (va, rkey, length, false),
            SendOp::Write { va, rkey } | SendOp::WriteImm { va, rkey, .. } => (va, rkey, length, true),
            SendOp::CompareSwap { va, rkey, .. }
            | SendOp::FetchAdd { va, rkey, .. }
            | SendOp::MaskedCompareSwap { va, rkey, .. }
            | SendOp::MaskedFetchAdd { va, rkey, .. }
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

    /// Whether its addresses tell what it accesses ([`Remote::overlaps`]).
    pub(crate) fn has_place(&self) -> bool {
        !matches!(self.location, Location::Unknown)
    }

    /// Whether two requests may access the same memory. Two registrations may have memory in common: by the addresses, if
    /// both are registered at those of the peer's program. What they share at other addresses is not detected.
    pub(crate) fn overlaps(&self, other: &Remote) -> bool {
        match (self.location, other.location) {
            (Location::Unknown, _) | (_, Location::Unknown) => true,
            (
                Location::Grid { region_id: left, offset: start },
                Location::Grid { region_id: right, offset: other_start },
            ) if left == right => ranges_overlap(start, self.length, other_start, other.length),
            _ => ranges_overlap(self.va, self.length, other.va, other.length),
        }
    }
}

/// A range of the program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Local {
    pub(crate) addr: u64,
    pub(crate) length: u64,
}

impl Local {
    pub(crate) fn overlaps(&self, other: &Local) -> bool {
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

/// The completion of a work request of `length` bytes; `None` for an unsignaled success. `wc` is the NIC's completion, if
/// the NIC executed the request.
pub(crate) fn completion(
    wr: &SendWr,
    length: u64,
    failure: Option<(WcStatus, u32)>,
    wc: Option<Wc>,
    qpn: u32,
    signal_all: bool,
) -> Option<Wc> {
    let (status, vendor_err) = failure.unwrap_or_default();
    let failed = status != WcStatus::Success;
    if !failed && !signal_all && !wr.flags.contains(SendFlags::SIGNALED) {
        return None;
    }
    let wc = match wc {
        Some(wc) if wc.status == status => wc,
        _ => Wc {
            status,
            opcode: completion_opcode(&wr.op),
            vendor_err,
            byte_len: length.min(u32::MAX.into()) as u32,
            qpn,
            flags: WcFlags::empty(),
            solicited: failed,
            ..Wc::default()
        },
    };
    Some(Wc { wr_id: wr.wr_id, ..wc })
}

fn completion_opcode(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInvalidate(_) => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::RdmaWrite,
        SendOp::Read { .. } => WcOpcode::RdmaRead,
        SendOp::CompareSwap { .. } | SendOp::MaskedCompareSwap { .. } => WcOpcode::CompSwap,
        SendOp::FetchAdd { .. } | SendOp::MaskedFetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::AtomicWrite { .. } => WcOpcode::AtomicWrite,
        SendOp::Flush { .. } => WcOpcode::Flush,
        SendOp::Append { .. } => WcOpcode::Append,
        SendOp::LocalInvalidate(_) => WcOpcode::LocalInv,
        SendOp::BindWindow(_) => WcOpcode::BindMw,
        SendOp::Nop => WcOpcode::Nop,
    }
}

/// The completion status for a server's status; `None` for a status that is not a failure of the work request.
pub(crate) fn completion_status(status: Status) -> Option<WcStatus> {
    match status {
        Status::Ok | Status::Busy | Status::Plain => None,
        Status::NoSuchRegion | Status::AccessDenied | Status::OutOfRange => Some(WcStatus::RemoteAccess),
        Status::Invalid | Status::Unsupported => Some(WcStatus::RemoteInvalidRequest),
        Status::DeviceError | Status::NoSpace => Some(WcStatus::RemoteOperation),
        Status::ClientMemory => Some(WcStatus::LocalProtection),
        Status::Disconnected => Some(WcStatus::RetryExceeded),
    }
}
