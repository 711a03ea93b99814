//! What the pin protocol and the handshakes between processes are made of. The models in `tests/pin_model.rs` and
//! `tests/handshake_model.rs` put loom's types in this module's place.

pub(crate) use std::cell::UnsafeCell;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// How often to look again before sleeping: about the time that a copy of some KiB takes.
pub(crate) const SPINS: u32 = 100;

/// What to do between two looks.
pub(crate) fn pause() {
    std::hint::spin_loop();
}

/// Sleeps until somebody calls [`wake_all`] on `word`, unless it no longer holds `expected`. May wake for nothing.
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

/// Wakes everybody who waits on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    // SAFETY: waking does not access the word; its address only names the queue.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX);
    }
}
