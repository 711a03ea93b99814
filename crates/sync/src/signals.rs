//! Signals: threads of ours take none of the program's.

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

/// Runs `spawn` so that the thread that it starts blocks the program's signals. Faults stay unblocked: copies recover
/// from them.
pub fn without_signals<T>(spawn: impl FnOnce() -> T) -> T {
    let mut blocked = SigSet::all();
    for fault in
        [Signal::SIGSEGV, Signal::SIGBUS, Signal::SIGFPE, Signal::SIGILL, Signal::SIGTRAP, Signal::SIGSYS]
    {
        blocked.remove(fault);
    }
    let before = blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK);
    let result = spawn();
    if let Ok(before) = before {
        // This mask was in force just before, so setting it cannot fail.
        let _ = before.thread_set_mask();
    }
    result
}
