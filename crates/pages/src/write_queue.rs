//! What the threads that write pages back have to do.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_sync::{Condvar, Mutex};

use crate::access::Access;

/// The shortest interval between two searches for dirty pages that are not needed yet, and the one between attempts
/// while writes fail or accesses wait for frames.
pub(crate) const PERIOD: Duration = Duration::from_millis(100);

/// What the threads have to do.
#[derive(Debug, Default)]
pub(crate) struct WriteQueue {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    flushes: VecDeque<Arc<Access>>,
    /// Frames are missing.
    is_starved: bool,
    is_closed: bool,
    searched_at: Option<Instant>,
    /// Threads that look for dirty pages again within a period.
    periodic_count: usize,
}

/// What a thread does next.
pub(crate) enum Job {
    Flush(Arc<Access>),
    Clean,
    Stop,
}

impl WriteQueue {
    /// Adds flushes, and wakes a thread for them, or for the laundry.
    pub(crate) fn add(&self, flushes: Vec<Arc<Access>>, is_starved: bool) {
        if flushes.is_empty() && !is_starved {
            return;
        }
        let mut state = self.state.lock();
        let is_new = !flushes.is_empty() || !state.is_starved;
        state.flushes.extend(flushes);
        state.is_starved |= is_starved;
        drop(state);
        if is_new {
            self.more.notify_one();
        }
    }

    /// Wakes a thread because many frames are dirty, unless one is about to look for dirty pages.
    pub(crate) fn request_search(&self) {
        let mut state = self.state.lock();
        if state.is_starved || state.periodic_count > 0 {
            return;
        }
        state.is_starved = true;
        drop(state);
        self.more.notify_one();
    }

    /// Stops the threads once the flushes have ended.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.more.notify_all();
    }

    /// Waits for work; with `wakes_periodically`, for a period at most.
    pub(crate) fn next(&self, wakes_periodically: bool) -> Job {
        let mut state = self.state.lock();
        loop {
            if let Some(access) = state.flushes.pop_front() {
                return Job::Flush(access);
            }
            if state.is_closed {
                return Job::Stop;
            }
            if std::mem::take(&mut state.is_starved) {
                return Job::Clean;
            }
            if !wakes_periodically {
                self.more.wait(&mut state);
                continue;
            }
            state.periodic_count += 1;
            self.more.wait_for(&mut state, PERIOD);
            state.periodic_count -= 1;
            if state.flushes.is_empty() && !state.is_closed {
                return Job::Clean;
            }
        }
    }

    /// Whether a search for dirty pages is due. True for one caller.
    pub(crate) fn begin_search(&self) -> bool {
        let mut state = self.state.lock();
        let is_due = state.searched_at.is_none_or(|at| at.elapsed() >= PERIOD);
        if is_due {
            state.searched_at = Some(Instant::now());
        }
        is_due
    }
}
