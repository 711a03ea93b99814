//! A biased mutex: the thread that uses it most takes it without a locked instruction.
//!
//! A locked instruction waits until all earlier stores of the thread are in the cache, and later instructions wait for
//! it. Several locks around a few bytes are faster without locked instructions. Behind a copy of a page the difference
//! is small ([decision 42](../../../docs/decisions/0042-biased-locks-and-the-store-buffer.md)).
//!
//! ```text
//!   the biased thread                    another thread, which has locked `others`
//!   held = true                          biased_to = nobody
//!   -- light barrier --                  -- heavy barrier --
//!   biased_to is still me?               waits until held = false
//!     yes: acquired; held = false on release
//!     no:  held = false, then locks `others`
//! ```
//! Either the biased thread sees that its bias is revoked, or the revoking thread sees `held`. The light barrier is a
//! compiler barrier. The heavy one is a system call that makes all running threads of the process pass a barrier
//! (`membarrier(2)`). After a revocation every thread locks `others`, until one thread has taken the mutex as many
//! times in a row as the bias threshold says. Each revocation doubles the threshold, or halves it if the biased thread
//! had taken the mutex often enough to repay the revocation. As many uses without a bias halve it, too.
//!
//! Each thread that the mutex was ever biased to has a `held` of its own: a thread that is stopped between its first
//! load of `biased_to` and its store to `held` raises `held` much later, when the mutex may be biased to another
//! thread. `held` counts the thread's acquisitions and releases: it is odd in between.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::platform::{
    AtomicU32, AtomicUsize, FIRST_BIAS_THRESHOLD, Ordering, RawMutex, heavy_barrier, light_barrier, lock,
    may_bias, raw_mutex, token, unlock, wait_a_little,
};

/// Threads that one mutex can be biased to in its life. Other threads always lock `others`.
const BIASED_THREADS: usize = 4;
/// The low bits of a thread's token are 0. In `biased_to` they hold the index of the thread's `held`.
const WHICH: usize = BIASED_THREADS - 1;
const NOBODY: usize = 0;

/// The largest bias threshold.
const LAST_BIAS_THRESHOLD: u32 = 1 << 20;

/// Uses by the biased thread that repay a revocation: that costs some microseconds, and each biased use saves some
/// nanoseconds. Other threads cannot force revocations more often than about once in so many uses.
const WORTH_USES: u32 = 1 << 14;

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

/// Which threads took the mutex, for the decision whether to bias it.
struct AcquisitionHistory {
    last: usize,
    /// Acquisitions in a row by `last`.
    times: u32,
    /// Acquisitions in a row that bias the mutex.
    bias_threshold: u32,
    /// Acquisitions under `others` since the threshold changed.
    uses: u32,
    /// The biased thread's `held` when the bias began.
    held_before: u32,
    /// Tokens of the threads that the mutex was ever biased to. A thread gets another thread's token only after that
    /// thread has ended.
    biased_threads: [usize; BIASED_THREADS],
}

// SAFETY: as for any mutex: one thread at a time gets at the value.
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> BiasedMutex<T> {
    /// A free mutex.
    pub fn new(value: T) -> BiasedMutex<T> {
        let history = AcquisitionHistory {
            last: NOBODY,
            times: 0,
            bias_threshold: FIRST_BIAS_THRESHOLD,
            uses: 0,
            held_before: 0,
            biased_threads: [NOBODY; BIASED_THREADS],
        };
        BiasedMutex {
            biased_to: AtomicUsize::new(NOBODY),
            held: std::array::from_fn(|_| AtomicU32::new(0)),
            others: raw_mutex(),
            history: UnsafeCell::new(history),
            value: UnsafeCell::new(value),
        }
    }

    /// Whether it is biased to a thread now.
    #[cfg(test)]
    pub(crate) fn is_biased(&self) -> bool {
        self.biased_to.load(Ordering::Relaxed) != NOBODY
    }

    /// Acquires the mutex.
    #[inline(always)]
    pub fn lock(&self) -> Guard<'_, T> {
        let biased_to = self.biased_to.load(Ordering::Relaxed);
        if biased_to & !WHICH == token() {
            let held = &self.held[biased_to & WHICH];
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
        Guard::new(self, self.lock_as_others())
    }

    /// The slow path. Returns the `held` of this thread if the mutex is biased to it from now on; otherwise this thread
    /// has `others`.
    #[cold]
    #[inline(never)]
    fn lock_as_others(&self) -> Option<&AtomicU32> {
        lock(&self.others);
        // SAFETY: this thread has `others`.
        let history = unsafe { &mut *self.history.get() };
        let biased_to = self.biased_to.load(Ordering::Relaxed);
        if biased_to != NOBODY {
            let held = self.revoke_bias(biased_to);
            history.note_revoked(held.wrapping_sub(history.held_before) / 2);
        }
        let biased_to = history.note(token())?;
        let held = &self.held[biased_to & WHICH];
        history.held_before = held.load(Ordering::Relaxed);
        held.store(history.held_before.wrapping_add(1), Ordering::Relaxed);
        // A revoking thread has locked `others` after this, so it sees both stores.
        self.biased_to.store(biased_to, Ordering::Relaxed);
        // SAFETY: this thread has `others`, and does not access `history` any more.
        unsafe { unlock(&self.others) };
        Some(held)
    }

    /// Returns the final `held` of the thread that was biased.
    fn revoke_bias(&self, biased_to: usize) -> u32 {
        self.biased_to.store(NOBODY, Ordering::Relaxed);
        heavy_barrier();
        let mut looks = 0;
        loop {
            // Acquire: the biased thread's accesses to the value happen before those of this thread.
            let held = self.held[biased_to & WHICH].load(Ordering::Acquire);
            if !is_held(held) {
                return held;
            }
            looks += 1;
            wait_a_little(looks);
        }
    }
}

/// Whether a value of `held` says that the thread has the mutex.
#[inline(always)]
fn is_held(held: u32) -> bool {
    !held.is_multiple_of(2)
}

impl AcquisitionHistory {
    /// The bias was revoked after `uses` acquisitions by the biased thread.
    fn note_revoked(&mut self, uses: u32) {
        self.bias_threshold = match uses >= WORTH_USES {
            true => self.less(),
            false => self.bias_threshold.saturating_mul(2).min(LAST_BIAS_THRESHOLD),
        };
        self.uses = 0;
    }

    fn less(&self) -> u32 {
        (self.bias_threshold / 2).max(FIRST_BIAS_THRESHOLD)
    }

    /// A thread has taken the mutex under `others`. Returns the new `biased_to` if the mutex is biased to it from now
    /// on.
    fn note(&mut self, me: usize) -> Option<usize> {
        if self.last != me {
            (self.last, self.times) = (me, 0);
        }
        self.times += 1;
        self.uses += 1;
        if self.uses == WORTH_USES {
            (self.bias_threshold, self.uses) = (self.less(), 0);
        }
        if self.times < self.bias_threshold || !may_bias() {
            // So that it does not overflow where no mutex may be biased.
            self.times = self.times.min(LAST_BIAS_THRESHOLD);
            return None;
        }
        self.times = 0;
        let which = self.biased_threads.iter().position(|&leaner| leaner == me || leaner == NOBODY)?;
        self.biased_threads[which] = me;
        Some(me | which)
    }
}

/// Holds the mutex until it is dropped.
pub struct Guard<'a, T> {
    mutex: &'a BiasedMutex<T>,
    /// The thread's `held` if the mutex is biased to it; otherwise this thread has `others`. A guard fits into two
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
            // Release: accesses to the value come before.
            Some(held) => held.store(held.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release),
            // SAFETY: this thread has `others`.
            None => unsafe { unlock(&self.mutex.others) },
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread has the mutex, and the guard is borrowed.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread has the mutex, and the guard is borrowed mutably.
        unsafe { &mut *self.mutex.value.get() }
    }
}
