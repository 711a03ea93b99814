//! A biased mutex: the thread that uses it most acquires it without a locked instruction.
//!
//! A locked instruction waits until all earlier stores of the thread are in the cache, and later instructions wait for
//! it. Several locks around accesses to a few bytes are faster without locked instructions. After the copy of a page
//! the difference is small ([decision 42](../../../docs/decisions/0042-biased-locks-and-the-store-buffer.md)).
//!
//! ```text
//!   the biased thread                    another thread, which has locked `others`
//!   held = true                          biased_to = none
//!   -- light barrier --                  -- heavy barrier --
//!   biased_to is unchanged?              waits until held = false
//!     yes: acquired; held = false on release
//!     no:  held = false, then locks `others`
//! ```
//! Either the biased thread sees that its bias is revoked, or the revoking thread sees `held`. The light barrier is a
//! compiler barrier. The heavy one is a system call that makes all running threads of the process pass a barrier
//! (`membarrier(2)`). After a revocation every thread locks `others`, until the consecutive acquisitions of one thread
//! reach the bias threshold. Each revocation doubles the threshold, or halves it if the biased thread had taken the
//! mutex often enough to repay the revocation. The same number of uses without a bias also halves it.
//!
//! Each thread that the mutex was ever biased to has its own `held`. A thread may be preempted between its first load
//! of `biased_to` and its store to `held`. It then increments `held` when the mutex may already be biased to another
//! thread. `held` counts the thread's acquisitions and releases: it is odd in between.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::platform::{
    AtomicU32, AtomicUsize, FIRST_BIAS_THRESHOLD, Ordering, RawMutex, back_off, heavy_barrier, light_barrier,
    lock, may_bias, raw_mutex, token, unlock,
};

/// Threads that one mutex can be biased to in its life. Other threads always lock `others`.
const BIASED_THREADS: usize = 4;
/// The low bits of a thread's token are 0. In `biased_to` they hold the index of the thread's `held`.
const HELD_INDEX_MASK: usize = BIASED_THREADS - 1;
const NO_TOKEN: usize = 0;

/// The largest bias threshold.
const LAST_BIAS_THRESHOLD: u32 = 1 << 20;

/// Uses by the biased thread that repay a revocation: a revocation costs some microseconds, and each biased use saves
/// some nanoseconds. Other threads cannot force revocations more often than about once in this many uses.
const REPAYING_USES: u32 = 1 << 14;

/// A mutex that is biased to the thread that uses it most. It is not recursive, and a guard stays on its thread.
#[repr(C)]
pub struct BiasedMutex<T> {
    /// Token of the biased thread, and the index of its `held`. Changed under `others`.
    biased_to: AtomicUsize,
    held: [AtomicU32; BIASED_THREADS],
    others: RawMutex,
    /// Accessed under `others`.
    history: UnsafeCell<AcquisitionHistory>,
    value: UnsafeCell<T>,
}

/// Recent acquisitions, for the decision whether to bias the mutex.
struct AcquisitionHistory {
    last_token: usize,
    /// Consecutive acquisitions by `last_token`.
    consecutive: u32,
    /// Consecutive acquisitions that bias the mutex.
    bias_threshold: u32,
    /// Acquisitions under `others` since the threshold changed.
    uses: u32,
    /// The biased thread's `held` when the bias began.
    held_before: u32,
    /// Tokens of the threads that the mutex was ever biased to. A thread gets another thread's token only after that
    /// thread has ended.
    biased_threads: [usize; BIASED_THREADS],
}

// SAFETY: as for any mutex: one thread at a time accesses the value.
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> BiasedMutex<T> {
    /// A free mutex.
    pub fn new(value: T) -> BiasedMutex<T> {
        let history = AcquisitionHistory {
            last_token: NO_TOKEN,
            consecutive: 0,
            bias_threshold: FIRST_BIAS_THRESHOLD,
            uses: 0,
            held_before: 0,
            biased_threads: [NO_TOKEN; BIASED_THREADS],
        };
        BiasedMutex {
            biased_to: AtomicUsize::new(NO_TOKEN),
            held: std::array::from_fn(|_| AtomicU32::new(0)),
            others: raw_mutex(),
            history: UnsafeCell::new(history),
            value: UnsafeCell::new(value),
        }
    }

    /// Whether the mutex is biased to a thread.
    #[cfg(test)]
    pub(crate) fn is_biased(&self) -> bool {
        self.biased_to.load(Ordering::Relaxed) != NO_TOKEN
    }

    /// Acquires the mutex.
    #[inline(always)]
    pub fn lock(&self) -> Guard<'_, T> {
        let biased_to = self.biased_to.load(Ordering::Relaxed);
        if biased_to & !HELD_INDEX_MASK == token() {
            let held = &self.held[biased_to & HELD_INDEX_MASK];
            // A thread that locks twice deadlocks, as with any mutex: it never gets two guards.
            let before = held.load(Ordering::Relaxed);
            if !is_held(before) {
                held.store(before.wrapping_add(1), Ordering::Relaxed);
                light_barrier();
                if self.biased_to.load(Ordering::Relaxed) == biased_to {
                    return Guard::new(self, Some(held));
                }
                held.store(before, Ordering::Release);
            }
        }
        Guard::new(self, self.lock_slow())
    }

    /// The slow path. Returns the `held` of this thread if the mutex is now biased to it; otherwise this thread holds
    /// `others`.
    #[cold]
    #[inline(never)]
    fn lock_slow(&self) -> Option<&AtomicU32> {
        lock(&self.others);
        // SAFETY: this thread holds `others`.
        let history = unsafe { &mut *self.history.get() };
        let biased_to = self.biased_to.load(Ordering::Relaxed);
        if biased_to != NO_TOKEN {
            let held = self.revoke_bias(biased_to);
            history.record_revocation(held.wrapping_sub(history.held_before) / 2);
        }
        let biased_to = history.record_acquisition(token())?;
        let held = &self.held[biased_to & HELD_INDEX_MASK];
        history.held_before = held.load(Ordering::Relaxed);
        held.store(history.held_before.wrapping_add(1), Ordering::Relaxed);
        // A revoking thread locks `others` after this unlock, so it sees both stores.
        self.biased_to.store(biased_to, Ordering::Relaxed);
        // SAFETY: this thread holds `others`, and does not access `history` any more.
        unsafe { unlock(&self.others) };
        Some(held)
    }

    /// Revokes the bias, waits until the biased thread has released the mutex, and returns its final `held`.
    fn revoke_bias(&self, biased_to: usize) -> u32 {
        self.biased_to.store(NO_TOKEN, Ordering::Relaxed);
        heavy_barrier();
        let mut checks = 0;
        loop {
            // Acquire: the biased thread's accesses to the value happen before those of this thread.
            let held = self.held[biased_to & HELD_INDEX_MASK].load(Ordering::Acquire);
            if !is_held(held) {
                return held;
            }
            checks += 1;
            back_off(checks);
        }
    }
}

/// Whether a value of `held` means that the thread holds the mutex.
#[inline(always)]
fn is_held(held: u32) -> bool {
    !held.is_multiple_of(2)
}

impl AcquisitionHistory {
    /// Adjusts the threshold after a revocation. The biased thread had acquired the mutex `uses` times.
    fn record_revocation(&mut self, uses: u32) {
        self.bias_threshold = match uses >= REPAYING_USES {
            true => self.halved_threshold(),
            false => self.bias_threshold.saturating_mul(2).min(LAST_BIAS_THRESHOLD),
        };
        self.uses = 0;
    }

    fn halved_threshold(&self) -> u32 {
        (self.bias_threshold / 2).max(FIRST_BIAS_THRESHOLD)
    }

    /// Records an acquisition under `others`. Returns the new `biased_to` if the mutex is now biased to the thread.
    fn record_acquisition(&mut self, token: usize) -> Option<usize> {
        if self.last_token != token {
            (self.last_token, self.consecutive) = (token, 0);
        }
        self.consecutive += 1;
        self.uses += 1;
        if self.uses == REPAYING_USES {
            (self.bias_threshold, self.uses) = (self.halved_threshold(), 0);
        }
        if self.consecutive < self.bias_threshold || !may_bias() {
            // The bound prevents an overflow where no mutex may be biased.
            self.consecutive = self.consecutive.min(LAST_BIAS_THRESHOLD);
            return None;
        }
        self.consecutive = 0;
        let index = self.biased_threads.iter().position(|&other| other == token || other == NO_TOKEN)?;
        self.biased_threads[index] = token;
        Some(token | index)
    }
}

/// Holds the mutex until it is dropped.
pub struct Guard<'a, T> {
    mutex: &'a BiasedMutex<T>,
    /// The thread's `held` if the mutex is biased to it; otherwise this thread holds `others`. A guard fits into two
    /// registers.
    held: Option<&'a AtomicU32>,
    /// Only the thread that acquired the mutex may release it.
    not_send: PhantomData<*const ()>,
}

impl<'a, T> Guard<'a, T> {
    #[inline(always)]
    fn new(mutex: &'a BiasedMutex<T>, held: Option<&'a AtomicU32>) -> Guard<'a, T> {
        Guard { mutex, held, not_send: PhantomData }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        match self.held {
            // Release: this thread's accesses to the value happen before the next acquisition.
            Some(held) => held.store(held.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release),
            // SAFETY: this thread holds `others`.
            None => unsafe { unlock(&self.mutex.others) },
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the mutex, and the guard is borrowed.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the mutex, and the guard is borrowed mutably.
        unsafe { &mut *self.mutex.value.get() }
    }
}
