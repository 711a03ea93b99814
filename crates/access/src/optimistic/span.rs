//! What unfinished requests access, in a few bytes each: a new request is compared with all of them.

use super::order::{Class, Order, OrderBits, Rule};

/// A range of addresses, by its first and last byte. The empty one ends before it begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    first: u64,
    last: u64,
}

impl Bounds {
    pub(super) const NONE: Bounds = Bounds { first: u64::MAX, last: 0 };
    pub(super) const ALL: Bounds = Bounds { first: 0, last: u64::MAX };

    pub(super) fn of(addr: u64, length: u64) -> Bounds {
        match length.checked_sub(1) {
            Some(rest) => Bounds { first: addr, last: addr.saturating_add(rest) },
            None => Bounds::NONE,
        }
    }

    pub(super) fn with(self, other: Bounds) -> Bounds {
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
    pub(super) remote: Bounds,
    /// Encloses what it accesses of the program's memory.
    pub(super) local: Bounds,
    pub(super) class: Class,
    /// Whether it changes the program's memory.
    pub(super) returns_data: bool,
    pub(super) order: OrderBits,
    /// Whether it follows earlier requests that change the program's memory.
    pub(super) is_fenced: bool,
}

impl Span {
    fn may_conflict(&self, other: &Span) -> bool {
        (self.class.writes() | other.class.writes()) & self.remote.overlaps(&other.remote)
            | (self.returns_data | other.returns_data) & self.local.overlaps(&other.local)
    }
}

/// Which earlier requests a new one has to look at.
pub(super) struct Concerns {
    span: Span,
    /// By class: whether it passes those that it does not conflict with.
    passes: [bool; Class::ALL.len()],
}

impl Concerns {
    pub(super) fn of(span: Span, order: Order) -> Concerns {
        let follows_all = span.order.contains(OrderBits::BEFORE);
        let passes = |class| !follows_all && order.rule(class, span.class, false) == Rule::Pass;
        Concerns { span, passes: Class::ALL.map(passes) }
    }

    /// False for an earlier request that this one passes in any case.
    pub(super) fn include(&self, earlier: &Span) -> bool {
        !self.passes[earlier.class as usize]
            | earlier.order.contains(OrderBits::AFTER)
            | (self.span.is_fenced & earlier.returns_data)
            | self.span.may_conflict(earlier)
    }
}
