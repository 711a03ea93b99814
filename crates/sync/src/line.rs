//! Lines for the user, from code that runs in the program's process.

use std::borrow::Cow;
use std::ffi::CStr;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::termios::isatty;

use crate::cancellation::Uncancelled;

/// Writes a line to standard error, cut to what a pipe takes at once, in one system call, if there is room for it. Returns whether all
/// of it is written. It does not wait, and raises no signal: the reader may be stopped or gone, and the disk full.
pub fn write_line_now(line: &[u8]) -> bool {
    write_to(rustix::stdio::stderr(), line)
}

fn write_to(to: BorrowedFd<'_>, line: &[u8]) -> bool {
    let line = match line.get(..libc::PIPE_BUF) {
        Some(most) if most.len() < line.len() => Cow::Owned([&most[..most.len() - 1], b"\n"].concat()),
        _ => Cow::Borrowed(line),
    };
    let _uncancelled = Uncancelled::new();
    let (mut room, now) = ([PollFd::from_borrowed_fd(to, PollFlags::OUT)], Timespec::default());
    if poll(&mut room, Some(&now)) != Ok(1) || room[0].revents() != PollFlags::OUT {
        return false;
    }
    // SAFETY: sets of signals are plain data, and zeros are empty ones.
    let [mut raised, mut pending, mut before]: [libc::sigset_t; 3] = unsafe { std::mem::zeroed() };
    // SAFETY: valid sets.
    unsafe {
        libc::sigpending(&raw mut pending);
        for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
            if libc::sigismember(&raw const pending, signal) == 0 {
                libc::sigaddset(&raw mut raised, signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const raised, &raw mut before);
    }
    let terminal = open_terminal(to);
    let to = terminal.as_ref().map_or(to, OwnedFd::as_fd);
    let is_written = rustix::io::write(to, &line) == Ok(line.len());
    // SAFETY: valid sets, and a valid time.
    unsafe {
        if !is_written {
            // What the write has raised. The program's action for it may be to end.
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(&raw const raised, std::ptr::null_mut(), &raw const now);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
    is_written
}

/// The terminal behind a descriptor, by a description of its own, whose writes do not wait: a terminal says that there is room for less
/// than a line. `None` for anything else, and if the terminal is another user's.
fn open_terminal(of: BorrowedFd<'_>) -> Option<OwnedFd> {
    if !isatty(of) {
        return None;
    }
    // The process may have no memory left.
    let mut path = [0; 32];
    write!(&mut path[..], "/proc/self/fd/{}", of.as_raw_fd()).ok()?;
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{self, Read};
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    static SIGNALS: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_line_waits_for_no_terminal_that_has_room_for_a_part_of_it() {
        let [mut reader, mut terminal] = [-1; 2];
        let none = std::ptr::null_mut();
        // SAFETY: two descriptors to be written to; nothing else is wanted.
        let opened =
            unsafe { libc::openpty(&raw mut reader, &raw mut terminal, none, none.cast(), none.cast()) };
        assert_eq!(opened, 0);
        // SAFETY: just opened, owned by nothing else.
        let [mut reader, terminal] = [reader, terminal].map(|fd| unsafe { File::from_raw_fd(fd) });
        // Another description, so that the terminal's is a blocking one.
        let mut filled = File::options()
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(format!("/proc/self/fd/{}", terminal.as_raw_fd()))
            .unwrap();
        while filled.write(&[b'x'; 4096]).is_ok() {}
        reader.read_exact(&mut [0; 300]).unwrap();
        let (sender, written) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(write_to(terminal.as_fd(), &[b'y'; 4000])));
        assert_eq!(written.recv_timeout(Duration::from_secs(5)), Ok(false));
    }

    #[test]
    fn a_line_for_which_there_is_no_reader_or_no_room_is_lost_without_a_signal() {
        let handler: extern "C" fn(libc::c_int) = count;
        // SAFETY: a handler that only counts.
        unsafe { libc::signal(libc::SIGPIPE, handler as libc::sighandler_t) };
        let (reader, writer) = io::pipe().unwrap();
        // A pipe has room for 64 KiB.
        let count = (0..32).filter(|_| write_to(writer.as_fd(), &[b'x'; 3000])).count();
        assert!((16..=21).contains(&count), "{count}");
        drop(reader);
        assert!(!write_to(writer.as_fd(), b"line"));
        // SAFETY: one readable byte.
        let written = unsafe { libc::write(writer.as_raw_fd(), b"x".as_ptr().cast(), 1) };
        assert_eq!((written, SIGNALS.load(Ordering::Relaxed)), (-1, 1), "only this write raises one");
    }
}
