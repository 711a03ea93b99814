//! Biased mutexes with real threads and the kernel's barrier.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use terrace_sync::{BiasedMutex, allow_bias};

/// Two numbers that are equal whenever the mutex is free.
struct Pair(AtomicU64, AtomicU64);

impl Pair {
    /// Fails if two threads run it concurrently.
    fn count(&self) {
        let (one, other) = (self.0.load(Ordering::Relaxed), self.1.load(Ordering::Relaxed));
        assert_eq!(one, other, "another thread is in the critical section");
        self.0.store(one + 1, Ordering::Relaxed);
        self.1.store(other + 1, Ordering::Relaxed);
    }
}

fn pair() -> BiasedMutex<Pair> {
    allow_bias();
    BiasedMutex::new(Pair(AtomicU64::new(0), AtomicU64::new(0)))
}

/// Uses that suffice to bias the mutex between revocations.
const USES: u64 = 4000;

#[test]
fn mutual_exclusion_holds_between_a_frequent_and_a_rare_user() {
    let mutex = pair();
    let done = AtomicBool::new(false);
    let acquisitions = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut acquisitions = 0;
            while !done.load(Ordering::Relaxed) {
                mutex.lock().count();
                acquisitions += 1;
                std::thread::sleep(Duration::from_micros(200));
            }
            acquisitions
        });
        for _ in 0..200 * USES {
            mutex.lock().count();
        }
        done.store(true, Ordering::Relaxed);
        other.join().expect("no panic")
    });
    assert_eq!(mutex.lock().0.load(Ordering::Relaxed), 200 * USES + acquisitions);
}

#[test]
fn mutual_exclusion_holds_with_more_threads_than_biases() {
    let mutex = pair();
    std::thread::scope(|scope| {
        for _ in 0..7 {
            scope.spawn(|| {
                for round in 0..10 * USES {
                    mutex.lock().count();
                    if round % USES == 0 {
                        std::thread::yield_now();
                    }
                }
            });
        }
    });
    assert_eq!(mutex.lock().0.load(Ordering::Relaxed), 7 * 10 * USES);
}

/// A new thread may have the token of an ended one.
#[test]
fn ended_threads_leave_the_mutex_usable() {
    let mutex = pair();
    for _ in 0..20 {
        std::thread::scope(|scope| {
            scope.spawn(|| (0..2 * USES).for_each(|_| mutex.lock().count()));
        });
        mutex.lock().count();
    }
    assert_eq!(mutex.lock().0.load(Ordering::Relaxed), 20 * (2 * USES + 1));
}

#[test]
fn a_forked_child_acquires_a_mutex_biased_to_a_thread_of_the_parent() {
    let mutex = pair();
    std::thread::scope(|scope| {
        scope.spawn(|| (0..USES).for_each(|_| mutex.lock().count())).join().expect("no panic");
        // SAFETY: the child acquires one mutex that is free, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            mutex.lock().count();
            let sum = mutex.lock().1.load(Ordering::Relaxed);
            // SAFETY: always.
            unsafe { libc::_exit(i32::from(sum != USES + 1)) };
        }
        let mut status = -1;
        // SAFETY: our child, and a status of ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    });
}
