//! Signal functions. Accesses to unmapped memory raise SIGSEGV or SIGBUS in this library's copies and must reach its
//! handler first. The handler passes every other fault to the program's handler.

use std::ffi::c_int;

use libc::{sighandler_t, sigset_t};
use terrace_hostmem::fault::{note_program_handler, sanitize_mask};
use terrace_sync::Uncancelled;

use super::real::{Failure, call_real};
use crate::errno::Errno;

/// `struct sigaction`; libc has a function of the same name.
type Action = libc::sigaction;

impl Failure for sighandler_t {
    fn failure() -> sighandler_t {
        libc::SIG_ERR
    }
}

/// `sigaction(2)`: for SIGSEGV and SIGBUS the handler is recorded, not installed.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    // SAFETY: null or the program's structure.
    let wanted = unsafe { new.as_ref() };
    if let Some(before) = note_program_handler(signal, wanted) {
        if !old.is_null() {
            // SAFETY: the program's structure.
            unsafe { old.write(before) };
        }
        return 0;
    }
    let Some(wanted) = wanted else {
        return call_real!(sigaction: fn(c_int, *const Action, *mut Action) -> c_int, signal, new, old);
    };
    // A fault in a handler that blocks faults would end the process.
    let mut wanted = *wanted;
    sanitize_mask(&mut wanted.sa_mask);
    call_real!(sigaction: fn(c_int, *const Action, *mut Action) -> c_int, signal, &raw const wanted, old)
}

/// As `sigaction`, under the C library's own name.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    // SAFETY: the caller's.
    unsafe { sigaction(signal, new, old) }
}

/// Implements the simple functions for SIGSEGV and SIGBUS by `sigaction`. Returns the previous handler, or `SIG_ERR`.
fn install(signal: c_int, handler: sighandler_t, flags: c_int) -> sighandler_t {
    // SAFETY: integers, and an optional function.
    let (mut new, mut old): (Action, Action) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    new.sa_sigaction = handler;
    new.sa_flags = flags;
    // SAFETY: two structures of ours.
    let failed = unsafe { sigaction(signal, &raw const new, &raw mut old) } != 0;
    if failed { libc::SIG_ERR } else { old.sa_sigaction }
}

/// Defines functions that install a handler: for faults with those flags, for other signals as the C library's
/// function of the second name does.
macro_rules! simple {
    ($($name:ident: $flags:expr, $real:ident;)*) => {
        $(
            /// Installs a handler as the function of that name does.
            ///
            /// # Safety
            /// As for the C library's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(signal: c_int, handler: sighandler_t) -> sighandler_t {
                if !matches!(signal, libc::SIGSEGV | libc::SIGBUS) {
                    return call_real!($real: fn(c_int, sighandler_t) -> sighandler_t, signal, handler);
                }
                if handler == libc::SIG_ERR {
                    Errno(libc::EINVAL).set();
                    return libc::SIG_ERR;
                }
                install(signal, handler, $flags)
            }
        )*
    };
}

simple! {
    signal: libc::SA_RESTART, signal;
    bsd_signal: libc::SA_RESTART, signal;
    ssignal: libc::SA_RESTART, signal;
    sysv_signal: libc::SA_RESETHAND | libc::SA_NODEFER, __sysv_signal;
    __sysv_signal: libc::SA_RESETHAND | libc::SA_NODEFER, __sysv_signal;
}

/// Calls `work` while this thread blocks the program's signals, and is not cancelled. Otherwise a handler could call the
/// interrupted code, or fork, and the thread could end with a lock. Threads that `work` starts inherit the mask and leave signals to the program's threads. Faults cannot be
/// blocked (see above).
pub fn without_signals<T>(work: impl FnOnce() -> T) -> T {
    let _uncancelled = Uncancelled::new();
    // SAFETY: sets of signals are plain data, written before they are read.
    let (mut all, mut before): (sigset_t, sigset_t) = unsafe { std::mem::zeroed() };
    // SAFETY: both sets are valid.
    unsafe {
        libc::sigfillset(&raw mut all);
        pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let result = work();
    // SAFETY: the mask from before.
    unsafe { pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    result
}

/// A mask that is about to be set or added, without the signals that must not be blocked.
///
/// # Safety
/// `set` is null or a signal set.
unsafe fn without_faults(how: c_int, set: *const sigset_t) -> Option<sigset_t> {
    if how == libc::SIG_UNBLOCK {
        return None;
    }
    // SAFETY: the caller's.
    let mut set = *unsafe { set.as_ref() }?;
    sanitize_mask(&mut set);
    Some(set)
}

/// Defines functions that change the calling thread's mask.
macro_rules! masks {
    ($($name:ident)*) => {
        $(
            /// Changes the mask, but never blocks SIGSEGV and SIGBUS.
            ///
            /// # Safety
            /// As for the C library's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(how: c_int, new: *const sigset_t, old: *mut sigset_t) -> c_int {
                // SAFETY: null or the program's set.
                let set = unsafe { without_faults(how, new) };
                let new = set.as_ref().map_or(new, std::ptr::from_ref);
                call_real!($name: fn(c_int, *const sigset_t, *mut sigset_t) -> c_int, how, new, old)
            }
        )*
    };
}

masks! {
    sigprocmask
    pthread_sigmask
}
