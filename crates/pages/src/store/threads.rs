//! Threads that carry out requests, for where io_uring is not available.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use terrace_sync::{Condvar, Mutex};

use super::request::{ReadCompletion, ReadDevice, ReadRequest};

/// A pool of threads.
#[derive(Debug)]
pub struct Threads<R> {
    shared: Arc<Shared<R>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared<R> {
    queue: Mutex<Queue<R>>,
    more: Condvar,
    done: Mutex<Vec<(R, Result<usize, Errno>)>>,
    /// An event counter, not zero while `done` is not empty.
    event: OwnedFd,
}

#[derive(Debug)]
struct Queue<R> {
    requests: VecDeque<R>,
    is_closed: bool,
}

impl<R: Send + Debug + 'static> Threads<R> {
    /// Starts so many threads. `carry_out` blocks until a request is done, and returns the number of bytes moved.
    ///
    /// # Errors
    /// When no descriptor or thread is available.
    pub fn open(count: usize, carry_out: fn(&mut R) -> Result<usize, Errno>) -> io::Result<Threads<R>> {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue { requests: VecDeque::new(), is_closed: false }),
            more: Condvar::new(),
            done: Mutex::default(),
            event: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let mut pool = Threads { shared, threads: Vec::with_capacity(count) };
        for _ in 0..count {
            let shared = pool.shared.clone();
            let builder = std::thread::Builder::new().name("terrace-io".into());
            pool.threads.push(builder.spawn(move || shared.work(carry_out))?);
        }
        Ok(pool)
    }

    /// Queues all requests.
    pub fn submit(&mut self, requests: &mut Vec<R>) {
        let count = requests.len();
        self.shared.queue.lock().requests.extend(requests.drain(..));
        for _ in 0..count {
            self.shared.more.notify_one();
        }
    }

    /// The requests that have ended, each with the number of bytes moved.
    pub fn reap(&mut self) -> Vec<(R, Result<usize, Errno>)> {
        // Before the take: a later completion sets the event again.
        let _ = rustix::io::read(&self.shared.event, &mut [0u8; 8]);
        std::mem::take(&mut self.shared.done.lock())
    }
}

impl<R> Threads<R> {
    /// Readable when a request has ended that was not reaped.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl<R> Shared<R> {
    /// The main loop of a thread, until the pool is closed and the queue is empty.
    fn work(&self, carry_out: fn(&mut R) -> Result<usize, Errno>) {
        while let Some(mut request) = self.next() {
            let result = carry_out(&mut request);
            self.done.lock().push((request, result));
            // Fails only if the counter overflows, and then it is readable.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    fn next(&self) -> Option<R> {
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

impl<R> Drop for Threads<R> {
    fn drop(&mut self) {
        self.shared.queue.lock().is_closed = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl ReadDevice for Threads<ReadRequest> {
    fn submit(&mut self, requests: &mut Vec<ReadRequest>) {
        Threads::submit(self, requests);
    }

    fn reap(&mut self, done: &mut Vec<ReadCompletion>) {
        let ended = Threads::reap(self).into_iter();
        done.extend(ended.map(|(request, result)| ReadCompletion { request, result }));
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        Threads::descriptor(self)
    }
}
