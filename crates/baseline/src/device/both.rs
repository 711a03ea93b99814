//! A ring for reads, and threads for writes and syncs: direct writes through a ring stall (decision 25).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;
use terrace_pages::store::{Ring, Threads};

use super::request::{Command, Completion, Device, Request};
use super::threads;

/// A ring and threads, as one device.
#[derive(Debug)]
pub struct Both {
    ring: Ring<Request>,
    threads: Threads<Request>,
    /// Readable when the ring's or the threads' descriptor is.
    either: OwnedFd,
    /// Writes and syncs for the threads.
    changes: Vec<Request>,
    /// Writes and syncs under way: reaping the threads takes a system call, which zero saves.
    change_count: usize,
}

impl Both {
    /// Creates a ring for submissions of up to `depth` requests, and starts the threads.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where io_uring is forbidden or missing; when no descriptor or thread is available.
    pub fn open(depth: u32) -> io::Result<Both> {
        let (ring, threads) = (Ring::open(depth)?, threads::open()?);
        let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (descriptor, number) in [(ring.descriptor(), 0), (threads.descriptor(), 1)] {
            epoll::add(&either, descriptor, epoll::EventData::new_u64(number), epoll::EventFlags::IN)?;
        }
        Ok(Both { ring, threads, either, changes: Vec::new(), change_count: 0 })
    }
}

impl Device for Both {
    fn submit(&mut self, requests: &mut Vec<Request>) {
        let is_change = |request: &mut Request| !matches!(request.command, Command::Read { .. });
        self.changes.extend(requests.extract_if(.., is_change));
        if !self.changes.is_empty() {
            self.change_count += self.changes.len();
            self.threads.submit(&mut self.changes);
        }
        Device::submit(&mut self.ring, requests);
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        Device::reap(&mut self.ring, done);
        if self.change_count > 0 {
            let before_count = done.len();
            Device::reap(&mut self.threads, done);
            self.change_count -= done.len() - before_count;
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }
}
