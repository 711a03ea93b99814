//! Lines for the user.

use std::fmt::Display;
use std::mem::MaybeUninit;

/// Writes a line to standard error, in one system call, which does not wait, and raises no signal: the reader may be stopped or
/// gone, and the disk full. Then the line is lost.
pub(crate) fn report(line: impl Display) {
    let line = format!("terrace: {line}\n");
    let len = line.len().min(libc::PIPE_BUF);
    let mut room = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one valid entry.
    if unsafe { libc::poll(&raw mut room, 1, 0) } != 1 || room.revents != libc::POLLOUT {
        return;
    }
    let (mut pending, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: valid sets, each written before it is read, a valid time, and as many readable bytes.
    unsafe {
        let mut raised: libc::sigset_t = std::mem::zeroed();
        libc::sigpending(pending.as_mut_ptr());
        for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
            if libc::sigismember(pending.as_ptr(), signal) == 0 {
                libc::sigaddset(&raw mut raised, signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const raised, before.as_mut_ptr());
        if libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), len) < 0 {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(&raw const raised, std::ptr::null_mut(), &raw const now);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
    }
}
