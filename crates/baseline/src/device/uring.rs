//! io_uring.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;
use slab::Slab;

use super::request::{Command, Completion, Device, Request};

/// A device with an io_uring.
pub struct Uring {
    ring: IoUring,
    /// Submitted requests; the index is the entry's `user_data`. Buffers and files stay here until the kernel has
    /// completed the request.
    in_flight: Slab<Request>,
    /// Requests that the submission queue had no space for.
    backlog: VecDeque<Request>,
}

impl Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("in_flight", &self.in_flight.len()).finish()
    }
}

impl Uring {
    /// Creates a ring for submissions of up to `depth` requests.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where io_uring is forbidden or missing.
    pub fn open(depth: u32) -> io::Result<Uring> {
        let ring = IoUring::builder().setup_clamp().setup_cqsize(depth.saturating_mul(4)).build(depth)?;
        Ok(Uring { ring, in_flight: Slab::new(), backlog: VecDeque::new() })
    }

    /// Writes a request into the submission queue, or returns it when the queue is full.
    fn push(&mut self, request: Request) -> Result<(), Request> {
        let key = self.in_flight.insert(request);
        let entry = entry_of(&self.in_flight[key]).user_data(key as u64);
        // SAFETY: the buffer and the descriptor that the entry names belong to the request, which stays in `in_flight`
        // until its completion was reaped; `drop` waits for that, too.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| self.in_flight.remove(key))
    }

    /// Submits the queue to the kernel. Entries that the kernel has no resources for stay queued.
    fn enter(&mut self) {
        if self.ring.submission().is_empty() {
            return;
        }
        while let Err(error) = self.ring.submit() {
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN | libc::EBUSY) => return,
                _ => {
                    // No entry of ours is invalid; the only remedy is to try again later.
                    tracing::error!(%error, "io_uring takes no requests");
                    return;
                }
            }
        }
    }
}

/// The request as a submission queue entry. Transfers are far shorter than 4 GiB.
fn entry_of(request: &Request) -> squeue::Entry {
    let file = Fd(request.file.as_raw_fd());
    match &request.command {
        Command::Read { buffer, part } => {
            let target = buffer[part.clone()].as_ptr().cast_mut();
            opcode::Read::new(file, target, part.len() as u32).offset(request.offset).build()
        }
        Command::Write { buffer, part } => {
            let source = buffer[part.clone()].as_ptr();
            opcode::Write::new(file, source, part.len() as u32).offset(request.offset).build()
        }
        Command::Sync { len } => {
            opcode::Fsync::new(file).offset(request.offset).len(*len).flags(FsyncFlags::DATASYNC).build()
        }
    }
}

impl Device for Uring {
    fn submit(&mut self, requests: &mut Vec<Request>) {
        self.backlog.extend(requests.drain(..));
        while let Some(request) = self.backlog.pop_front() {
            if let Err(request) = self.push(request) {
                self.backlog.push_front(request);
                self.enter();
                if self.ring.submission().is_full() {
                    return;
                }
            }
        }
        self.enter();
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        for entry in self.ring.completion() {
            let request = self.in_flight.remove(entry.user_data() as usize);
            let result =
                usize::try_from(entry.result()).map_err(|_| Errno::from_raw_os_error(-entry.result()));
            done.push(Completion { request, result });
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring is open while it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while !self.in_flight.is_empty() {
            if self.ring.submit_and_wait(1).is_err_and(|error| error.raw_os_error() != Some(libc::EINTR)) {
                // The kernel may still write to the buffers: they must not be used again.
                std::mem::forget(std::mem::take(&mut self.in_flight));
                return;
            }
            self.reap(&mut done);
        }
    }
}
