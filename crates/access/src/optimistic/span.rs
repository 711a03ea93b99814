//! What unfinished requests access, in a few bytes each: a new request is compared with all of them.

use terrace_transport::SendFlags;

use super::entry::Entry;
use super::order::{Class, Order, OrderBits, Rule};

/// A range of addresses, by its first and last byte. The empty one ends before it begins.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    first: u64,
    last: u64,
}

impl Bounds {
    const NONE: Bounds = Bounds { first: u64::MAX, last: 0 };
    const ALL: Bounds = Bounds { first: 0, last: u64::MAX };

    fn of(addr: u64, length: u64) -> Bounds {
        match length.checked_sub(1) {
            Some(rest) => Bounds { first: addr, last: addr.saturating_add(rest) },
            None => Bounds::NONE,
        }
    }

    fn with(self, other: Bounds) -> Bounds {
        Bounds { first: self.first.min(other.first), last: self.last.max(other.last) }
    }

    fn overlaps(&self, other: &Bounds) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// What of a request decides whether a later one has to look at it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// Encloses what it accesses of the peer's memory.
    remote: Bounds,
    /// Encloses what it accesses of the program's memory.
    local: Bounds,
    class: Class,
    /// Whether it changes the peer's memory, and the program's.
    writes: bool,
    returns_data: bool,
    /// Whether all later requests follow it.
    is_followed: bool,
}

impl Span {
    pub(super) fn of(entry: &Entry) -> Span {
        let local = entry.sges().iter().map(|sge| Bounds::of(sge.addr, sge.length.into()));
        Span {
            remote: match &entry.remote {
                None => Bounds::NONE,
                Some(remote) if remote.has_place() => Bounds::of(remote.va, remote.length),
                Some(_) => Bounds::ALL,
            },
            local: local.fold(Bounds::NONE, Bounds::with),
            class: entry.class,
            writes: entry.class.writes(),
            returns_data: entry.returns_data(),
            is_followed: entry.order.contains(OrderBits::AFTER),
        }
    }

    fn may_conflict(&self, other: &Span) -> bool {
        (self.writes | other.writes) & self.remote.overlaps(&other.remote)
            | (self.returns_data | other.returns_data) & self.local.overlaps(&other.local)
    }
}

/// Which earlier requests a new one has to look at.
pub(super) struct Concerns {
    span: Span,
    /// By class: whether it passes those that it does not conflict with.
    passes: [bool; Class::ALL.len()],
    is_fenced: bool,
}

impl Concerns {
    pub(super) fn of(entry: &Entry, span: Span, order: Order) -> Concerns {
        let follows_all = entry.order.contains(OrderBits::BEFORE);
        let passes = |class| !follows_all && order.rule(class, entry.class, false) == Rule::Pass;
        let is_fenced = entry.wr.flags.contains(SendFlags::FENCE);
        Concerns { span, passes: Class::ALL.map(passes), is_fenced }
    }

    /// False for an earlier request that this one passes in any case.
    pub(super) fn include(&self, earlier: &Span) -> bool {
        !self.passes[earlier.class as usize]
            | earlier.is_followed
            | (self.is_fenced & earlier.returns_data)
            | self.span.may_conflict(earlier)
    }
}
