//! A mutex that costs the thread that uses it most no locked instruction.
//!
//! A locked instruction waits until all that the thread has stored before is in the cache, and what comes after it waits as well. What takes
//! a mutex some times for a few bytes is done sooner without; behind a copy of a page it makes little difference
//! ([decision 42](../../../docs/decisions/0042-locks-lean-and-stores-count.md)).
//!
//! ```text
//!   the thread that it leans to          another one, which has locked `others`
//!   held = true                          biased_to = nobody
//!   -- light barrier --                  -- heavy barrier --
//!   biased_to is still me?                waits until held = false
//!     yes: it has it; held = false at the end
//!     no:  held = false, and as all others
//! ```
//! Either the thread sees that it does not lean to it any more, or the other one sees that it is held. The light barrier is one
//! for the compiler only; the heavy one is a system call that makes all running threads of the process pass a barrier
//! (`membarrier(2)`). From then on the mutex is the one that is named `others`, until one thread has taken it so often, and nobody
//! else in between, that it leans again. Each time it has to be taken back that takes twice as often as the time before, unless it had
//! leaned for so many uses that they were worth it: then half as often. Without leaning, as many uses halve it, too.
//!
//! `held` is the thread's own, one for each thread that the mutex has ever leaned to: one that stops between the two lines of its first
//! look raises it for a moment much later, when the mutex may lean to somebody else. It counts how often the thread has taken the mutex
//! and let it go, and is odd in between.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::platform::{
    AtomicU32, AtomicUsize, FIRST_BIAS_THRESHOLD, Ordering, RawMutex, heavy_barrier, light_barrier, lock,
    may_bias, raw_mutex, token, unlock, wait_a_little,
};

/// Threads that one mutex leans to in its life. Further ones take it as any other.
const BIASED_THREADS: usize = 4;
/// In the low bits of a thread's token, which are 0: which of them it is.
const WHICH: usize = BIASED_THREADS - 1;
const NOBODY: usize = 0;

/// How often in a row a thread must take a mutex that was taken back many times.
const LAST_BIAS_THRESHOLD: u32 = 1 << 20;

/// Uses by the thread that it leans to that are worth more than to take it back: that costs some microseconds, and each use saves some
/// nanoseconds. Nobody can have it taken back more often than about once in so many uses.
const WORTH_USES: u32 = 1 << 14;

/// A mutex that leans to the thread that uses it most. No thread may take it twice; a guard is not for other threads.
#[repr(C)]
pub struct BiasedMutex<T> {
    /// Token of the thread that need not ask anybody, and which of `held` is its own. Changed by whoever has `others`.
    biased_to: AtomicUsize,
    held: [AtomicU32; BIASED_THREADS],
    others: RawMutex,
    /// For whoever has `others`.
    history: UnsafeCell<AcquisitionHistory>,
    value: UnsafeCell<T>,
}

/// Who takes it.
struct AcquisitionHistory {
    last: usize,
    /// How often in a row.
    times: u32,
    /// How often it takes for it to lean.
    bias_threshold: u32,
    /// Uses since that changed, but for those by the thread that it leaned to.
    uses: u32,
    /// What that thread's `held` was when it last began to lean.
    held_before: u32,
    /// Tokens of those whom it has leaned to. The next thread with the same token comes after the end of that one.
    biased_threads: [usize; BIASED_THREADS],
}

// SAFETY: as for any mutex: one thread at a time gets at the value.
unsafe impl<T: Send> Sync for BiasedMutex<T> {}

impl<T> BiasedMutex<T> {
    /// One that nobody has.
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

    /// Whether it leans to a thread just now.
    #[cfg(test)]
    pub(crate) fn is_biased(&self) -> bool {
        self.biased_to.load(Ordering::Relaxed) != NOBODY
    }

    /// Waits until no other thread has it.
    #[inline(always)]
    pub fn lock(&self) -> Guard<'_, T> {
        let biased_to = self.biased_to.load(Ordering::Relaxed);
        if biased_to & !WHICH == token() {
            let held = &self.held[biased_to & WHICH];
            // A thread that takes it twice waits for itself, as with any mutex, and does not get it twice.
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

    /// Takes it where it does not lean to this thread. What says that it is held, if it does from now on; otherwise this thread has
    /// `others`.
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
        // Whoever takes it back has locked `others` after this: all of it is seen.
        self.biased_to.store(biased_to, Ordering::Relaxed);
        // SAFETY: this thread has it, and looks at `history` no more.
        unsafe { unlock(&self.others) };
        Some(held)
    }

    /// Returns the `held` of the thread that it leaned to.
    fn revoke_bias(&self, biased_to: usize) -> u32 {
        self.biased_to.store(NOBODY, Ordering::Relaxed);
        heavy_barrier();
        let mut looks = 0;
        loop {
            // Acquire: what that thread did with it comes before what is done with it now.
            let held = self.held[biased_to & WHICH].load(Ordering::Acquire);
            if !is_held(held) {
                return held;
            }
            looks += 1;
            wait_a_little(looks);
        }
    }
}

/// Whether `held` says so.
#[inline(always)]
fn is_held(held: u32) -> bool {
    !held.is_multiple_of(2)
}

impl AcquisitionHistory {
    /// It was taken back after so many uses by the thread that it leaned to.
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

    /// A thread takes it. Whether it leans to that one from now on: what `biased_to` becomes.
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
            // Not to overflow where none leans.
            self.times = self.times.min(LAST_BIAS_THRESHOLD);
            return None;
        }
        self.times = 0;
        let which = self.biased_threads.iter().position(|&leaner| leaner == me || leaner == NOBODY)?;
        self.biased_threads[which] = me;
        Some(me | which)
    }
}

/// Has the mutex until it is dropped.
pub struct Guard<'a, T> {
    mutex: &'a BiasedMutex<T>,
    /// What says so, if the mutex leans to this thread; otherwise this thread has `others`. No more than what goes into two registers.
    held: Option<&'a AtomicU32>,
    /// Only the thread that took it may let it go.
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
            // Release: what was done with it comes before.
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
