//! Threads for copies that take page faults: the requesting thread does not wait, and several copies wait for the disk
//! at the same time.

use std::collections::VecDeque;

use terrace_sync::{Condvar, Mutex};

use crate::core::Work;
use crate::engine::Engine;
use crate::job::Job;

/// The job queue of the threads. Without threads, jobs are returned to the caller.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    queue: Mutex<Queue>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Threads are running, and have not been told to stop.
    is_open: bool,
}

impl Workers {
    /// Opens the queue. The caller starts the threads.
    pub(crate) fn open(&self) {
        self.queue.lock().is_open = true;
    }

    /// Stops the threads once the queue is empty.
    pub(crate) fn close(&self) {
        self.queue.lock().is_open = false;
        self.more.notify_all();
    }

    /// Queues a job for a thread. Returns the job, for the caller to run, if there are no threads or the job would not
    /// wait.
    pub(crate) fn hand_over(&self, job: Job) -> Option<Job> {
        if !self.queue.lock().is_open || !job.would_wait() {
            return Some(job);
        }
        let mut queue = self.queue.lock();
        if !queue.is_open {
            return Some(job);
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.more.notify_one();
        None
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if !queue.is_open {
                return None;
            }
            self.more.wait(&mut queue);
        }
    }
}

/// A thread's main loop.
pub(crate) fn run(engine: &Engine) {
    while let Some(job) = engine.workers.next() {
        let outcome = job.run();
        let mut work = Work::default();
        let has_requests = {
            let mut core = engine.core.lock();
            core.job_done(outcome, &mut work);
            !core.queue.is_empty()
        };
        if engine.settle(work) || has_requests {
            engine.advance();
        }
    }
}
