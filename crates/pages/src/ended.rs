//! Accesses and parts that have ended under locks, until their requesters are told.

use std::sync::Arc;

use terrace_memory::{AccessError, Waker};

use crate::access::{Access, Part, PartEnd};
use crate::stats::add;

/// What has ended.
#[derive(Default)]
pub(crate) struct Ended {
    wakers: Vec<Waker>,
    /// Flushes that can begin.
    pub(crate) flushes: Vec<Arc<Access>>,
    /// Accesses of which a part has ended. Dropping the last reference to one calls the wakers of requesters that wait
    /// for memory.
    accesses: Vec<Arc<Access>>,
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
        match access.end_part(result) {
            PartEnd::More => {}
            PartEnd::Wake(waker) => self.wakers.push(waker),
            PartEnd::Flush => self.flushes.push(access.clone()),
        }
        self.accesses.push(access.clone());
    }

    /// Calls the wakers. The caller has no locks, and has taken the flushes.
    pub(crate) fn tell(self) {
        drop(self.accesses);
        for waker in self.wakers {
            waker();
        }
    }
}
