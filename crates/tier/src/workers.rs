//! Threads for copies that take page faults: whoever asks for one goes on, and several wait for the disk side by side.

use std::collections::VecDeque;

use terrace_sync::{Condvar, Mutex};

use crate::core::Work;
use crate::engine::Engine;
use crate::job::Job;

/// What the threads share with those who have work for them. Without threads, work is given back.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    queue: Mutex<Queue>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// There are threads, and they have not been told to end.
    is_open: bool,
}

impl Workers {
    /// From now on there are threads.
    pub(crate) fn open(&self) {
        self.queue.lock().is_open = true;
    }

    /// Has the threads end once nothing is left to do.
    pub(crate) fn close(&self) {
        self.queue.lock().is_open = false;
        self.more.notify_all();
    }

    /// Has a thread do it. Without threads, or when nothing is to be waited for, it is given back: the caller does it.
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

/// A thread's life.
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
