//! Keeping SIGSEGV and SIGBUS unblocked.

use std::cell::Cell;

/// The signals that a fault in a copy raises.
pub(crate) const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

thread_local! {
    /// Whether this thread has unblocked the signals. Survives `fork` with the thread, as the mask does.
    static UNBLOCKED: Cell<bool> = const { Cell::new(false) };
}

/// Unblocks the signals at a thread's first call.
#[inline]
pub(crate) fn unblock_once() {
    // A thread that is being torn down has no thread-locals left: unblock again, to be safe.
    if !UNBLOCKED.try_with(Cell::get).unwrap_or(false) {
        unblock_in_this_thread();
    }
}

/// Unblocks SIGSEGV and SIGBUS in the calling thread. Copies do so by themselves once per thread; this is for a caller
/// that knows that the program has blocked them again.
#[cold]
pub fn unblock_in_this_thread() {
    // SAFETY: an all-zero sigset_t is a valid value for the calls that initialise it, and `set` outlives them.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in SIGNALS {
            libc::sigaddset(&mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
    }
    let _ = UNBLOCKED.try_with(|unblocked| unblocked.set(true));
}

/// Takes SIGSEGV and SIGBUS out of a set that is about to be blocked: for `SIG_BLOCK` and `SIG_SETMASK`, and for the
/// `sa_mask` of any signal's action.
pub fn sanitize_mask(set: &mut libc::sigset_t) {
    for signal in SIGNALS {
        // SAFETY: `set` is a valid set, and the signals exist.
        unsafe { libc::sigdelset(set, signal) };
    }
}
