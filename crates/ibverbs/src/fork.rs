//! Process events: load, fork and exit.
//!
//! Nothing is pinned here, so memory needs no care when a process forks; threads and locks do. At exit, deferred ACKs
//! are sent: peers would wait for them otherwise.
//!
//! # State at a fork
//!
//! A child has the memory of its parent and one of its threads. A lock that another thread held at the fork stays
//! locked in the child for ever, and the data that the thread was changing stays half changed. So the hooks below,
//! which `fork` calls, take every lock that a child may need, in the order in which they are taken elsewhere, and
//! release them in the parent and in the child. They are installed when the library is loaded: the tree of the path
//! shim is made, and forked over, without any device.
//!
//! | another thread's activity | what is done about it |
//! |---|---|
//! | the path shim's tree is made (`shim/tree.rs`, `MAKING`) | held. Lookups take no lock: they read a pointer to memory that is never freed |
//! | the C library's functions are looked up (`dlsym`, the dynamic linker's lock) | done when the library is loaded (`shim/real.rs`) |
//! | the log is started, the identity and settings are read, the handlers for faults are installed, a fault plan is read: once per process (`once.rs`, `ONCE`) | held |
//! | a served mapping begins or ceases to be one (`paged/table.rs`, `TABLE`) | held; the child forgets the tier with all of its locks and threads |
//! | the shared NIC is opened or closed (`nic.rs`, `SHARED`) | held; the child forgets it |
//! | an XRC domain is opened or closed (`xrcd.rs`, `SHARED`) | held; the child forgets them |
//! | a device joins the list (`nic.rs`, `DEVICES`) | held |
//! | a device receives, its engine or its thread for same-host peers runs, is started, woken or ended, progress callbacks are attached or called, regions change | `Device::pause_for_fork` in `nic`: the engine parks, the other locks are held; the child starts an engine of its own |
//! | a packet is forwarded to a device of this process or of another one (`nic/src/colocated.rs`, `forwarding/`) | only with the right to receive, or by the engine; the sockets are held, and the child closes them and removes its parent's devices from the list |
//! | a lock's waiters are listed | locks are words, and the kernel lists their waiters (`sync/src/futex.rs`); a table in the process, as `parking_lot` has, may be locked in the child. Locks that a child may take are in this table all the same |
//! | reader slots of same-host peers are listed (`shm/src/reader_slots.rs`) | the child empties the list, or does without the shared-memory transport if it finds it locked |
//! | a command or an event of the connection manager (`rdma_cm`, `SERVICE` and `FILES`) | held; the child forgets it and keeps the list of descriptors |
//! | the list of listeners is read (`rdma_cm/rendezvous.rs`, `LIST`) | `try_lock` only; a thread that fails reads the list itself |
//! | a line for the user is written (`std::io::stderr`) | not used: a line is one `write` (`log.rs`) |
//! | the log's call sites are registered (`tracing-core`) | lists without locks; a site that another thread was registering is asked each time |
//! | the program's handlers for faults change (`hostmem/src/fault/handler.rs`) | atomics, and memory that is not the allocator's |
//! | the environment is read (`std::env`) | readers only: nothing here changes it, so a reader that the child inherits excludes no other reader |
//! | a lock is biased to a thread that is not in the child (`sync`) | revoked as from a thread that runs elsewhere; held in the middle of a verb: see below |
//! | thread-locals of other threads | nothing waits for them: a reader's pin is forgotten (`Registry::after_fork_child`), buffers of the log are lost |
//! | the allocator, standard IO, the dynamic linker (glibc) | glibc's `fork` holds the allocator's locks and reinitializes the others. A library that another thread was loading at that time stays half loaded, with or without this library |
//!
//! The program's own calls are not covered: a thread in the middle of a verb has the locks of its queue pair, and a
//! child that uses the very same objects may wait for it. A child with a device of its own needs none of them.
//!
//! # Children without hooks, and signals
//!
//! `_Fork`, `clone` and `vfork` call no hooks. Such a child may only call async-signal-safe functions. The interposed
//! functions are async-signal-safe: on paths and descriptors that are not the device's they take no lock. A child of
//! `vfork` or `posix_spawn` has signals of its own in its parent's memory: there `sigaction` leaves the parent's
//! handlers alone. Code that holds a lock here on behalf of `open` or `write`, which handlers may call, blocks signals
//! for so long. Verbs do not block signals, so a handler that interrupts a verb may neither call verbs nor fork.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{MutexGuard, Weak};

use terrace_faults::Faults;
use terrace_hostmem::fault;
use terrace_nic::ForkPause;
use tracing::level_filters::LevelFilter;

use crate::errno::{Errno, Result};
use crate::log::tell_user;
use crate::once::once;
use crate::paged::{self, ForkHold};
use crate::rdma_cm::service;
use crate::shim::{real, tree};
use crate::{nic, xrcd};

/// `IBV_FORK_UNNEEDED`.
const FORK_UNNEEDED: c_int = 2;

/// The locks that the forking thread holds.
struct Paused {
    pauses: Vec<ForkPause>,
    service: service::Hold,
    _devices: MutexGuard<'static, nic::Devices>,
    _once: MutexGuard<'static, ()>,
    xrcd: xrcd::Hold,
    nic: nic::Hold,
    _tree: tree::Hold,
    paged: ForkHold,
}

/// Null but during a fork. One thread forks at a time: it holds the locks. Not a thread-local: finding one may make
/// the dynamic linker lock.
static PAUSED: AtomicPtr<Paused> = AtomicPtr::new(null_mut());

/// The dynamic linker calls this when it has loaded the library.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

extern "C" fn on_load() {
    real::find_all();
    // An allocator that is not the C library's installs hooks of its own when it is first used. Its hooks have to be
    // installed before ours, so that it is usable within ours. `black_box` keeps the compiler from removing the
    // allocation.
    drop(std::hint::black_box(Box::new(0)));
    // `install` tries again, and can report a failure.
    let _ = hook_forks();
}

/// Calls a C library function that registers a hook, unless that has succeeded before.
fn note(is_noted: &AtomicBool, note: impl FnOnce() -> c_int) -> Result<()> {
    if is_noted.load(Ordering::Acquire) {
        return Ok(());
    }
    match note() {
        0 => {
            is_noted.store(true, Ordering::Release);
            Ok(())
        }
        failure => Err(Errno(failure)),
    }
}

fn hook_forks() -> Result<()> {
    static NOTED: AtomicBool = AtomicBool::new(false);
    let _once = once();
    // SAFETY: functions without preconditions, in a library that is never unloaded (link.sh).
    note(&NOTED, || unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) })
}

/// Installs the hooks, once per process.
///
/// # Errors
/// ENOMEM when the C library has no room for them.
pub fn install() -> Result<()> {
    static NOTED: AtomicBool = AtomicBool::new(false);
    hook_forks()?;
    let _once = once();
    // SAFETY: as above.
    note(&NOTED, || if unsafe { libc::atexit(at_exit) } == 0 { 0 } else { libc::ENOMEM })
}

/// Takes every lock, so that a child finds nothing half done. See the table at the top.
extern "C" fn before() {
    // First, because a thread that holds it may need the devices to go on.
    let paged = paged::hold_for_fork();
    let tree = tree::hold_for_fork();
    let nic = nic::hold_for_fork();
    let xrcd = xrcd::hold_for_fork();
    let once = once();
    let devices = nic::devices();
    let pauses = devices.iter().filter_map(Weak::upgrade).map(|device| device.pause_for_fork()).collect();
    // Last, because an engine that is to pause may be handling a datagram there.
    let service = service::hold_for_fork();
    let paused = Paused { pauses, paged, _tree: tree, nic, xrcd, _once: once, service, _devices: devices };
    PAUSED.store(Box::into_raw(Box::new(paused)), Ordering::Relaxed);
}

/// Takes what [`before`] has left, in the parent or in the child.
fn take_paused() -> Option<Box<Paused>> {
    let paused = PAUSED.swap(null_mut(), Ordering::Relaxed);
    // SAFETY: from `before`, and taken once.
    (!paused.is_null()).then(|| unsafe { Box::from_raw(paused) })
}

extern "C" fn in_parent() {
    if let Some(mut paused) = take_paused() {
        std::mem::take(&mut paused.pauses).into_iter().rev().for_each(ForkPause::resume_in_parent);
    }
}

extern "C" fn in_child() {
    fault::note_process();
    if let Some(paused) = take_paused() {
        let Paused { pauses, service, _devices, _once, xrcd, nic, _tree, paged } = *paused;
        pauses.into_iter().rev().for_each(ForkPause::resume_in_child);
        service::forget_in_child(service);
        xrcd::forget_in_child(xrcd);
        nic::forget_in_child(nic);
        paged.forget_in_child();
    }
}

/// Sends what the devices have deferred, except what a thread in the middle of a verb holds.
extern "C" fn at_exit() {
    service::say_goodbye();
    let Some(devices) = nic::try_devices() else { return };
    devices.iter().filter_map(Weak::upgrade).for_each(|device| device.send_deferred());
    drop(devices);
    tell_of_faults();
}

/// Reports what fault plans have done. Not through the log's machinery, which may be gone by now.
fn tell_of_faults() {
    if LevelFilter::current() < LevelFilter::WARN {
        return;
    }
    for faults in Faults::all_of_process() {
        tell_user(faults.summary());
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
