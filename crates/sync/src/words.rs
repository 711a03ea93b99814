//! The words of the locks that survive `fork`: the orders of loads and stores, and who sleeps until whom wakes it.
//! `tests/futex_model.rs` tries them in every interleaving.

use std::time::Duration;

use crate::platform::{ALL, AtomicU32, Ordering, SPINS, Wait, sleep, spin_loop, wake};

/// The word of a [`Mutex`](crate::Mutex). A waiting thread only ever raises the state, in this order.
pub struct RawMutex {
    pub(crate) state: AtomicU32,
}

pub(crate) const FREE: u32 = 0;
/// Free, but for a thread that has waited and was woken.
const RESERVED: u32 = 1;
const TAKEN: u32 = 2;
/// Taken, perhaps with sleepers.
pub(crate) const AWAITED: u32 = 3;
/// Taken, and a thread's wait is long ([`Wait::is_long`]).
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
                AWAITED | STARVED => break,
                _ => spin_loop(),
            }
        }
        let mut mark = AWAITED;
        let mut wait = None;
        loop {
            let before = self.state.fetch_max(mark, Ordering::Acquire);
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

    #[cold]
    fn release_slow(&self, before: u32) {
        let free_to = |from, to| self.state.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
        let is_reserved = before == STARVED && free_to(FREE, RESERVED).is_ok();
        if wake(&self.state, 1) == 0 && is_reserved {
            // No thread sleeps. In a child of `fork` no woken thread will come to take the reservation.
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
/// A thread sets bit 30 before it sleeps. The thread that leaves the lock free while bit 30 is set clears it and wakes
/// all sleepers. Readers do not enter while bit 31 is set. A writer clears bit 31 when it enters or leaves; other
/// waiting writers set it again when they check the word.
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
            self.enter_slow(RawRwLock::with_reader, SLEEPERS);
        }
    }

    #[inline]
    pub(crate) fn try_acquire_shared(&self) -> bool {
        self.try_enter(RawRwLock::with_reader)
    }

    /// Called by a reader that is inside.
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
            self.enter_slow(RawRwLock::with_writer, SLEEPERS | WRITER_WAITS);
        }
    }

    #[inline]
    pub(crate) fn try_acquire_exclusive(&self) -> bool {
        self.try_enter(RawRwLock::with_writer)
    }

    /// Called by the writer that is inside.
    #[inline]
    pub(crate) fn release_exclusive(&self) {
        // Sleepers set their bits again when they wake. In a child of `fork` the parent's sleepers do not exist, so the
        // bits stay clear.
        if self.state.swap(0, Ordering::Release) & SLEEPERS != 0 {
            wake(&self.state, ALL);
        }
    }

    /// The state after a reader enters; `None` if it may not.
    fn with_reader(state: u32) -> Option<u32> {
        // Not `then_some`: a word with all bits set has no successor.
        (state & WRITER_WAITS == 0 && state & HOLDERS < WRITER - 1).then(|| state + 1)
    }

    /// The state after a writer enters; `None` if it may not.
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

    fn try_enter(&self, entered: fn(u32) -> Option<u32>) -> bool {
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, entered).is_ok()
    }

    /// Sleeps, with `bits` set, until it may enter.
    #[cold]
    fn enter_slow(&self, entered: fn(u32) -> Option<u32>, bits: u32) {
        for _ in 0..SPINS {
            if self.try_enter(entered) {
                return;
            }
            spin_loop();
        }
        loop {
            let mark = |state| entered(state).is_none().then_some(state | bits);
            match self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, mark) {
                Ok(before) => sleep(&self.state, before | bits, None),
                Err(_) if self.try_enter(entered) => return,
                Err(_) => {}
            }
        }
    }

    /// Called when no reader is left: wakes the sleepers. A waiting writer goes first.
    #[cold]
    fn wake_sleepers(&self) {
        let no_sleepers =
            |state| (state & HOLDERS == 0 && state & SLEEPERS != 0).then_some(state & !SLEEPERS);
        if self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, no_sleepers).is_ok() {
            wake(&self.state, ALL);
        }
    }
}

/// The word of a [`Condvar`](crate::Condvar): it changes with every notification.
#[derive(Debug)]
pub(crate) struct Calls(pub(crate) AtomicU32);

impl Calls {
    /// What a thread that has the mutex passes to [`Calls::wait`] once it has released the mutex.
    pub(crate) fn now(&self) -> u32 {
        // A notifier changes the condition under the mutex, so it notifies after this load.
        self.0.load(Ordering::Relaxed)
    }

    /// Sleeps until a notification that came after [`Calls::now`], if none has come yet. May wake without one.
    pub(crate) fn wait(&self, calls: u32, patience: Option<Duration>) {
        sleep(&self.0, calls, patience);
    }

    /// Wakes at most so many waiters.
    pub(crate) fn notify(&self, count: u32) {
        self.0.fetch_add(1, Ordering::Relaxed);
        wake(&self.0, count);
    }
}
