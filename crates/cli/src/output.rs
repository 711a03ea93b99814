//! Standard output and standard error. Either may be closed or full, which is no reason to panic.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use terrace_sync::without_signals;

/// Texts of [`print_without_waiting`] that wait for the reader, at most.
const TEXTS_MAX: usize = 16;
/// The stack of a thread that writes, which a process may lock in memory.
const STACK_BYTES: usize = 64 << 10;

/// Writes to standard output. Returns whether somebody may still read it: `| head` ends early, which is no error.
///
/// # Errors
/// The system's, such as that of a full disk.
pub fn print(text: &str) -> io::Result<bool> {
    match write(text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        other => other.map(|()| true),
    }
}

/// Has a thread write to standard output: a server does not wait for the reader, which may be stopped. Texts for which the
/// thread's queue has no room are left out.
pub fn print_without_waiting(text: String) {
    static QUEUE: OnceLock<Option<SyncSender<String>>> = OnceLock::new();
    // The server does not depend on an open standard output, and thus on no thread either.
    let queue = QUEUE.get_or_init(|| start_writer("output", TEXTS_MAX, |text: String| _ = write(&text)).ok());
    if let Some(queue) = queue {
        let _ = queue.try_send(text);
    }
}

/// Starts a thread that writes, for output whose reader may be stopped. At most `max` items wait for it.
///
/// # Errors
/// The system's, if it refuses a thread.
pub fn start_writer<T: Send + 'static>(
    name: &str,
    max: usize,
    write: impl Fn(T) + Send + 'static,
) -> io::Result<SyncSender<T>> {
    let (queue, items) = sync_channel(max);
    let builder = thread::Builder::new().name(name.into()).stack_size(STACK_BYTES);
    without_signals(|| builder.spawn(move || items.into_iter().for_each(write)))?;
    Ok(queue)
}

/// Prints what a server serves, and on a terminal what `Ctrl-C` does, as [`print_without_waiting`].
pub fn announce(lines: &str, end: &str) {
    let end = if io::stdout().is_terminal() { format!("Ctrl-C {end}\n") } else { String::new() };
    print_without_waiting(format!("{lines}{end}"));
}

/// Writes a line to standard error, if it can be written.
pub fn complain(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
