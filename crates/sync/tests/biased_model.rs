//! Biased mutexes in every interleaving that loom finds: mutual exclusion holds, and each holder sees the writes of the
//! previous one.
//!
//! `src/biased.rs` is compiled here again with loom's types. Loom has no `membarrier`: full fences replace the light
//! and the heavy barrier, because a pair of these barriers has the same ordering as a pair of full fences.

#[path = "../src/biased.rs"]
#[allow(dead_code, reason = "the model uses only a part")]
mod biased;

/// Replaces `src/platform.rs`.
mod platform {
    use std::cell::Cell;

    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
    use loom::sync::{Condvar, Mutex};

    /// A mutex is biased at its first use.
    pub(crate) const FIRST_BIAS_THRESHOLD: u32 = 1;

    /// A mutex whose value is true while the lock is held.
    pub(crate) struct RawMutex(Mutex<bool>, Condvar);

    pub(crate) fn raw_mutex() -> RawMutex {
        RawMutex(Mutex::new(false), Condvar::new())
    }

    pub(crate) fn lock(RawMutex(taken, free): &RawMutex) {
        let mut taken = taken.lock().unwrap();
        while *taken {
            taken = free.wait(taken).unwrap();
        }
        *taken = true;
    }

    pub(crate) unsafe fn unlock(RawMutex(taken, free): &RawMutex) {
        *taken.lock().unwrap() = false;
        free.notify_one();
    }

    loom::thread_local! {
        static NUMBER: Cell<usize> = Cell::new(0);
    }

    /// Sets the calling thread's number.
    pub(crate) fn set_thread_number(number: usize) {
        NUMBER.with(|mine| mine.set(number));
    }

    pub(crate) fn token() -> usize {
        NUMBER.with(|mine| mine.get()) * 64
    }

    pub(crate) fn may_bias() -> bool {
        true
    }

    pub(crate) fn light_barrier() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(crate) fn heavy_barrier() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(crate) fn back_off(_checks: u32) {
        loom::thread::yield_now();
    }
}

use biased::BiasedMutex;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// Thread i acquires the mutex `threads[i]` times, and adds 1 to a value whose accesses loom checks.
fn model(preemptions: usize, threads: &'static [usize]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || {
        let mutex = Arc::new(BiasedMutex::new(UnsafeCell::new(0)));
        let count = |number: usize, times: usize, mutex: &BiasedMutex<UnsafeCell<usize>>| {
            platform::set_thread_number(number);
            for _ in 0..times {
                let guard = mutex.lock();
                // SAFETY: loom panics when another thread accesses the value at the same time.
                guard.with_mut(|value| unsafe { *value += 1 });
            }
        };
        let mut others = Vec::new();
        for (index, &times) in threads.iter().enumerate().skip(1) {
            let mutex = mutex.clone();
            others.push(thread::spawn(move || count(index + 1, times, &mutex)));
        }
        count(1, threads[0], &mutex);
        others.into_iter().for_each(|other| other.join().unwrap());
        // SAFETY: loom panics when another thread changes the value.
        let sum = mutex.lock().with(|value| unsafe { *value });
        assert_eq!(sum, threads.iter().sum());
    });
}

#[test]
fn a_bias_is_revoked_while_its_thread_uses_the_mutex() {
    model(4, &[3, 1]);
}

#[test]
fn two_threads_revoke_each_others_bias() {
    model(3, &[2, 2]);
}

/// A thread that has just read `biased_to` continues after the mutex was biased to another thread, while that bias is
/// being revoked.
#[test]
fn three_threads_revoke_each_others_bias() {
    model(3, &[2, 1, 1]);
}
