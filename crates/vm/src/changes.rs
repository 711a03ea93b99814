//! The program's changes of mappings, and the instants in which this crate puts a mapping in the place of one that it has
//! found in the kernel's list. No system call does both, and other memory may be there by then: an [`Exclusion`] keeps a
//! [`Change`] from beginning.
//!
//! Beginning a change neither allocates nor takes a lock, because allocators change mappings with their locks held.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::sched_yield;

use crate::known_files;

/// Changes that are under way.
static UNDER_WAY: AtomicU64 = AtomicU64::new(0);

/// The process that permits no change; 0 for none. A child that was forked at that time has another identifier.
static EXCLUDED_BY: AtomicI32 = AtomicI32::new(0);

/// A wait was in vain, and no moment without changes has been seen since: one is counted that will not end.
static IS_STUCK: AtomicBool = AtomicBool::new(false);

/// How long [`exclude`] waits. A change takes as long as the kernel takes to unmap pages, some seconds for a terabyte.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The same after a wait in vain. Most changes end within microseconds: without any wait, one that has just begun would be taken
/// for the one that does not end.
const WAIT_MAX_IF_STUCK: Duration = Duration::from_millis(20);

/// A change of the process's mappings, until this is dropped.
#[derive(Debug)]
pub struct Change(());

impl Change {
    /// Begins a change: `munmap(2)`, `mremap(2)`, `mprotect(2)`, `mmap(2)` over other mappings, or [`discard`](crate::discard()).
    /// Waits while ranges of swap files become private. `None` where the process has no swap file. The caller does not fork
    /// before the change ends.
    #[inline]
    pub fn begin() -> Option<Change> {
        Change::begin_if(|| true)
    }

    /// The same, if what the caller does is a change. That is asked only where the process has a swap file.
    #[inline]
    pub fn begin_if(is_change: impl FnOnce() -> bool) -> Option<Change> {
        (known_files::is_any() && is_change()).then(Change::count)
    }

    #[cold]
    fn count() -> Change {
        loop {
            UNDER_WAY.fetch_add(1, Ordering::SeqCst);
            let change = Change(());
            if !is_excluded() {
                return change;
            }
            drop(change);
            while is_excluded() {
                sched_yield();
            }
        }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    }
}

fn is_excluded() -> bool {
    let by = EXCLUDED_BY.load(Ordering::SeqCst);
    by != 0 && by == process()
}

fn process() -> i32 {
    // SAFETY: takes nothing. Made directly: some C libraries remember it across `clone`.
    unsafe { libc::syscall(libc::SYS_getpid) as i32 }
}

/// Held while changes are excluded.
static EXCLUDING: Mutex<()> = Mutex::new(());

/// Permits no change until it is dropped.
#[derive(Debug)]
pub(crate) struct Exclusion(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

/// Waits for the changes under way, and has new ones wait. The caller neither allocates nor takes a lock until it drops the
/// exclusion, and blocks all signals: a handler's change would wait for ever.
///
/// # Errors
/// `TIMEDOUT` after ten seconds, because a change takes longer, or a thread has ended in the middle of one. The next calls then wait for
/// 20 milliseconds, until one of them finds no change under way.
pub(crate) fn exclude() -> io::Result<Exclusion> {
    let exclusion = Exclusion(EXCLUDING.lock().unwrap_or_else(PoisonError::into_inner));
    EXCLUDED_BY.store(process(), Ordering::SeqCst);
    let wait_max = if IS_STUCK.load(Ordering::Relaxed) { WAIT_MAX_IF_STUCK } else { WAIT_MAX };
    let begin = Instant::now();
    while UNDER_WAY.load(Ordering::SeqCst) != 0 {
        if begin.elapsed() > wait_max {
            IS_STUCK.store(true, Ordering::Relaxed);
            return Err(Errno::TIMEDOUT.into());
        }
        sched_yield();
    }
    IS_STUCK.store(false, Ordering::Relaxed);
    Ok(exclusion)
}

impl Drop for Exclusion {
    fn drop(&mut self) {
        EXCLUDED_BY.store(0, Ordering::SeqCst);
    }
}

/// Forgets the changes of other threads, in a forked child, which does not have them.
pub fn forget_changes_in_child() {
    UNDER_WAY.store(0, Ordering::SeqCst);
    IS_STUCK.store(false, Ordering::Relaxed);
}
