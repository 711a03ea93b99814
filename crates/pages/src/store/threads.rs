//! Threads that read, for where io_uring is not available.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use terrace_sync::{Condvar, Mutex};

use super::blocking::read_now;
use super::request::{ReadCompletion, ReadDevice, ReadRequest};

/// The number of reads that run at the same time.
const THREADS: usize = 16;

/// Reads by a pool of threads.
#[derive(Debug)]
pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
    done: Mutex<Vec<ReadCompletion>>,
    /// An event counter, not zero while `done` is not empty.
    event: OwnedFd,
}

#[derive(Debug, Default)]
struct Queue {
    requests: VecDeque<ReadRequest>,
    is_closed: bool,
}

impl Threads {
    /// Starts the threads.
    ///
    /// # Errors
    /// When no descriptor or thread is available.
    pub(super) fn open() -> io::Result<Threads> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            more: Condvar::new(),
            done: Mutex::default(),
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let mut device = Threads { shared, threads: Vec::with_capacity(THREADS) };
        for _ in 0..THREADS {
            let shared = device.shared.clone();
            let builder = std::thread::Builder::new().name("terrace-reads".into());
            device.threads.push(builder.spawn(move || shared.work())?);
        }
        Ok(device)
    }
}

impl Shared {
    /// The main loop of a thread, until the device is closed and the queue is empty.
    fn work(&self) {
        while let Some(request) = self.next() {
            let result = read_now(&request);
            self.done.lock().push(ReadCompletion { request, result });
            // Fails only if the counter overflows, and then it is readable.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    fn next(&self) -> Option<ReadRequest> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(request) = queue.requests.pop_front() {
                return Some(request);
            }
            if queue.is_closed {
                return None;
            }
            self.more.wait(&mut queue);
        }
    }
}

impl ReadDevice for Threads {
    fn submit(&mut self, requests: &mut Vec<ReadRequest>) {
        let count = requests.len();
        self.shared.queue.lock().requests.extend(requests.drain(..));
        for _ in 0..count {
            self.shared.more.notify_one();
        }
    }

    fn reap(&mut self, done: &mut Vec<ReadCompletion>) {
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
        self.shared.queue.lock().is_closed = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
