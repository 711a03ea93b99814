//! A few threads that read and write, where io_uring is not to be had.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use terrace_sync::{Condvar, Mutex};

use super::request::{Command, Completion, Device, Request};

/// How many requests can be under way at a time.
const THREADS: usize = 8;

/// A pool of threads.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
    done: Mutex<Vec<Completion>>,
    /// Not zero while `done` holds something.
    event: OwnedFd,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<Request>,
    closed: bool,
}

impl Threads {
    /// Starts the threads.
    ///
    /// # Errors
    /// When there are no descriptors or no threads to be had.
    pub fn open() -> io::Result<Threads> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            more: Condvar::new(),
            done: Mutex::default(),
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let mut device = Threads { shared, threads: Vec::with_capacity(THREADS) };
        for _ in 0..THREADS {
            let shared = device.shared.clone();
            let builder = std::thread::Builder::new().name("terrace-io".into());
            device.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(device)
    }
}

impl Shared {
    /// What each thread does until the device is closed and nothing is left.
    fn work(&self) {
        while let Some(mut request) = self.next() {
            let result = carry_out(&mut request);
            self.done.lock().push(Completion { request, result });
            // Only an overflow of the counter could fail, and then it is readable.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    fn next(&self) -> Option<Request> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(request) = queue.requests.pop_front() {
                return Some(request);
            }
            if queue.closed {
                return None;
            }
            self.more.wait(&mut queue);
        }
    }
}

/// Blocks until the request is done.
fn carry_out(request: &mut Request) -> Result<usize, Errno> {
    let (file, offset) = (request.file.as_fd(), request.offset);
    match &mut request.command {
        Command::Read { buffer, part } => rustix::io::pread(file, &mut buffer[part.clone()], offset),
        Command::Write { buffer, part } => rustix::io::pwrite(file, &buffer[part.clone()], offset),
        Command::Sync { .. } => rustix::fs::fdatasync(file).map(|()| 0),
    }
}

impl Device for Threads {
    fn submit(&mut self, requests: &mut Vec<Request>) {
        let count = requests.len();
        self.shared.queue.lock().requests.extend(requests.drain(..));
        for _ in 0..count {
            self.shared.more.notify_one();
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        // Before looking: what is done afterwards makes it readable again.
        let _ = rustix::io::read(&self.shared.event, &mut [0u8; 8]);
        done.append(&mut self.shared.done.lock());
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
