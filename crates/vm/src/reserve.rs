//! A descriptor in reserve, for the kernel's list of mappings. A process that has as many descriptors as it may have could
//! not read the list otherwise: its memory would stay a swap file's at a fork, and the child lack it.
//!
//! These functions neither allocate nor take a lock: allocators call them, and a forked child.

use std::io;
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::fs::MemfdFlags;

/// No memory of this process moves: none is needed.
const UNUSED: RawFd = -1;
/// It is spent.
const SPENT: RawFd = -2;

static RESERVE: AtomicI32 = AtomicI32::new(UNUSED);

/// Has a descriptor in reserve from now on, as far as the process may have one more.
pub(crate) fn begin() {
    let _ = RESERVE.compare_exchange(UNUSED, SPENT, Ordering::Relaxed, Ordering::Relaxed);
    refill();
}

/// Opens something, with the descriptor in reserve if there is no other.
///
/// # Errors
/// Those of `open`.
pub(crate) fn open<T>(open: impl Fn() -> io::Result<T>) -> io::Result<T> {
    match open() {
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) && spend() => open(),
        result => result,
    }
}

/// Takes a descriptor in reserve again, when what was opened is closed.
pub(crate) fn refill() {
    if RESERVE.load(Ordering::Relaxed) == SPENT
        && let Ok(file) = rustix::fs::memfd_create(c"terrace-reserve", MemfdFlags::CLOEXEC)
    {
        let file = file.into_raw_fd();
        if RESERVE.compare_exchange(SPENT, file, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // SAFETY: the descriptor from above, which nobody knows.
            unsafe { rustix::io::close(file) };
        }
    }
}

fn spend() -> bool {
    let file = RESERVE.load(Ordering::Acquire);
    let is_ours =
        file >= 0 && RESERVE.compare_exchange(file, SPENT, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if is_ours {
        // SAFETY: the descriptor in reserve, which is no other thread's any more.
        unsafe { rustix::io::close(file) };
    }
    is_ours
}
