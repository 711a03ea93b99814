//! The threads that carry requests out. They may wait for disks; the thread that serves packets does not.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use terrace_sync::{Condvar, Mutex};

use super::connection::Connection;
use crate::proto::FileId;

/// Something to do.
pub enum Job {
    /// A request of a connection.
    Serve(Arc<Connection>),
    /// Releasing what a connection had.
    End(Arc<Connection>),
    /// Checking whether clients may still access a file.
    Check(FileId),
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// The files of the [`Job::Check`]s.
    checks: HashSet<FileId>,
    is_closed: bool,
}

/// What there is to do. Each connection is in it twice at most, and each open file once.
#[derive(Default)]
pub struct Work {
    queue: Mutex<Queue>,
    added: Condvar,
}

impl Work {
    /// Adds a job.
    pub fn add(&self, job: Job) {
        let mut queue = self.queue.lock();
        if let Job::Check(id) = job
            && !queue.checks.insert(id)
        {
            return;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.added.notify_one();
    }

    /// The next job. Waits for one; `None` once closed.
    pub fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if queue.is_closed {
                return None;
            }
            if let Some(job) = queue.jobs.pop_front() {
                if let Job::Check(id) = job {
                    queue.checks.remove(&id);
                }
                return Some(job);
            }
            self.added.wait(&mut queue);
        }
    }

    /// Ends the workers.
    pub fn close(&self) {
        self.queue.lock().is_closed = true;
        self.added.notify_all();
    }
}
