//! Requests by io_uring.

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};
use terrace_pages::store::{Ring, RingRequest};

use super::request::{Command, Completion, Device, Request};

// SAFETY: the request keeps the file open, and the buffer's memory is the pool's.
unsafe impl RingRequest for Request {
    /// Transfers are far shorter than 4 GiB.
    fn entry(&self) -> squeue::Entry {
        let file = Fd(self.file.as_raw_fd());
        match &self.command {
            Command::Read { buffer, part } => {
                let target = buffer[part.clone()].as_ptr().cast_mut();
                opcode::Read::new(file, target, part.len() as u32).offset(self.offset).build()
            }
            Command::Write { buffer, part } => {
                let source = buffer[part.clone()].as_ptr();
                opcode::Write::new(file, source, part.len() as u32).offset(self.offset).build()
            }
            Command::Sync { len } => {
                opcode::Fsync::new(file).offset(self.offset).len(*len).flags(FsyncFlags::DATASYNC).build()
            }
        }
    }
}

impl Device for Ring<Request> {
    fn submit(&mut self, requests: &mut Vec<Request>) {
        Ring::submit(self, requests.drain(..));
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        Ring::reap(self, |request, result| done.push(Completion { request, result }));
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        Ring::descriptor(self)
    }
}
