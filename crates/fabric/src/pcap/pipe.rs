//! A capture into a pipe or a terminal, whose reader may be slow, stopped or gone.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrace_sync::{Condvar, Mutex, MutexGuard, without_signals};

/// The most bytes that wait for the thread, which writes as many at a time at most. Later records are left out until it has
/// taken them.
const QUEUE_BYTES_MAX: usize = 32 << 20;
/// How long a closed port waits for the reader to take the rest.
const CLOSING_TIME: Duration = Duration::from_secs(1);
/// How long it then waits for the thread, which may be waiting for the reader, to close the pipe: twice [`FULL_CHECK`].
const ABANDON_TIME: Duration = Duration::from_millis(200);
/// How often the thread checks whether the port was closed, while the pipe is full.
const FULL_CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Writes records by a thread of its own. It blocks signals: a write to a pipe without a reader raises SIGPIPE in the thread that writes.
#[derive(Debug)]
pub(super) struct PipeWriter {
    shared: Arc<Shared>,
}

/// Those of all ports.
static OPEN: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    /// The process that has the thread: a forked child has none.
    pid: u32,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    /// The port is closed: the thread ends once the queue is empty.
    is_closed: bool,
    /// The closed port waits no longer.
    is_abandoned: bool,
    /// The thread has closed the pipe.
    has_ended: bool,
    /// Records were left out, and a line in the log has said so.
    is_incomplete: bool,
}

impl PipeWriter {
    /// Starts the thread. The file is in nonblocking mode.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(file: File, path: &FilePath) -> io::Result<PipeWriter> {
        let queue = Mutex::new(Queue::default());
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            pid: std::process::id(),
            queue,
            changed: Condvar::new(),
        });
        let of_thread = shared.clone();
        let builder = std::thread::Builder::new().name("terrace-pcap".into());
        without_signals(|| builder.spawn(move || of_thread.run(file)))?;
        let mut open = OPEN.lock();
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&shared));
        Ok(PipeWriter { shared })
    }

    /// Queues records. False if the capture has ended.
    pub fn write(&self, records: &[u8]) -> bool {
        if !self.shared.has_thread() {
            let path = self.shared.path.display();
            tracing::warn!("the capture to {path} is the parent process's; this one continues without it");
            return false;
        }
        let mut queue = self.shared.queue.lock();
        if queue.bytes.len() + records.len() <= QUEUE_BYTES_MAX {
            queue.bytes.extend_from_slice(records);
            self.shared.changed.notify_all();
        } else if !std::mem::replace(&mut queue.is_incomplete, true) {
            let path = self.shared.path.display();
            tracing::warn!("packets are missing in the capture to {path}: its reader is too slow");
        }
        !queue.has_ended
    }
}

impl Drop for PipeWriter {
    /// The reader gets the rest, if it takes it within [`CLOSING_TIME`].
    fn drop(&mut self) {
        self.shared.close();
        self.shared.await_end(Instant::now() + CLOSING_TIME);
    }
}

/// Ends the captures into pipes, as if their ports were closed: for a process that ends. The readers get the rest, if they
/// take it within a second.
pub fn end_pipes() {
    // Another thread may hold the lock only if the process ends while that thread opens a port.
    let Some(open) = OPEN.try_lock() else { return };
    let all: Vec<_> = open.iter().filter_map(Weak::upgrade).collect();
    drop(open);
    all.iter().for_each(|shared| shared.close());
    let deadline = Instant::now() + CLOSING_TIME;
    all.iter().for_each(|shared| shared.await_end(deadline));
}

impl Shared {
    fn has_thread(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Has the thread end once the queue is empty.
    fn close(&self) {
        if self.has_thread() {
            self.queue.lock().is_closed = true;
            self.changed.notify_all();
        }
    }

    /// Waits until the thread has written the rest and closed the pipe. The thread leaves the rest out after the deadline.
    fn await_end(&self, deadline: Instant) {
        if !self.has_thread() {
            return;
        }
        let mut queue = self.queue.lock();
        self.await_end_until(&mut queue, deadline);
        queue.is_abandoned = true;
        self.await_end_until(&mut queue, deadline + ABANDON_TIME);
    }

    fn await_end_until(&self, queue: &mut MutexGuard<'_, Queue>, deadline: Instant) {
        while !queue.has_ended && Instant::now() < deadline {
            self.changed.wait_until(queue, deadline);
        }
    }

    fn run(&self, file: File) {
        while let Some(records) = self.next() {
            if let Err(error) = self.write(&file, &records) {
                let path = self.path.display();
                tracing::warn!("the capture to {path} ends: {error}; the port continues without it");
                break;
            }
        }
        // First: a port that is opened now can lock the pipe.
        drop(file);
        self.queue.lock().has_ended = true;
        self.changed.notify_all();
    }

    /// Waits for records. `None` when the port is closed.
    fn next(&self) -> Option<Vec<u8>> {
        let mut queue = self.queue.lock();
        while queue.bytes.is_empty() && !queue.is_closed {
            self.changed.wait(&mut queue);
        }
        (!queue.bytes.is_empty()).then(|| std::mem::take(&mut queue.bytes))
    }

    fn write(&self, mut file: &File, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() && !self.queue.lock().is_abandoned {
            match file.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let mut room = [PollFd::from_borrowed_fd(file.as_fd(), PollFlags::OUT)];
                    // The next write finds out what has happened.
                    let _ = poll(&mut room, Some(&FULL_CHECK));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
