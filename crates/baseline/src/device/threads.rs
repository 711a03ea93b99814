//! A pool of threads that read and write, for where io_uring is not available.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use terrace_sync::{Condvar, Mutex};

use super::request::{Command, Completion, Device, Request};

/// The number of requests that run at the same time.
const THREADS: usize = 8;

/// A device with a pool of threads.
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
    /// An event counter, not zero while `done` is not empty.
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
    /// When no descriptor or thread is available.
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
    /// The main loop of a thread, until the device is closed and the queue is empty.
    fn work(&self) {
        while let Some(mut request) = self.next() {
            let result = carry_out(&mut request);
            self.done.lock().push(Completion { request, result });
            // Fails only if the counter overflows, and then it is readable.
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

/// Carries out a request, and blocks until it is done.
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
        // Before the take: a later completion sets the event again.
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
