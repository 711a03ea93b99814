//! Biased mutexes with real threads and the system's barrier.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use terrace_sync::{BiasedMutex, allow_bias};

/// Two numbers that are equal whenever the mutex is free.
struct Pair(AtomicU64, AtomicU64);

impl Pair {
    /// Fails if two threads run it at a time.
    fn count(&self) {
        let (one, other) = (self.0.load(Ordering::Relaxed), self.1.load(Ordering::Relaxed));
        assert_eq!(one, other, "somebody else is here");
        self.0.store(one + 1, Ordering::Relaxed);
        self.1.store(other + 1, Ordering::Relaxed);
    }
}

fn pair() -> BiasedMutex<Pair> {
    allow_bias();
    BiasedMutex::new(Pair(AtomicU64::new(0), AtomicU64::new(0)))
}

/// Enough to bias the mutex between revocations.
const USES: u64 = 4000;

#[test]
fn who_uses_it_most_and_others_now_and_then_are_never_there_at_a_time() {
    let mutex = pair();
    let done = AtomicBool::new(false);
    let visits = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut visits = 0;
            while !done.load(Ordering::Relaxed) {
                mutex.lock().count();
                visits += 1;
                std::thread::sleep(Duration::from_micros(200));
            }
            visits
        });
        for _ in 0..200 * USES {
            mutex.lock().count();
        }
        done.store(true, Ordering::Relaxed);
        other.join().expect("no tear")
    });
    assert_eq!(mutex.lock().0.load(Ordering::Relaxed), 200 * USES + visits);
}

#[test]
fn more_threads_than_it_can_lean_to_take_turns() {
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

/// The next thread may have the token of the one before.
#[test]
fn threads_that_come_and_go_leave_it_to_the_next() {
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
fn a_forked_child_takes_what_leans_to_a_thread_that_it_does_not_have() {
    let mutex = pair();
    std::thread::scope(|scope| {
        scope.spawn(|| (0..USES).for_each(|_| mutex.lock().count())).join().expect("no tear");
        // SAFETY: the child takes one mutex that is free, and ends.
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
