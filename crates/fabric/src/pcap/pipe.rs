//! A capture into a pipe or a terminal, whose reader may be slow, stopped or gone.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrace_sync::{Condvar, Mutex};

/// The most bytes that wait for the reader. Later records are left out until it has taken some.
const QUEUE_BYTES_MAX: usize = 32 << 20;
/// How long a closed port waits for the reader to take the rest.
const CLOSING_TIME: Duration = Duration::from_secs(1);
/// How often the thread checks whether the port was closed, while the pipe is full.
const FULL_CHECK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Writes records by a thread of its own. It blocks all signals: a write to a pipe without a reader raises SIGPIPE in the thread that writes.
#[derive(Debug)]
pub(super) struct PipeWriter {
    shared: Arc<Shared>,
    /// The process that has the thread: a forked child has none.
    pid: u32,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
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
    /// The thread has ended.
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
        let shared = Arc::new(Shared { path: path.to_owned(), queue, changed: Condvar::new() });
        let of_thread = shared.clone();
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let thread =
            std::thread::Builder::new().name("terrace-pcap".into()).spawn(move || of_thread.run(&file));
        // This mask was in force just before, so setting it cannot fail.
        let _ = before.thread_set_mask();
        thread.map(|_| PipeWriter { shared, pid: std::process::id() })
    }

    /// Queues records. False if the capture has ended.
    pub fn write(&self, records: &[u8]) -> bool {
        if self.pid != std::process::id() {
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
        if self.pid != std::process::id() {
            return;
        }
        let deadline = Instant::now() + CLOSING_TIME;
        let mut queue = self.shared.queue.lock();
        queue.is_closed = true;
        self.shared.changed.notify_all();
        while !queue.has_ended && Instant::now() < deadline {
            self.shared.changed.wait_until(&mut queue, deadline);
        }
        queue.is_abandoned = true;
    }
}

impl Shared {
    fn run(&self, file: &File) {
        while let Some(records) = self.next() {
            if let Err(error) = self.write(file, &records) {
                let path = self.path.display();
                tracing::warn!("the capture to {path} ends: {error}; the port continues without it");
                break;
            }
        }
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
