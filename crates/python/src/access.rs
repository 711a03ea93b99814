//! An access, in steps of bounded length.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::{Py, PyAny, Python};
use terrace_node::RegionHandle;
use terrace_sync::Mutex;

use crate::failure::Failure;
use crate::memory::Piece;

/// The longest read or write that is one request to the server.
const STEP_BYTES_MAX: u64 = 1 << 20;
/// The longest range that is made durable by one request.
const COMMIT_BYTES_MAX: u64 = 1 << 30;

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reads the region into memory.
    Read,
    /// Writes memory to the region.
    Write,
    /// Makes ranges of the region durable.
    Commit,
}

/// One range of the region, and its memory.
pub struct Range {
    /// First byte within the region.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Of the same length; `None` for [`Kind::Commit`].
    pub memory: Option<Piece>,
}

/// One request to the server.
#[derive(Clone, Copy)]
pub struct Step {
    /// The index of the range.
    pub range: usize,
    /// First byte within the range.
    pub at: u64,
    /// Length in bytes.
    pub len: u32,
}

/// An access to ranges of a region.
pub struct Access {
    /// What it does.
    pub kind: Kind,
    /// The region.
    pub region: RegionHandle,
    /// The requests, in order.
    pub steps: Vec<Step>,
    state: Mutex<State>,
    is_done: AtomicBool,
}

struct State {
    /// Empty when the access has ended, so that Python's objects are free again.
    ranges: Arc<Vec<Range>>,
    unfinished_count: usize,
    failure: Option<Failure>,
    callbacks: Vec<Py<PyAny>>,
}

impl Access {
    /// An access that has not begun.
    pub fn new(kind: Kind, region: RegionHandle, ranges: Vec<Range>) -> Arc<Access> {
        let step_max = if kind == Kind::Commit { COMMIT_BYTES_MAX } else { STEP_BYTES_MAX };
        let steps: Vec<Step> = (ranges.iter().enumerate())
            .flat_map(|(range, Range { len, .. })| {
                (0..*len).step_by(step_max as usize).map(move |at| Step {
                    range,
                    at,
                    len: step_max.min(len - at) as u32,
                })
            })
            .collect();
        let state = State {
            unfinished_count: steps.len(),
            ranges: Arc::new(ranges),
            failure: None,
            callbacks: Vec::new(),
        };
        Arc::new(Access { kind, region, steps, state: Mutex::new(state), is_done: AtomicBool::new(false) })
    }

    /// The ranges; none when the access has ended.
    pub fn ranges(&self) -> Arc<Vec<Range>> {
        self.state.lock().ranges.clone()
    }

    /// Whether the access has ended, and its memory is free again.
    pub fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire)
    }

    /// The outcome of an access that has ended.
    pub fn outcome(&self) -> Result<(), Failure> {
        self.state.lock().failure.clone().map_or(Ok(()), Err)
    }

    /// Counts a finished step. Returns whether it was the last one: [`Access::end`] has to be called then.
    pub fn finish_step(&self, failure: Option<Failure>) -> bool {
        let mut state = self.state.lock();
        // The later steps of a failed connection are flushed, which says less.
        state.failure = state.failure.take().or(failure);
        state.unfinished_count -= 1;
        state.unfinished_count == 0
    }

    /// Takes a function to call when the access ends. Leaves it if the access has ended already.
    pub fn add_callback(&self, callback: &mut Option<Py<PyAny>>) {
        let mut state = self.state.lock();
        if !self.is_done() {
            state.callbacks.extend(callback.take());
        }
    }

    /// Ends the access: releases its memory, calls the callbacks, and returns their number. With a failure, the access has
    /// not been carried out to its end. Called without locks held.
    pub fn end(&self, failure: Option<Failure>) -> usize {
        let ranges = {
            let mut state = self.state.lock();
            state.failure = state.failure.take().or(failure);
            std::mem::take(&mut state.ranges)
        };
        drop(ranges);
        let callbacks = {
            let mut state = self.state.lock();
            self.is_done.store(true, Ordering::Release);
            std::mem::take(&mut state.callbacks)
        };
        let callback_count = callbacks.len();
        if callback_count == 0 {
            return 0;
        }
        // An interpreter that shuts down calls nothing any more.
        let _ = Python::try_attach(|py| {
            for callback in callbacks {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
            }
        });
        callback_count
    }
}
