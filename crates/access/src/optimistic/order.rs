//! Which work requests of a queue pair may pass each other (NP-RDMA, section 3.3).
//!
//! A request that finds a page absent takes longer than those behind it, so the order of a queue pair is a choice. It is
//! one table: what a later request does, given an earlier one that is not finished, and whether their memory conflicts.
//! Two requests conflict if they access a byte of the peer's memory that one of them changes, or a byte of the program's
//! memory that one of them changes.

use bitflags::bitflags;
use terrace_transport::SendOp;

/// Which order a queue pair keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Requests whose memory conflicts keep their order, and a message follows what was written before it. Others may pass
    /// a request that waits for a page.
    #[default]
    Default,
    /// The order of the verbs (IBTA volume 1, 10.8.3.3, the table of ordering rules): without FENCE, only READs may be
    /// passed, by requests that do not return data. (The table lets them pass atomics as well, of which it means the
    /// results: a responder executes all requests in order.)
    Strict,
}

bitflags! {
    /// The ordering bits of a work request.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct OrderBits: u32 {
        /// The request follows all earlier ones.
        const BEFORE = 1;
        /// All later requests follow this one.
        const AFTER = 1 << 1;
    }
}

/// The class of a work request in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Class {
    /// RDMA READ.
    Read,
    /// RDMA WRITE.
    Write,
    /// Atomic operations, ATOMIC WRITE included.
    Atomic,
    /// RDMA WRITE with immediate: a write and a message.
    WriteImm,
    /// SENDs, FLUSH, APPEND, and operations of the NIC on keys: what was written before is visible to all that see their effect.
    Message,
}

impl Class {
    /// All classes, in the order of the table.
    pub const ALL: [Class; 5] = [Class::Read, Class::Write, Class::Atomic, Class::WriteImm, Class::Message];

    /// The class of an operation.
    pub fn of(op: &SendOp) -> Class {
        match op {
            SendOp::Read { .. } => Class::Read,
            SendOp::Write { .. } => Class::Write,
            SendOp::WriteImm { .. } => Class::WriteImm,
            SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::MaskedCompareSwap { .. }
            | SendOp::MaskedFetchAdd { .. }
            | SendOp::AtomicWrite { .. } => Class::Atomic,
            SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::SendInvalidate(_)
            | SendOp::Flush { .. }
            | SendOp::Append { .. }
            | SendOp::LocalInvalidate(_)
            | SendOp::BindWindow(_)
            | SendOp::Nop => Class::Message,
        }
    }

    /// Whether it changes the peer's memory.
    pub fn writes(self) -> bool {
        matches!(self, Class::Write | Class::Atomic | Class::WriteImm)
    }

    /// Whether its operations change the program's memory. Of messages, APPEND does.
    pub fn returns_data(self) -> bool {
        matches!(self, Class::Read | Class::Atomic)
    }
}

/// What a later request does while an earlier one is not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// It begins.
    Pass,
    /// It begins when the earlier one has been posted: the queue pair keeps their order.
    Follow,
    /// It begins if the earlier one may still turn out to have succeeded. If that one has to be repeated, both are, in
    /// their order.
    Chain,
    /// It waits until the earlier one is finished.
    Wait,
}

use Rule::{Chain, Follow, Pass, Wait};

/// A row for each class of the earlier request, a column for each of the later: READ, WRITE, atomic, WRITE with immediate,
/// message.
type Table = [[Rule; 5]; 5];

/// The default order, where memory does not conflict. A message is posted when its local memory is held; a WRITE with
/// immediate when the peer holds its pages, too, so that a later message waits for it.
const DEFAULT_DISJOINT: Table = [
    [Pass, Pass, Pass, Pass, Pass],
    [Pass, Pass, Pass, Wait, Wait],
    [Pass, Pass, Pass, Wait, Wait],
    [Pass, Pass, Pass, Wait, Wait],
    [Pass, Pass, Pass, Follow, Follow],
];

/// The default order, where memory conflicts.
const DEFAULT_CONFLICT: Table = [
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Chain, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
];

/// The strict order, where memory does not conflict.
const STRICT_DISJOINT: Table = [
    [Wait, Pass, Wait, Pass, Pass],
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Follow, Follow],
];

/// The strict order, where memory conflicts: without FENCE the verbs promise less, and what they do not promise is
/// promised here, because a repeated request would show the difference.
const STRICT_CONFLICT: Table = [
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
    [Wait, Wait, Wait, Wait, Wait],
];

impl Order {
    /// What a request of class `later` does while one of class `earlier`, posted before it, is not finished.
    pub fn rule(self, earlier: Class, later: Class, conflicts: bool) -> Rule {
        let table = match (self, conflicts) {
            (Order::Default, false) => &DEFAULT_DISJOINT,
            (Order::Default, true) => &DEFAULT_CONFLICT,
            (Order::Strict, false) => &STRICT_DISJOINT,
            (Order::Strict, true) => &STRICT_CONFLICT,
        };
        table[earlier as usize][later as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cases() -> impl Iterator<Item = (Class, Class, bool)> {
        Class::ALL.into_iter().flat_map(|earlier| {
            Class::ALL
                .into_iter()
                .flat_map(move |later| [false, true].map(|conflicts| (earlier, later, conflicts)))
        })
    }

    #[test]
    fn conflicting_requests_never_pass() {
        for order in [Order::Default, Order::Strict] {
            for (earlier, later, _) in cases() {
                assert_ne!(order.rule(earlier, later, true), Rule::Pass, "{order:?} {earlier:?} {later:?}");
            }
        }
    }

    #[test]
    fn only_writes_are_chained_because_only_they_can_be_repeated() {
        for order in [Order::Default, Order::Strict] {
            for (earlier, later, conflicts) in cases() {
                let is_chain = order.rule(earlier, later, conflicts) == Rule::Chain;
                let may_be = (earlier, later, conflicts) == (Class::Write, Class::Write, true);
                assert!(!is_chain || may_be, "{order:?} {earlier:?} {later:?} {conflicts}");
            }
        }
    }

    #[test]
    fn a_message_follows_what_was_written_before_it() {
        for order in [Order::Default, Order::Strict] {
            for earlier in [Class::Write, Class::WriteImm] {
                for later in [Class::Message, Class::WriteImm] {
                    assert_eq!(
                        order.rule(earlier, later, false),
                        Rule::Wait,
                        "{order:?} {earlier:?} {later:?}"
                    );
                }
            }
        }
        for order in [Order::Default, Order::Strict] {
            for later in [Class::Message, Class::WriteImm] {
                assert_eq!(order.rule(Class::Message, later, false), Rule::Follow, "{order:?} {later:?}");
            }
        }
        for later in [Class::Message, Class::WriteImm] {
            assert_eq!(Order::Default.rule(Class::Atomic, later, false), Rule::Wait);
        }
    }

    #[test]
    fn in_the_default_order_a_fault_delays_no_disjoint_transfer() {
        for (earlier, later, _) in cases() {
            if matches!(later, Class::Read | Class::Write | Class::Atomic) {
                assert_eq!(Order::Default.rule(earlier, later, false), Rule::Pass, "{earlier:?} {later:?}");
            }
        }
    }

    /// READs are passed by requests that return no data. Nothing else is passed.
    #[test]
    fn the_strict_order_is_that_of_the_verbs() {
        for (earlier, later, _) in cases() {
            let by_the_verbs = earlier == Class::Read && !later.returns_data();
            let by_the_queue_pair =
                earlier == Class::Message && matches!(later, Class::Message | Class::WriteImm);
            let expected = match (by_the_verbs, by_the_queue_pair) {
                (true, _) => Rule::Pass,
                (_, true) => Rule::Follow,
                _ => Rule::Wait,
            };
            assert_eq!(Order::Strict.rule(earlier, later, false), expected, "{earlier:?} {later:?}");
        }
    }
}
