//! The process's own events: fork and exit.
//!
//! Nothing is pinned here, so memory needs no care when a process forks; threads and locks do. And a program that exits
//! leaves its peers waiting for the acknowledgements that were held back for its next verb.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use terrace_nic::{Device, ForkPause};

use crate::errno::{Errno, Result};

/// `IBV_FORK_UNNEEDED`.
const FORK_UNNEEDED: c_int = 2;

/// The devices of this process, to be paused around a fork.
static DEVICES: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

thread_local! {
    /// What the forking thread has paused.
    static PAUSED: RefCell<Vec<ForkPause>> = const { RefCell::new(Vec::new()) };
}

/// Installs the hooks, once per process.
///
/// # Errors
/// ENOMEM when the C library has no room for them.
pub fn install() -> Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock();
    if *installed {
        return Ok(());
    }
    // SAFETY: functions without preconditions, in a library that is never unloaded (link.sh).
    let failure = unsafe {
        match libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) {
            0 if libc::atexit(at_exit) != 0 => libc::ENOMEM,
            failure => failure,
        }
    };
    *installed = failure == 0;
    if failure == 0 { Ok(()) } else { Err(Errno(failure)) }
}

/// Adds a device to those that forks pause.
pub fn track(device: &Arc<Device>) {
    let mut devices = DEVICES.lock();
    devices.retain(|other| other.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

/// Every device stands still, its locks held, while the process is copied. The list stays locked as well.
extern "C" fn before() {
    let devices = DEVICES.lock();
    let paused = devices.iter().filter_map(Weak::upgrade).map(|device| device.pause_for_fork()).collect();
    PAUSED.with(|slot| slot.replace(paused));
    std::mem::forget(devices);
}

extern "C" fn in_parent() {
    resume(ForkPause::resume_in_parent);
}

extern "C" fn in_child() {
    resume(ForkPause::resume_in_child);
}

fn resume(how: fn(ForkPause)) {
    let paused = PAUSED.with(RefCell::take);
    // SAFETY: this thread locked it in `before` and forgot the guard; in the child it is the only thread.
    unsafe { DEVICES.force_unlock() };
    paused.into_iter().rev().for_each(how);
}

/// Sends what the devices have held back. A thread that is in the middle of a verb keeps what it is at.
extern "C" fn at_exit() {
    let Some(devices) = DEVICES.try_lock() else { return };
    devices.iter().filter_map(Weak::upgrade).for_each(|device| device.send_held_back());
}

/// `ibv_fork_init(3)`: there is nothing to prepare.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `ibv_is_fork_initialized(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> c_int {
    FORK_UNNEEDED
}

/// Keeps a range from being copied on fork; needless when nothing is pinned.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// The opposite.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
