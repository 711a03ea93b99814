//! The words of the locks that survive `fork`: memory orders, sleeps and wakeups. `tests/futex_model.rs` tries them in
//! every interleaving.

use std::time::Duration;

use crate::platform::{ALL, AtomicU32, Ordering, SPINS, Wait, sleep, spin_loop, wake};

/// The word of a [`Mutex`](crate::Mutex). A waiting thread only increases the state, in the order below.
pub struct RawMutex {
    pub(crate) state: AtomicU32,
}

pub(crate) const FREE: u32 = 0;
/// Free, but reserved for a thread that has waited and was woken.
const RESERVED: u32 = 1;
const TAKEN: u32 = 2;
/// Taken, possibly with sleepers.
pub(crate) const CONTENDED: u32 = 3;
/// Taken, and a thread has waited for long ([`Wait::is_long`]).
pub(crate) const STARVED: u32 = 4;

impl RawMutex {
    #[inline]
    pub(crate) fn acquire(&self) {
        if !self.try_acquire() {
            self.acquire_slow();
        }
    }

    #[inline]
    pub(crate) fn try_acquire(&self) -> bool {
        self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Called by the holder.
    #[inline]
    pub(crate) fn release(&self) {
        let before = self.state.swap(FREE, Ordering::Release);
        if before != TAKEN {
            self.release_slow(before);
        }
    }

    #[inline]
    pub(crate) fn is_taken(&self) -> bool {
        self.state.load(Ordering::Relaxed) >= TAKEN
    }

    #[cold]
    fn acquire_slow(&self) {
        for _ in 0..SPINS {
            match self.state.load(Ordering::Relaxed) {
                FREE if self.try_acquire() => return,
                CONTENDED | STARVED => break,
                _ => spin_loop(),
            }
        }
        let mut mark = CONTENDED;
        let mut wait = None;
        loop {
            let before = self.raise_to(mark);
            if before < TAKEN {
                return;
            }
            let wait = wait.get_or_insert_with(Wait::begin);
            sleep(&self.state, before.max(mark), None);
            if wait.is_long() {
                mark = STARVED;
            }
        }
    }

    /// `fetch_max` with an acquire order. The processor executes that as this loop, too, but ThreadSanitizer does not see it.
    fn raise_to(&self, mark: u32) -> u32 {
        let mut before = self.state.load(Ordering::Relaxed);
        loop {
            let raised = before.max(mark);
            match self.state.compare_exchange_weak(before, raised, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return before,
                Err(now) => before = now,
            }
        }
    }

    #[cold]
    fn release_slow(&self, before: u32) {
        let free_to = |from, to| self.state.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
        let is_reserved = before == STARVED && free_to(FREE, RESERVED).is_ok();
        if wake(&self.state, 1) == 0 && is_reserved {
            // No thread sleeps. In a child of `fork` no woken thread would use the reservation.
            let _ = free_to(RESERVED, FREE);
        }
    }
}

/// The word of an [`RwLock`](crate::RwLock).
///
/// ```text
///   bit 31            bit 30           bits 0 to 29
///   a writer waits    threads sleep    readers; all ones: a writer
/// ```
/// A thread sets bit 30 before it sleeps. The thread that frees the lock while bit 30 is set clears it and wakes all
/// sleepers. Readers do not acquire the lock while bit 31 is set. A writer clears bit 31 when it acquires or releases
/// the lock; other waiting writers set it again when they check the word.
pub struct RawRwLock {
    pub(crate) state: AtomicU32,
}

pub(crate) const HOLDERS: u32 = (1 << 30) - 1;
pub(crate) const WRITER: u32 = HOLDERS;
pub(crate) const SLEEPERS: u32 = 1 << 30;
pub(crate) const WRITER_WAITS: u32 = 1 << 31;

impl RawRwLock {
    #[inline]
    pub(crate) fn acquire_shared(&self) {
        if !self.try_acquire_shared() {
            self.acquire_slow(RawRwLock::with_reader, SLEEPERS);
        }
    }

    #[inline]
    pub(crate) fn try_acquire_shared(&self) -> bool {
        self.try_acquire(RawRwLock::with_reader)
    }

    /// Called by a reader that holds the lock.
    #[inline]
    pub(crate) fn release_shared(&self) {
        let left = self.state.fetch_sub(1, Ordering::Release) - 1;
        if left & HOLDERS == 0 && left & SLEEPERS != 0 {
            self.wake_sleepers();
        }
    }

    #[inline]
    pub(crate) fn acquire_exclusive(&self) {
        if !self.try_acquire_exclusive() {
            self.acquire_slow(RawRwLock::with_writer, SLEEPERS | WRITER_WAITS);
        }
    }

    #[inline]
    pub(crate) fn try_acquire_exclusive(&self) -> bool {
        self.try_acquire(RawRwLock::with_writer)
    }

    /// Called by the writer that holds the lock.
    #[inline]
    pub(crate) fn release_exclusive(&self) {
        // Sleepers set their bits again when they wake. In a child of `fork` the parent's sleepers do not exist, so the
        // bits stay clear.
        if self.state.swap(0, Ordering::Release) & SLEEPERS != 0 {
            wake(&self.state, ALL);
        }
    }

    /// The state after a reader acquires the lock; `None` if it may not.
    fn with_reader(state: u32) -> Option<u32> {
        // `then_some` would overflow for a word with all bits set.
        (state & WRITER_WAITS == 0 && state & HOLDERS < WRITER - 1).then(|| state + 1)
    }

    /// The state after a writer acquires the lock; `None` if it may not.
    fn with_writer(state: u32) -> Option<u32> {
        (state & HOLDERS == 0).then_some((state & SLEEPERS) | WRITER)
    }

    #[inline]
    pub(crate) fn has_holders(&self) -> bool {
        self.state.load(Ordering::Relaxed) & HOLDERS != 0
    }

    #[inline]
    pub(crate) fn has_writer(&self) -> bool {
        self.state.load(Ordering::Relaxed) & HOLDERS == WRITER
    }

    fn try_acquire(&self, acquired: fn(u32) -> Option<u32>) -> bool {
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, acquired).is_ok()
    }

    /// Sleeps, with `bits` set, until the lock can be acquired, and acquires it.
    #[cold]
    fn acquire_slow(&self, acquired: fn(u32) -> Option<u32>, bits: u32) {
        for _ in 0..SPINS {
            if self.try_acquire(acquired) {
                return;
            }
            spin_loop();
        }
        loop {
            let mark = |state| acquired(state).is_none().then_some(state | bits);
            match self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, mark) {
                Ok(before) => sleep(&self.state, before | bits, None),
                Err(_) if self.try_acquire(acquired) => return,
                Err(_) => {}
            }
        }
    }

    /// Wakes the sleepers after the last reader released the lock. A waiting writer has priority.
    #[cold]
    fn wake_sleepers(&self) {
        let no_sleepers =
            |state| (state & HOLDERS == 0 && state & SLEEPERS != 0).then_some(state & !SLEEPERS);
        if self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, no_sleepers).is_ok() {
            wake(&self.state, ALL);
        }
    }
}

/// The word of a [`Condvar`](crate::Condvar): the number of notifications, modulo 2^32.
#[derive(Debug)]
pub(crate) struct Notifications(pub(crate) AtomicU32);

impl Notifications {
    /// The number of notifications so far. The holder of the mutex loads it before it releases the mutex and waits.
    pub(crate) fn count(&self) -> u32 {
        // A notifier changes the condition under the mutex, so it notifies after this load.
        self.0.load(Ordering::Relaxed)
    }

    /// Sleeps until there are more than `count` notifications, or the timeout expires. Wakeups may be spurious.
    pub(crate) fn wait(&self, count: u32, timeout: Option<Duration>) {
        sleep(&self.0, count, timeout);
    }

    /// Wakes at most `count` waiters.
    pub(crate) fn notify(&self, count: u32) {
        self.0.fetch_add(1, Ordering::Relaxed);
        wake(&self.0, count);
    }
}
