//! The process's own events: fork and exit.
//!
//! Nothing is pinned here, so memory needs no care when a process forks; threads and locks do. And a program that exits
//! leaves its peers waiting for the acknowledgements that were held back for its next verb.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use terrace_faults::Faults;
use terrace_nic::{Device, ForkPause};
use tracing::level_filters::LevelFilter;

use crate::errno::{Errno, Result};
use crate::paged::{self, ForkHold};
use crate::{nic, rdma_cm};

/// `IBV_FORK_UNNEEDED`.
const FORK_UNNEEDED: c_int = 2;

type Devices = Vec<Weak<Device>>;

/// The devices of this process, to be paused around a fork. Not a lock of parking_lot: that keeps its waiters in a table
/// of the process, and a child would hand the lock to a thread that it does not have.
static DEVICES: Mutex<Devices> = Mutex::new(Vec::new());

/// What the forking thread holds still.
struct Paused {
    pauses: Vec<ForkPause>,
    paged: ForkHold,
    nic: nic::Hold,
    rdma_cm: rdma_cm::Hold,
    _devices: MutexGuard<'static, Devices>,
}

thread_local! {
    static PAUSED: RefCell<Option<Paused>> = const { RefCell::new(None) };
}

fn devices() -> MutexGuard<'static, Devices> {
    // Nothing panics while it holds the list; if something did, the list would still be one.
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs the hooks, once per process.
///
/// # Errors
/// ENOMEM when the C library has no room for them.
pub fn install() -> Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
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
    let mut devices = devices();
    devices.retain(|other| other.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

/// Every device stands still while the process is copied, and the list of them is locked.
extern "C" fn before() {
    // First, because whoever is at work there may need the devices to go on.
    let paged = paged::hold_for_fork();
    let nic = nic::hold_for_fork();
    let devices = devices();
    let pauses = devices.iter().filter_map(Weak::upgrade).map(|device| device.pause_for_fork()).collect();
    // Last, because an engine that is to pause may be handling a datagram there.
    let rdma_cm = rdma_cm::hold_for_fork();
    PAUSED.with(|slot| slot.replace(Some(Paused { pauses, paged, nic, rdma_cm, _devices: devices })));
}

extern "C" fn in_parent() {
    resume(ForkPause::resume_in_parent, |paged, nic, rdma_cm| drop((paged, nic, rdma_cm)));
}

extern "C" fn in_child() {
    resume(ForkPause::resume_in_child, |paged, nic, rdma_cm| {
        rdma_cm::forget_in_child(rdma_cm);
        nic::forget_in_child(nic);
        paged.forget_in_child();
    });
}

fn resume(devices: fn(ForkPause), rest: fn(ForkHold, nic::Hold, rdma_cm::Hold)) {
    if let Some(paused) = PAUSED.with(RefCell::take) {
        paused.pauses.into_iter().rev().for_each(devices);
        rest(paused.paged, paused.nic, paused.rdma_cm);
    }
}

/// Sends what the devices have held back. A thread that is in the middle of a verb keeps what it is at.
extern "C" fn at_exit() {
    rdma_cm::say_goodbye();
    let devices = match DEVICES.try_lock() {
        Ok(devices) => devices,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    devices.iter().filter_map(Weak::upgrade).for_each(|device| device.send_held_back());
    drop(devices);
    tell_of_faults();
}

/// What fault plans have done, for who tests a program with one. Not through the log's machinery, which may be gone by now.
fn tell_of_faults() {
    if LevelFilter::current() < LevelFilter::WARN {
        return;
    }
    for faults in Faults::all_of_process() {
        // Nobody to tell is no reason to end otherwise.
        let _ = writeln!(std::io::stderr(), "terrace: {}", faults.summary());
    }
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
