//! The standard error of processes that serve. Its reader may be stopped, and its disk full: threads that serve wait for neither.
//! One thread writes. Lines for which its queue has no room are left out, and counted.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::output::{complain, start_writer};

/// Lines that wait to be written, at most.
const LINES_MAX: usize = 1024;
/// How long the end of a process waits for them.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(1);
/// How long it waits between attempts if the queue is full.
const FULL_DELAY: Duration = Duration::from_millis(1);

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
    if QUEUE.get().is_none() {
        let _ = QUEUE.set(start_writer("log", LINES_MAX, write_entry)?);
    }
    Ok(())
}

/// Writes the lines that wait, and then the last one of the process. What standard error does not take within a second is left
/// out. A process that has no log waits until its last line is written.
pub fn finish(last: Option<&str>) {
    let Some(queue) = QUEUE.get() else { return last.into_iter().for_each(complain) };
    let deadline = Instant::now() + FLUSH_TIME_MAX;
    let (sender, is_written) = sync_channel(1);
    let last = last.map(|line| Entry::Line(format!("{line}\n").into_bytes()));
    if last.into_iter().chain([Entry::Flush(sender)]).all(|entry| send(queue, entry, deadline)) {
        let _ = is_written.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

/// Returns whether the queue has taken the entry by the deadline.
fn send(queue: &SyncSender<Entry>, mut entry: Entry, deadline: Instant) -> bool {
    loop {
        entry = match queue.try_send(entry) {
            Err(TrySendError::Full(entry)) if Instant::now() < deadline => entry,
            result => return result.is_ok(),
        };
        // The queue has no wait with a deadline.
        thread::sleep(FULL_DELAY);
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

fn write_entry(entry: Entry) {
    if let Entry::Line(line) = &entry {
        // It may be closed, or its disk full, now: there is no other place for the line.
        let _ = io::stderr().write_all(line);
    }
    let count = LEFT_OUT.swap(0, Ordering::Relaxed);
    if count > 0 {
        complain(&format!("terrace: {count} lines of the log are left out: standard error was full"));
    }
    if let Entry::Flush(sender) = entry {
        // An error means that nobody waits any more.
        let _ = sender.try_send(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_waits_for_room_in_the_queue_until_its_deadline() {
        let (queue, entries) = sync_channel(1);
        let entry = || Entry::Line(Vec::new());
        assert!(send(&queue, entry(), Instant::now()));
        assert!(!send(&queue, entry(), Instant::now()));
        let reader = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            entries.iter().count()
        });
        assert!(send(&queue, entry(), Instant::now() + Duration::from_secs(20)));
        drop(queue);
        assert_eq!(reader.join().expect("no panic"), 2);
    }
}
