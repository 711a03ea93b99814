//! The threads that carry requests out. They may wait for disks; the thread that serves packets does not.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use terrace_nic::Device;
use terrace_sync::{Condvar, Mutex, SpinBudget};

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
    /// A thread polls for a job. Adding the first job wakes no other thread.
    has_poller: bool,
}

/// What there is to do. Each connection is in it twice at most, and each open file once.
pub struct Work {
    queue: Mutex<Queue>,
    added: Condvar,
    /// How long threads poll for jobs.
    polls: SpinBudget,
}

impl Default for Work {
    fn default() -> Work {
        Work { queue: Mutex::default(), added: Condvar::default(), polls: SpinBudget::for_calls() }
    }
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
        let is_polled = queue.has_poller && queue.jobs.len() == 1;
        drop(queue);
        if !is_polled {
            self.added.notify_one();
        }
    }

    /// Polls for a job, unless another thread does: a client that has its answer often sends the next request soon.
    fn poll(&self, device: &Arc<Device>) {
        {
            let mut queue = self.queue.lock();
            if queue.has_poller || queue.is_closed || !queue.jobs.is_empty() {
                return;
            }
            queue.has_poller = true;
        }
        device.poll_until(&self.polls, || {
            let queue = self.queue.lock();
            !queue.jobs.is_empty() || queue.is_closed
        });
        self.queue.lock().has_poller = false;
    }

    /// The next job. Waits for one; `None` once closed.
    pub fn next(&self, device: &Arc<Device>) -> Option<Job> {
        self.poll(device);
        // The engine's progress adds jobs.
        let _left_to_engine = device.leave_to_engine();
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use terrace_nic::PathChoice;

    use super::*;
    use crate::client::tests::start;

    /// A thread that has taken a job waits here until another one has taken the next one, so that it cannot take both.
    #[test]
    fn jobs_that_come_together_are_taken_by_several_threads_whether_they_poll_or_sleep() {
        let (_directory, server, _client, _file) = start(PathChoice::Local);
        let (work, device, taken) = (Work::default(), &server.state.device, AtomicU64::new(0));
        let deadline = Instant::now() + Duration::from_secs(20);
        let wait_for = |count: u64| {
            while taken.load(Ordering::Relaxed) < count && Instant::now() < deadline {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while work.next(device).is_some() {
                        wait_for((taken.fetch_add(1, Ordering::Relaxed) / 2 + 1) * 2);
                    }
                });
            }
            for pair in 0..500 {
                std::thread::sleep(Duration::from_micros(pair % 100));
                for ino in [2 * pair, 2 * pair + 1] {
                    work.add(Job::Check(FileId { ino, ..FileId::default() }));
                }
                wait_for(2 * pair + 2);
            }
            work.close();
        });
        assert!(Instant::now() < deadline, "a job was taken by nobody while a thread was busy");
        assert_eq!(taken.into_inner(), 1000);
    }
}
