//! Threads that may wait for disks.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_memory::{AccessError, Waker};
use terrace_sync::{Condvar, Mutex};

use crate::sys;

/// What a thread does: a deferred access, from its beginning to the calls of wakers.
pub type Job = Box<dyn FnOnce() + Send>;

/// Most accesses at a time.
const JOBS_MAX: usize = 4096;
/// Most bytes that they hold at a time.
const BYTES_MAX: u64 = 64 << 20;

/// The threads of a process, started as they are needed.
#[derive(Debug)]
pub struct Workers {
    state: Mutex<State>,
    /// A job is ready, or there will be no more.
    is_ready: Condvar,
    threads_max: usize,
}

#[derive(Default)]
struct State {
    ready: VecDeque<Job>,
    /// Jobs that have begun and not ended, ready or waiting for others, and their bytes.
    count: usize,
    bytes: u64,
    threads: usize,
    idle: usize,
    /// Wakers of refused accesses.
    starving: Vec<Waker>,
    is_closed: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("jobs", &self.count)
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl Workers {
    /// At most this many threads.
    pub fn new(threads_max: usize) -> Arc<Workers> {
        let (state, is_ready) = (Mutex::default(), Condvar::new());
        Arc::new(Workers { state, is_ready, threads_max: threads_max.max(1) })
    }

    /// Makes room for a job that holds this many bytes.
    ///
    /// # Errors
    /// `NotReady` when there is none. The waker is called when there may be.
    pub fn admit(&self, bytes: u64, waker: &Waker) -> Result<(), AccessError> {
        let mut state = self.state.lock();
        // A job that is larger than all of the room is admitted alone.
        if state.count > 0 && (state.count >= JOBS_MAX || state.bytes + bytes > BYTES_MAX) {
            if !state.starving.iter().any(|starving| Arc::ptr_eq(starving, waker)) {
                state.starving.push(waker.clone());
            }
            return Err(AccessError::NotReady);
        }
        state.count += 1;
        state.bytes += bytes;
        Ok(())
    }

    /// Gives the room of an admitted job back.
    pub fn release(&self, bytes: u64) {
        let starving = {
            let mut state = self.state.lock();
            state.count -= 1;
            state.bytes -= bytes;
            std::mem::take(&mut state.starving)
        };
        starving.iter().for_each(|waker| waker());
    }

    /// Has a thread run an admitted job. Where none can be started, the caller runs it.
    pub fn run(self: &Arc<Workers>, job: Job) {
        let mut state = self.state.lock();
        state.ready.push_back(job);
        if state.idle >= state.ready.len() || state.threads >= self.threads_max {
            self.is_ready.notify_one();
            return;
        }
        state.threads += 1;
        drop(state);
        let workers = self.clone();
        if sys::spawn("terrace-files", move || workers.work()).is_err() {
            self.run_without_a_thread();
        }
    }

    /// A thread could not be started. The caller runs all jobs that no other thread would run.
    fn run_without_a_thread(&self) {
        let mut state = self.state.lock();
        state.threads -= 1;
        while state.threads == 0
            && let Some(job) = state.ready.pop_front()
        {
            drop(state);
            job();
            state = self.state.lock();
        }
    }

    /// The main loop of a thread.
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.ready.pop_front() {
                drop(state);
                job();
                state = self.state.lock();
            } else if state.is_closed {
                state.threads -= 1;
                return;
            } else {
                state.idle += 1;
                self.is_ready.wait(&mut state);
                state.idle -= 1;
            }
        }
    }

    /// Has the threads end when there is nothing left to do.
    pub fn close(&self) {
        self.state.lock().is_closed = true;
        self.is_ready.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn callers_that_start_no_thread_at_the_same_time_leave_no_job() {
        let workers = Workers::new(2);
        let (run, jobs_run) = channel();
        for number in 0..2 {
            let run = run.clone();
            let mut state = workers.state.lock();
            state.ready.push_back(Box::new(move || run.send(number).unwrap()));
            state.threads += 1;
        }
        workers.run_without_a_thread();
        assert_eq!(jobs_run.try_iter().count(), 0, "the other thread may still start");
        workers.run_without_a_thread();
        assert_eq!(jobs_run.try_iter().collect::<Vec<_>>(), [0, 1]);
    }
}
