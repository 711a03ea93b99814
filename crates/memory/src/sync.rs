//! What the code that threads share without a lock is built from. The models in `tests/*_model.rs` replace this module
//! with loom's types.

pub(crate) use std::cell::UnsafeCell;
pub(crate) use std::sync::atomic::{AtomicU32, Ordering};

/// Spins before a sleep: about the time that a copy of some KiB takes.
pub(crate) const SPINS: u32 = 100;

/// What a thread does between two checks.
pub(crate) fn pause() {
    std::hint::spin_loop();
}

/// Sleeps until [`wake_all`] is called on `word`, unless it no longer holds `expected`. May wake without a cause.
pub(crate) fn wait(word: &AtomicU32, expected: u32) {
    // SAFETY: the futex word is a live, aligned 32-bit atomic for the duration of the call; no timeout is given.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
            expected,
            std::ptr::null::<libc::timespec>(),
        );
    }
}

/// Wakes all threads that wait on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    // SAFETY: waking does not access the word; its address only names the queue.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
    }
}
