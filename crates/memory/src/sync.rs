//! What the pin protocol and the handshakes between processes are built from. The models in `tests/pin_model.rs` and
//! `tests/handshake_model.rs` replace this module with loom's types.

pub(crate) use std::cell::UnsafeCell;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A `fence(SeqCst)`: no load or store before it is delayed past one after it. The instruction that compilers use for
/// it on x86, `mfence`, also waits for stores to memory of other kinds, and takes ten times as long on some processors;
/// any locked instruction orders loads and stores of ordinary memory (AMD64 manual, volume 2, 7.1.3 and 7.4.2). The
/// kernel's `smp_mb` is this one. Decision 34.
#[inline(always)]
pub(crate) fn full_fence() {
    // SAFETY: changes nothing, wherever the stack pointer is: the word below it is the thread's own.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp - 4], 0", options(nostack));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

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
