//! The lock of a slot: readers pin it, a writer closes it.
//!
//! A reader pins with one atomic addition, and unpins with one subtraction. A writer closes the lock: it keeps new
//! readers out, waits until the pins are gone, changes the content, and opens the lock. This is a reader-writer lock of
//! our own because of `fork`: a child inherits pins of threads that it does not have, and must be able to drop them
//! ([`PinLock::forget_pins`]). A reader that writers wait for by other means needs no pin ([`PinLock::peek`]).
//!
//! ```text
//!   bit 31     bit 30     bits 0..30
//!   CLOSED     WAITING    pins
//!
//!              pin: +1, and back -1 if CLOSED was set
//!   open, n pins ──────close──────> CLOSED, n pins ──unpin──> CLOSED, 0 pins: the writer may change the content
//!        ^                                                         │
//!        └───────────────────────────open──────────────────────────┘
//! ```

use std::ops::{Deref, DerefMut};

use crate::sync::{AtomicU32, Ordering, SPINS, UnsafeCell, pause, wait, wake_all};

/// A writer has the content, or waits for the pins to go.
const CLOSED: u32 = 1 << 31;
/// A thread sleeps on the word; the thread that opens the lock or drops the last pin must wake it.
const WAITING: u32 = 1 << 30;
/// The number of pins.
const PINS: u32 = WAITING - 1;

/// Content that readers pin and writers close. The count comes first, to share a cache line with the fields that
/// readers use.
#[repr(C)]
pub(crate) struct PinLock<T> {
    state: AtomicU32,
    content: UnsafeCell<T>,
}

// SAFETY: shared access to the content is given only while pinned and not closed, exclusive access only while closed
// with no pins, so sharing the lock shares `&T` and hands out `&mut T` from any thread.
unsafe impl<T: Send + Sync> Sync for PinLock<T> {}

impl<T> PinLock<T> {
    /// An open lock.
    pub(crate) fn new(content: T) -> PinLock<T> {
        PinLock { state: AtomicU32::new(0), content: UnsafeCell::new(content) }
    }

    /// Shared access. Waits while a writer has the content.
    #[inline]
    pub(crate) fn pin(&self) -> Pinned<'_, T> {
        // Acquire: what the last writer stored before it opened is seen.
        if self.state.fetch_add(1, Ordering::Acquire) & CLOSED != 0 {
            self.pin_when_open();
        }
        Pinned { lock: self }
    }

    /// Shared access, unless a writer has the content or waits for it.
    pub(crate) fn try_pin(&self) -> Option<Pinned<'_, T>> {
        if self.state.fetch_add(1, Ordering::Acquire) & CLOSED != 0 {
            self.unpin();
            return None;
        }
        Some(Pinned { lock: self })
    }

    /// Takes a premature pin back and waits for the writer to finish.
    #[cold]
    fn pin_when_open(&self) {
        loop {
            self.unpin();
            self.sleep_while_closed();
            if self.state.fetch_add(1, Ordering::Acquire) & CLOSED == 0 {
                return;
            }
        }
    }

    /// Shared access without a pin, unless a writer has the content or waits for it.
    ///
    /// # Safety
    /// A thread that closes the lock, and may change the content before the last use of the returned reference, waits
    /// for the caller by other means between the two.
    #[inline]
    pub(crate) unsafe fn peek(&self) -> Option<&T> {
        // Acquire: as for a pin.
        let is_open = self.state.load(Ordering::Acquire) & CLOSED == 0;
        // SAFETY: no writer has the content, and a later one waits for the caller, as the caller promises.
        is_open.then(|| unsafe { &*self.content.get() })
    }

    #[inline]
    fn unpin(&self) {
        // Release: what this reader did happens before the writer's changes.
        let before = self.state.fetch_sub(1, Ordering::Release);
        if before & (WAITING | PINS) == (WAITING | 1) {
            // The last pin: a writer may be asleep until this.
            wake_all(&self.state);
        }
    }

    /// Exclusive access. Waits for other writers and for all pins to go.
    pub(crate) fn close(&self) -> Closed<'_, T> {
        while self.state.fetch_or(CLOSED, Ordering::Acquire) & CLOSED != 0 {
            self.sleep_while_closed();
        }
        loop {
            // Acquire: what readers did before they unpinned happens before our changes.
            let state = self.state.load(Ordering::Acquire);
            if state & PINS == 0 {
                return Closed { lock: self };
            }
            self.sleep(state);
        }
    }

    fn open(&self) {
        let before = self.state.fetch_and(!(CLOSED | WAITING), Ordering::Release);
        if before & WAITING != 0 {
            wake_all(&self.state);
        }
    }

    /// Waits while a writer has the content; another may have it when this returns.
    pub(crate) fn sleep_while_closed(&self) {
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if state & CLOSED == 0 {
                return;
            }
            self.sleep(state);
        }
    }

    /// Waits until the word changes from `state`: spins a short while, because most copies are short, then sets WAITING
    /// and sleeps.
    fn sleep(&self, state: u32) {
        for _ in 0..SPINS {
            if self.state.load(Ordering::Relaxed) != state {
                return;
            }
            pause();
        }
        let announced = state | WAITING;
        if state == announced
            || self.state.compare_exchange(state, announced, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            wait(&self.state, announced);
        }
    }

    /// In the child after `fork`: drops the pins of threads that exist only in the parent. The caller makes sure that
    /// no writer had the lock when the process forked.
    pub(crate) fn forget_pins(&self) {
        self.state.store(0, Ordering::Release);
    }

    /// Closes without a guard, for a hold that spans callbacks. Pair with [`PinLock::open_raw`].
    pub(crate) fn close_raw(&self) {
        std::mem::forget(self.close());
    }

    /// Ends what [`PinLock::close_raw`] began.
    pub(crate) fn open_raw(&self) {
        self.open();
    }
}

/// Shared access to a lock's content.
pub(crate) struct Pinned<'a, T> {
    lock: &'a PinLock<T>,
}

impl<T> Deref for Pinned<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this pin was taken while the lock was not closed, and writers wait for it.
        unsafe { &*self.lock.content.get() }
    }
}

impl<T> Drop for Pinned<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.unpin();
    }
}

/// Exclusive access to a lock's content.
pub(crate) struct Closed<'a, T> {
    lock: &'a PinLock<T>,
}

impl<T> Deref for Closed<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is closed by this guard and no pin was left.
        unsafe { &*self.lock.content.get() }
    }
}

impl<T> DerefMut for Closed<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for `deref`, and `self` is borrowed mutably.
        unsafe { &mut *self.lock.content.get() }
    }
}

impl<T> Drop for Closed<'_, T> {
    fn drop(&mut self) {
        self.lock.open();
    }
}
