//! An access that a worker makes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Transfer, Waker};
use terrace_sync::{Condvar, Mutex};

use crate::open_file::OpenFile;

/// What a deferred access does.
#[derive(Debug)]
pub enum Task {
    /// Reads the range.
    Read,
    /// Writes this from the range's start on.
    Write(Vec<u8>),
    /// Performs an atomic operation on the range.
    Atomic(AtomicOp),
    /// Makes everything durable.
    Flush,
    /// Makes everything durable after a record was appended at this offset.
    Commit(u64),
}

/// The deferred accesses of a region that have not ended.
#[derive(Debug, Default)]
pub struct InFlight {
    count: Mutex<u32>,
    /// There are none.
    is_idle: Condvar,
}

impl InFlight {
    /// Counts one that begins.
    pub fn begin(&self) {
        *self.count.lock() += 1;
    }

    fn end(&self) {
        let mut count = self.count.lock();
        *count -= 1;
        if *count == 0 {
            self.is_idle.notify_all();
        }
    }

    /// Waits until there are none.
    pub fn wait_idle(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.is_idle.wait(&mut count);
        }
    }

    /// Waits until there are none, or until the deadline. Returns whether there are none.
    pub fn wait_idle_until(&self, deadline: Instant) -> bool {
        let mut count = self.count.lock();
        while *count > 0 && !self.is_idle.wait_until(&mut count, deadline) {}
        *count == 0
    }
}

/// A deferred access.
pub struct DeferredAccess {
    /// The file.
    pub file: Arc<OpenFile>,
    /// The region's accesses, of which it is one.
    pub in_flight: Arc<InFlight>,
    /// Its number among the file's deferred accesses.
    pub number: u64,
    /// The offsets.
    pub range: HostRange,
    /// What it does.
    pub task: Task,
    /// The bytes that it holds.
    pub bytes: u64,
    /// Gets the outcome.
    pub transfer: Arc<FileTransfer>,
    /// Called when there is an outcome.
    pub waker: Waker,
}

impl DeferredAccess {
    /// Makes the access, and starts those that have waited for it.
    pub fn run(self) {
        let DeferredAccess { file, in_flight, number, range, task, bytes, transfer, waker } = self;
        let result = match task {
            Task::Read => {
                let mut data = vec![0; range.len as usize];
                file.read_waiting(range, &mut data).map(|()| data)
            }
            Task::Write(data) => {
                file.write_waiting(range.addr, &data, &transfer.cancellation).map(|()| Vec::new())
            }
            Task::Atomic(op) => {
                let before = file.atomic_waiting(range.addr, op, &transfer.cancellation);
                before.map(|before| before.to_ne_bytes().into())
            }
            Task::Flush => file.sync().map(|()| Vec::new()),
            Task::Commit(offset) => file.sync().map(|()| offset.to_ne_bytes().into()),
        };
        transfer.finish(result);
        let workers = file.shared().workers.clone();
        for job in file.end_access(number) {
            workers.run(job);
        }
        drop(file);
        in_flight.end();
        waker();
        workers.release(bytes);
    }
}

/// Whether a change has begun or is cancelled, of which one comes first and excludes the other.
#[derive(Debug, Default)]
pub struct Cancellation {
    is_decided: AtomicBool,
}

impl Cancellation {
    /// Changes bytes by `act`, once, unless the change is cancelled. Returns none then.
    pub fn unless_cancelled<R>(&self, act: impl FnOnce() -> R) -> Option<R> {
        (!self.is_decided.swap(true, Ordering::AcqRel)).then(act)
    }

    /// Cancels the change, unless it has begun. Does not wait for one that has: its file's disk or server may take any time.
    fn cancel(&self) {
        self.is_decided.store(true, Ordering::Release);
    }
}

/// The result of an access, once it has ended.
#[derive(Debug, Default)]
pub struct FileTransfer {
    result: Mutex<Option<Result<Vec<u8>, AccessError>>>,
    cancellation: Cancellation,
}

impl FileTransfer {
    /// A transfer that has ended already.
    pub fn ended(data: Vec<u8>) -> FileTransfer {
        FileTransfer { result: Mutex::new(Some(Ok(data))), ..FileTransfer::default() }
    }

    fn finish(&self, result: Result<Vec<u8>, AccessError>) {
        *self.result.lock() = Some(result);
    }
}

impl Transfer for FileTransfer {
    fn outcome(&self) -> Option<Result<(), AccessError>> {
        let result = self.result.lock();
        result.as_ref().map(|result| result.as_ref().map(drop).map_err(|error| *error))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        let result = self.result.lock();
        let data = result.as_ref().ok_or(AccessError::NotReady)?.as_ref().map_err(|error| *error)?;
        let start = usize::try_from(offset).map_err(|_| AccessError::OutOfRange)?;
        let part = data.get(start..).and_then(|data| data.get(..out.len()));
        out.copy_from_slice(part.ok_or(AccessError::OutOfRange)?);
        Ok(())
    }

    fn cancel(&self) {
        self.cancellation.cancel();
    }
}
