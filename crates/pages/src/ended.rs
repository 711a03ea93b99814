//! Accesses and parts that have ended under locks, until their requesters are told.

use std::sync::Arc;

use terrace_memory::{AccessError, Waker};

use crate::access::{Access, Part, PartEnd};
use crate::stats::add;

/// What has ended under locks. Requesters see it only when the locks are released: who sees that an access has ended may
/// rely on the states of its pages, which change behind the copies.
#[derive(Default)]
pub(crate) struct Ended {
    parts: Vec<(Arc<Access>, Result<(), AccessError>)>,
}

impl Ended {
    /// Records the end of a part of an access.
    pub(crate) fn end_part(&mut self, part: &Part, result: Result<(), AccessError>) {
        if result.is_err() {
            add(&part.access.counters.errors, 1);
        }
        self.end_access_part(&part.access, result);
    }

    /// Records the end of a part, or of the beginning of an access.
    pub(crate) fn end_access_part(&mut self, access: &Arc<Access>, result: Result<(), AccessError>) {
        self.parts.push((access.clone(), result));
    }

    /// Ends the accesses of which no part is left, and calls their wakers. Returns the flushes that can begin. The caller has no
    /// locks.
    pub(crate) fn tell(self) -> Vec<Arc<Access>> {
        let (mut wakers, mut flushes) = (Vec::<Waker>::new(), Vec::new());
        for (access, result) in self.parts {
            match access.end_part(result) {
                PartEnd::More => {}
                PartEnd::Wake(waker) => wakers.push(waker),
                PartEnd::Flush => flushes.push(access),
            }
            // Dropping the last reference to an access calls the wakers of requesters that wait for memory.
        }
        for waker in wakers {
            waker();
        }
        flushes
    }
}
