//! The standard error of processes that serve. Its reader may be stopped, and its disk full: threads that serve wait for neither.
//! One thread writes. Lines for which its queue has no room are left out, and counted.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use nix::sys::signal::SigSet;

/// Lines that wait to be written, at most.
const LINES_MAX: usize = 1024;
/// How long the end of a process waits for them.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(1);
/// The thread's stack, which a process may lock in memory.
const STACK_BYTES: usize = 64 << 10;

enum Entry {
    Line(Vec<u8>),
    /// The sender is told when the lines before this one are written.
    Flush(SyncSender<()>),
}

static QUEUE: OnceLock<SyncSender<Entry>> = OnceLock::new();
static LEFT_OUT: AtomicU64 = AtomicU64::new(0);

/// Starts the thread that writes.
///
/// # Errors
/// The system's, if it refuses a thread.
pub fn start() -> io::Result<()> {
    if QUEUE.get().is_some() {
        return Ok(());
    }
    let (queue, entries) = sync_channel(LINES_MAX);
    let builder = std::thread::Builder::new().name("log".into()).stack_size(STACK_BYTES);
    builder.spawn(move || {
        // Signals are for the threads that wait for them. Blocking existing ones cannot fail.
        let _ = SigSet::all().thread_block();
        write_lines(&entries);
    })?;
    let _ = QUEUE.set(queue);
    Ok(())
}

/// Waits until all lines are written, for up to a second.
pub fn flush() {
    let (sender, is_written) = sync_channel(1);
    if let Some(queue) = QUEUE.get()
        && queue.try_send(Entry::Flush(sender)).is_ok()
    {
        let _ = is_written.recv_timeout(FLUSH_TIME_MAX);
    }
}

/// A write is a line. It does not wait, and does not fail.
pub struct StandardError;

impl Write for StandardError {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let is_queued = QUEUE.get().is_some_and(|queue| queue.try_send(Entry::Line(line.to_vec())).is_ok());
        if !is_queued {
            LEFT_OUT.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_lines(entries: &Receiver<Entry>) {
    for entry in entries {
        let line = match entry {
            Entry::Line(line) => line,
            Entry::Flush(sender) => {
                // An error means that nobody waits any more.
                let _ = sender.try_send(());
                continue;
            }
        };
        // It may be closed, or its disk full, now: there is no other place for the line.
        let _ = io::stderr().write_all(&line);
        let count = LEFT_OUT.swap(0, Ordering::Relaxed);
        if count > 0 {
            let _ = writeln!(
                io::stderr(),
                "terrace: {count} lines of the log are left out: standard error was full"
            );
        }
    }
}
