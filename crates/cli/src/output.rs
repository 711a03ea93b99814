//! Standard output and standard error. Either may be closed or full, which is no reason to panic.

use std::io::{self, IsTerminal, Write};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A pipe that can be written takes so many bytes without waiting (`PIPE_BUF`).
const PIECE_BYTES: usize = 4096;

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

/// Writes to standard output as much as its reader leaves room for: a server does not wait for the reader, which may be stopped.
pub fn print_without_waiting(text: &str) {
    let (mut out, now) = (io::stdout().lock(), Timespec { tv_sec: 0, tv_nsec: 0 });
    for piece in text.as_bytes().chunks(PIECE_BYTES) {
        let has_room = poll(&mut [PollFd::new(&io::stdout(), PollFlags::OUT)], Some(&now)) == Ok(1);
        // The server does not depend on an open standard output.
        if !has_room || out.write_all(piece).and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

/// Prints what a server serves, and on a terminal what `Ctrl-C` does. A server does not depend on an open standard output.
pub fn announce(lines: &str, end: &str) {
    let end = if io::stdout().is_terminal() { format!("Ctrl-C {end}\n") } else { String::new() };
    let _ = write(&format!("{lines}{end}"));
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
