//! Process events: load, fork and exit.
//!
//! Memory is not pinned, so a fork affects only threads and locks. At exit, deferred ACKs are sent, because peers wait
//! for them.
//!
//! # State at a fork
//!
//! A child has the memory of its parent and one of its threads. A lock that another thread held at the fork stays
//! locked in the child for ever, and data that the thread was changing stays inconsistent. So the hooks below, which
//! `fork` calls, take every lock that a child may need, in the usual lock order, and release them in the parent and in
//! the child. The hooks are installed when the library is loaded: a program without any device uses the path shim's
//! tree and forks.
//!
//! | another thread's activity | handling |
//! |---|---|
//! | the path shim's tree is created (`shim/tree.rs`, `CREATION`) | the lock is held. Lookups take no lock: they read a
//! pointer to memory that is never freed |
//! | the C library's functions are looked up (`dlsym`, the dynamic linker's lock) | done when the library is loaded (`shim/real.rs`) |
//! | the log is started, the identity and settings are read, the handlers for faults are installed, a fault plan is
//! read: once per process (`once.rs`, `ONCE`) | the lock is held |
//! | a paged mapping is added or removed (`paged/table.rs`, `TABLE`) | the lock is held; the child forgets the
//! pager with all of its locks and threads |
//! | memory that has moved to a swap file is unmapped or changed, by the C library's allocator, too (`vm/src/changes.rs`) |
//! the fork waits for changes under way, ten seconds at most, and the child forgets them |
//! | a file becomes a region (`files.rs`, `FILES`) | the lock of the list is held, which no thread holds while it opens a file; the child
//! forgets the files, their locks, windows and threads, and its keys of such regions name nothing |
//! | the shared NIC is opened or closed (`nic.rs`, `SHARED`) | the lock is held; the child forgets the NIC |
//! | the service of a device for NP-RDMA is added or looked up (`np.rs`, `SERVICES`) | the lock is held; the child forgets
//! the services |
//! | an XRC domain is opened or closed (`xrcd.rs`, `SHARED`) | the lock is held; the child forgets the domains |
//! | a device joins the list (`nic.rs`, `DEVICES`) | the lock is held |
//! | a device receives, its engine or its thread for same-host peers runs, is started, woken or ended, progress
//! callbacks are attached or called, regions change | `Device::park_for_fork` and `ParkedThreads::lock` in `nic`: the
//! engine parks, the other locks are held; the child starts its own engine |
//! | a packet is forwarded to a device of this process or of another one (`nic/src/colocated.rs`, `forwarding/`) | only
//! under the receive lock, or by the engine; the sockets are held, and the child closes them and removes its parent's
//! devices from the list |
//! | a lock's waiters are listed | locks are words, and the kernel lists their waiters (`sync/src/futex.rs`); a table
//! in the process, as in `parking_lot`, could be locked in the child. Locks that a child may take are in this table
//! nevertheless |
//! | reader slots of same-host peers are listed (`shm/src/reader_slots.rs`) | the child empties the list, or disables
//! the shared-memory transport if the list is locked |
//! | a command or an event of the connection manager (`rdma_cm`, `SERVICE` and `FILES`) | the locks are held; the child
//! forgets the manager, closes its copies of the names of bound ports, and keeps the list of descriptors |
//! | a datagram is handled for a process without a connection manager (`rdma_cm/forwarding.rs`, `HANDLING`) | the lock is
//! held |
//! | packets are captured into a pipe (`fabric/src/pcap/pipe.rs`) | the child captures nothing into it, and takes none of
//! its locks |
//! | the list of listeners is read (`rdma_cm/rendezvous.rs`, `LIST`) | `try_lock` only; a thread that fails reads the list itself |
//! | a line for the user is written (`std::io::stderr`) | not used: a line is one `write` (`log.rs`) |
//! | the log's call sites are registered (`tracing-core`) | the lists have no locks; a site that another thread was
//! registering is evaluated each time |
//! | the program's handlers for faults change (`hostmem/src/fault/handler.rs`) | atomics, and memory that is not the allocator's |
//! | the environment is read (`std::env`) | this library only reads it, so an inherited reader excludes no other reader
//! |
//! | a lock is biased to a thread that is not in the child (`sync`) | the bias is revoked as from a running thread; a
//! lock held in the middle of a verb: see below |
//! | thread-locals of other threads | no thread waits for them: a reader's pin is forgotten
//! (`Registry::after_fork_child`), buffers of the log are lost |
//! | the allocator, standard IO, the dynamic linker (glibc) | glibc's `fork` holds the allocator's locks and
//! reinitializes the others. A library that another thread was loading stays incomplete, with or without this library |
//!
//! The program's own calls are not covered: a thread in the middle of a verb holds the locks of its queue pair, and a
//! child that uses the same objects may deadlock. A child with its own device needs none of these locks.
//!
//! # Children without hooks, and signals
//!
//! `_Fork`, `clone` and `vfork` call no hooks. Such a child may only call async-signal-safe functions. The interposed
//! functions are async-signal-safe: on other paths and descriptors than the device's they take no lock. A child of
//! `vfork` or `posix_spawn` has signals of its own in its parent's memory: there `sigaction` does not change the
//! parent's handlers. Code that holds a lock on behalf of `open` or `write`, which handlers may call, blocks signals
//! meanwhile. Verbs do not block signals, so a handler that interrupts a verb may neither call verbs nor fork.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{MutexGuard, Weak};

use terrace_fabric::pcap::end_pipes;
use terrace_faults::Faults;
use terrace_hostmem::fault;
use terrace_nic::{ForkPause, ParkedThreads};
use terrace_sync::Uncancelled;
use tracing::level_filters::LevelFilter;

use crate::errno::{Errno, Result};
use crate::files;
use crate::log::write_line;
use crate::once::once;
use crate::paged::{self, ForkHold};
use crate::process_lock::Locked;
use crate::rdma_cm::{forwarding, service};
use crate::shim::{mappings, real, tree};
use crate::{device_list, nic, np, xrcd};

/// `IBV_FORK_ENABLED`: children do not inherit registered memory.
const FORK_ENABLED: c_int = 1;
/// `IBV_FORK_UNNEEDED`.
const FORK_UNNEEDED: c_int = 2;

/// The locks that the forking thread holds.
struct Paused {
    pauses: Vec<ForkPause>,
    service: service::Hold,
    _forwarding: terrace_sync::MutexGuard<'static, ()>,
    _devices: MutexGuard<'static, nic::Devices>,
    _once: Locked<()>,
    xrcd: xrcd::Hold,
    nic: nic::Hold,
    np: np::Hold,
    _tree: tree::Hold,
    paged: ForkHold,
    files: files::ForkHold,
    /// Dropped last: the locks are not released in the reverse order.
    uncancelled: Uncancelled,
}

/// Null except during a fork. One thread forks at a time, because it holds the locks. A thread-local variable is
/// unsuitable: the access may take the dynamic linker's lock.
static PAUSED: AtomicPtr<Paused> = AtomicPtr::new(null_mut());

/// The dynamic linker calls this when it has loaded the library.
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

extern "C" fn on_load() {
    real::find_all();
    mappings::find_allocator();
    device_list::initialize();
    // An allocator that is not the C library's installs fork hooks when it is first used. Its hooks have to be
    // installed before this library's hooks, which allocate. `black_box` keeps the compiler from removing the
    // allocation.
    drop(std::hint::black_box(Box::new(0)));
    // A failure is not reported here: `install` retries and reports it.
    let _ = hook_forks();
}

/// Calls a C library function that registers a hook, unless that has succeeded before.
fn register_once(is_registered: &AtomicBool, register_once: impl FnOnce() -> c_int) -> Result<()> {
    if is_registered.load(Ordering::Acquire) {
        return Ok(());
    }
    match register_once() {
        0 => {
            is_registered.store(true, Ordering::Release);
            Ok(())
        }
        failure => Err(Errno(failure)),
    }
}

fn hook_forks() -> Result<()> {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    let _once = once();
    // SAFETY: functions without preconditions, in a library that is never unloaded (link.sh).
    register_once(&REGISTERED, || unsafe {
        libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child))
    })
}

/// Installs the hooks, once per process.
///
/// # Errors
/// ENOMEM if the C library has no memory for them.
pub fn install() -> Result<()> {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    hook_forks()?;
    let _once = once();
    // SAFETY: as above.
    register_once(&REGISTERED, || if unsafe { libc::atexit(at_exit) } == 0 { 0 } else { libc::ENOMEM })
}

/// Takes every lock, so that a child finds consistent data. See the table in the module's documentation.
extern "C" fn before() {
    let uncancelled = Uncancelled::new();
    // This lock is first, because its holder may need the devices.
    let paged = paged::hold_for_fork();
    let files = files::hold_for_fork();
    let tree = tree::hold_for_fork();
    let nic = nic::hold_for_fork();
    let np = np::hold_for_fork();
    let xrcd = xrcd::hold_for_fork();
    let once = once();
    let devices = nic::devices();
    let parked: Vec<_> =
        devices.iter().filter_map(Weak::upgrade).map(|device| device.park_for_fork()).collect();
    // These locks come after the engines have parked, because an engine may be handling a datagram under one. They come
    // before the locks of the devices, because their holders take them to send datagrams.
    let service = service::hold_for_fork();
    let forwarding = forwarding::hold_for_fork();
    let pauses = parked.into_iter().map(ParkedThreads::lock).collect();
    let paused = Paused {
        pauses,
        paged,
        files,
        _tree: tree,
        nic,
        np,
        xrcd,
        _once: once,
        service,
        _forwarding: forwarding,
        _devices: devices,
        uncancelled,
    };
    PAUSED.store(Box::into_raw(Box::new(paused)), Ordering::Relaxed);
}

/// Takes the locks that [`before`] has stored, in the parent or in the child.
fn take_paused() -> Option<Box<Paused>> {
    let paused = PAUSED.swap(null_mut(), Ordering::Relaxed);
    // SAFETY: `before` stored it, and it is taken once.
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
        let Paused {
            uncancelled: _uncancelled,
            pauses,
            service,
            _forwarding,
            _devices,
            _once,
            xrcd,
            nic,
            np,
            _tree,
            paged,
            files,
        } = *paused;
        pauses.into_iter().rev().for_each(ForkPause::resume_in_child);
        service::forget_in_child(service);
        xrcd::forget_in_child(xrcd);
        nic::forget_in_child(nic);
        np::forget_in_child(np);
        paged.forget_in_child();
        files.forget_in_child();
    }
}

/// Sends the deferred ACKs of all devices, except those of queue pairs that a thread in the middle of a verb has
/// locked. Then captures into pipes end.
extern "C" fn at_exit() {
    service::disconnect_all();
    let Some(devices) = nic::try_devices() else { return };
    devices.iter().filter_map(Weak::upgrade).for_each(|device| device.send_deferred());
    drop(devices);
    end_pipes();
    report_faults();
}

/// Reports the counts of fault plans. Does not use the log, which may be destroyed by now.
fn report_faults() {
    if LevelFilter::current() < LevelFilter::WARN {
        return;
    }
    for faults in Faults::all_of_process() {
        write_line(faults.summary());
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
    if paged::has_swap() { FORK_ENABLED } else { FORK_UNNEEDED }
}

/// Excludes a range from the copy at a fork. Does nothing, because memory is not pinned.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// Reverts `ibv_dontfork_range`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
