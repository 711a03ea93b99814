//! Requests by threads, for where io_uring is not available.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use terrace_pages::store::Threads;

use super::request::{Command, Completion, Device, Request};

/// The number of requests that run at the same time.
const THREADS: usize = 8;

/// Starts the threads.
///
/// # Errors
/// When no descriptor or thread is available.
pub(super) fn open() -> io::Result<Threads<Request>> {
    Threads::open(THREADS, carry_out)
}

/// Carries out a request, and blocks until it is done.
fn carry_out(request: &mut Request) -> Result<usize, Errno> {
    let (file, offset) = (request.file.as_fd(), request.offset);
    match &mut request.command {
        Command::Read { buffer, part } => rustix::io::pread(file, &mut buffer[part.clone()], offset),
        Command::Write { buffer, part } => rustix::io::pwrite(file, &buffer[part.clone()], offset),
        Command::Sync { .. } => rustix::fs::fdatasync(file).map(|()| 0),
    }
}

impl Device for Threads<Request> {
    fn submit(&mut self, requests: &mut Vec<Request>) {
        Threads::submit(self, requests);
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        let ended = Threads::reap(self).into_iter();
        done.extend(ended.map(|(request, result)| Completion { request, result }));
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        Threads::descriptor(self)
    }
}
