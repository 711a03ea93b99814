//! A device with the delays and errors of a fault plan.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;
use terrace_faults::{Delayed, Faults, StorageOperation};

use super::request::{Command, Completion, Device, Request};

/// Wraps a device: requests are delayed or failed as the plan says.
#[derive(Debug)]
pub(crate) struct Injected {
    inner: Box<dyn Device>,
    delayed: Delayed<Request>,
}

impl Injected {
    /// # Errors
    /// When no descriptor is available.
    pub(crate) fn new(inner: Box<dyn Device>, faults: Arc<Faults>) -> io::Result<Injected> {
        let delayed = Delayed::new(faults, inner.descriptor())?;
        Ok(Injected { inner, delayed })
    }
}

impl Device for Injected {
    fn submit(&mut self, requests: &mut Vec<Request>) {
        self.delayed.release(requests, operation_of);
        self.inner.submit(requests);
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        let failed = self.delayed.take_failed();
        done.extend(
            failed
                .map(|(request, error)| Completion { request, result: Err(Errno::from_raw_os_error(error)) }),
        );
        self.inner.reap(done);
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.delayed.descriptor()
    }
}

fn operation_of(request: &Request) -> StorageOperation {
    match request.command {
        Command::Read { .. } => StorageOperation::Read,
        Command::Write { .. } => StorageOperation::Write,
        Command::Sync { .. } => StorageOperation::Sync,
    }
}
