//! The order of deferred accesses to one file: those that overlap take effect in the order in which they were requested.

use std::fmt;

use terrace_hostmem::HostRange;

use crate::workers::Job;

/// Deferred accesses of a file that have not ended, in the order of their requests.
#[derive(Debug, Default)]
pub struct Pending {
    accesses: Vec<Access>,
    next_number: u64,
}

struct Access {
    number: u64,
    range: HostRange,
    /// It changes nothing, and so need not wait for others like it.
    is_read: bool,
    /// Until it runs.
    job: Option<Job>,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access")
            .field("range", &self.range)
            .field("is_read", &self.is_read)
            .finish_non_exhaustive()
    }
}

impl Access {
    fn conflicts(&self, range: HostRange, is_read: bool) -> bool {
        self.range.overlaps(range) && !(self.is_read && is_read)
    }
}

impl Pending {
    /// Whether an access has to wait for one of these.
    pub fn conflicts(&self, range: HostRange, is_read: bool) -> bool {
        self.accesses.iter().any(|access| access.conflicts(range, is_read))
    }

    /// Adds a job, and returns it if it need not wait.
    pub fn add(&mut self, range: HostRange, is_read: bool, make: impl FnOnce(u64) -> Job) -> Option<Job> {
        let number = self.next_number;
        self.next_number += 1;
        let must_wait = self.conflicts(range, is_read);
        let job = make(number);
        let (waiting, ready) = if must_wait { (Some(job), None) } else { (None, Some(job)) };
        self.accesses.push(Access { number, range, is_read, job: waiting });
        ready
    }

    /// Removes a job that has ended, and returns those that need not wait any more.
    pub fn remove(&mut self, number: u64) -> Vec<Job> {
        self.accesses.retain(|access| access.number != number);
        let mut ready = Vec::new();
        for index in 0..self.accesses.len() {
            let (earlier, rest) = self.accesses.split_at_mut(index);
            let Some(access) = rest.first_mut().filter(|access| access.job.is_some()) else { continue };
            if !earlier.iter().any(|other| other.conflicts(access.range, access.is_read)) {
                ready.extend(access.job.take());
            }
        }
        ready
    }
}
