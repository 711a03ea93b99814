//! The locks that survive `fork` in every interleaving that loom finds: mutual exclusion holds, each holder sees what
//! the last one did, and no thread sleeps for ever.
//!
//! `src/words.rs` is compiled here again with loom's atomics, and with a futex made of loom's mutex and condition
//! variables. Loom fails a test when all threads sleep.
//!
//! Mutations that this has found, in the mutex: a relaxed `swap` in `release`; a relaxed `fetch_max` in `acquire_slow`,
//! or one with TAKEN; no `wake`; a reservation that is not taken back. In the readers-writer lock: a relaxed
//! `fetch_sub` or `swap`; a relaxed `try_acquire`; SLEEPERS not set before a sleep; no `wake` in `wake_sleepers` or
//! `release_exclusive`; a writer that enters beside readers. In the condition variable: no change of the word; no
//! `wake`.

#[path = "../src/words.rs"]
#[allow(dead_code, clippy::reversed_empty_ranges, reason = "the model uses not all of it, and does not spin")]
mod words;

/// Stands in for `src/platform.rs`.
mod platform {
    use std::cell::Cell;
    use std::time::Duration;

    pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};

    pub(crate) const SPINS: u32 = 0;
    pub(crate) const ALL: u32 = u32::MAX;

    pub(crate) fn spin_loop() {}

    /// The sleepers of all words, in the order in which they came.
    #[derive(Default)]
    struct Queue {
        next_ticket: usize,
        /// The address of each sleeper's word, and its ticket.
        sleepers: Vec<(usize, usize)>,
    }

    loom::lazy_static! {
        static ref QUEUE: (Mutex<Queue>, Condvar) = (Mutex::new(Queue::default()), Condvar::new());
    }

    fn address(word: &AtomicU32) -> usize {
        std::ptr::from_ref(word) as usize
    }

    pub(crate) fn sleep(word: &AtomicU32, expected: u32, _: Option<Duration>) {
        let mut queue = QUEUE.0.lock().unwrap();
        if word.load(Ordering::Relaxed) != expected {
            return;
        }
        let me = (address(word), queue.next_ticket);
        queue.next_ticket += 1;
        queue.sleepers.push(me);
        while queue.sleepers.contains(&me) {
            queue = QUEUE.1.wait(queue).unwrap();
        }
    }

    pub(crate) fn wake(word: &AtomicU32, count: u32) -> usize {
        let mut queue = QUEUE.0.lock().unwrap();
        let mut woken = 0;
        queue.sleepers.retain(|(at, _)| {
            let stays = *at != address(word) || woken == count;
            woken += u32::from(!stays);
            stays
        });
        QUEUE.1.notify_all();
        woken as usize
    }

    thread_local! {
        /// Whether every wait of the model is long. Loom's threads are all on one thread of the system.
        static ARE_LONG: Cell<bool> = const { Cell::new(false) };
    }

    pub(crate) fn make_waits_long() {
        ARE_LONG.set(true);
    }

    pub(crate) struct Wait;

    impl Wait {
        pub(crate) fn begin() -> Wait {
            Wait
        }

        pub(crate) fn is_long(&self) -> bool {
            ARE_LONG.get()
        }
    }
}

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use platform::AtomicU32;
use words::{FREE, Notifications, RawMutex, RawRwLock};

fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

/// A lock's word, and a number that it protects.
struct Protected<L>(L, UnsafeCell<usize>);

// SAFETY: that accesses do not conflict is what the models check.
unsafe impl<L> Sync for Protected<L> {}
// SAFETY: a number in a cell.
unsafe impl<L> Send for Protected<L> {}

impl<L> Protected<L> {
    fn new(lock: L) -> Arc<Protected<L>> {
        Arc::new(Protected(lock, UnsafeCell::new(0)))
    }

    fn get(&self) -> usize {
        // SAFETY: loom panics when another thread writes at the same time.
        self.1.with(|value| unsafe { *value })
    }

    fn add_1(&self) {
        // SAFETY: loom panics when another thread reads or writes at the same time.
        self.1.with_mut(|value| unsafe { *value += 1 });
    }
}

fn mutex() -> Arc<Protected<RawMutex>> {
    Protected::new(RawMutex { state: AtomicU32::new(FREE) })
}

/// Each thread takes the mutex so many times.
fn mutex_excludes(preemptions: usize, threads: &'static [usize]) {
    model(preemptions, move || {
        let mutex = mutex();
        let count = |times: usize, mutex: &Protected<RawMutex>| {
            for _ in 0..times {
                mutex.0.acquire();
                mutex.add_1();
                mutex.0.release();
            }
        };
        let mut others = Vec::new();
        for &times in &threads[1..] {
            let mutex = mutex.clone();
            others.push(thread::spawn(move || count(times, &mutex)));
        }
        count(threads[0], &mutex);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(!mutex.0.is_taken());
        assert!(mutex.0.try_acquire(), "nobody has it, and nobody will come for it");
        assert_eq!(mutex.get(), threads.iter().sum());
    });
}

#[test]
fn a_mutex_has_one_holder_and_nobody_sleeps_for_ever() {
    mutex_excludes(3, &[2, 1, 1]);
}

#[test]
fn a_mutex_is_reserved_for_a_thread_that_has_waited_long() {
    platform::make_waits_long();
    mutex_excludes(3, &[2, 2]);
    mutex_excludes(2, &[2, 1, 1]);
}

/// Each thread enters as often: to read (false), or to write (true).
fn rwlock_excludes(preemptions: usize, threads: &'static [&'static [bool]]) {
    model(preemptions, move || {
        let lock = Protected::new(RawRwLock { state: AtomicU32::new(0) });
        let run = |writes: &[bool], lock: &Protected<RawRwLock>| {
            for &writes in writes {
                if writes {
                    lock.0.acquire_exclusive();
                    lock.add_1();
                    lock.0.release_exclusive();
                } else {
                    lock.0.acquire_shared();
                    assert_eq!(lock.get(), lock.get());
                    lock.0.release_shared();
                }
            }
        };
        let mut others = Vec::new();
        for &writes in &threads[1..] {
            let lock = lock.clone();
            others.push(thread::spawn(move || run(writes, &lock)));
        }
        run(threads[0], &lock);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(lock.0.try_acquire_exclusive(), "nobody is inside");
        assert_eq!(
            lock.get(),
            threads.iter().flat_map(|writes| writes.iter()).filter(|&&writes| writes).count()
        );
    });
}

#[test]
fn writers_exclude_each_other() {
    rwlock_excludes(3, &[&[true, true], &[true]]);
    rwlock_excludes(2, &[&[true], &[true], &[true]]);
}

#[test]
fn a_writer_excludes_readers() {
    rwlock_excludes(2, &[&[true], &[false], &[false]]);
    rwlock_excludes(3, &[&[true, false], &[false, true]]);
}

#[test]
fn writers_and_readers_wake_each_other() {
    rwlock_excludes(2, &[&[true], &[true], &[false]]);
}

#[test]
fn who_waits_for_a_condition_misses_no_notification() {
    model(3, || {
        let shared = Arc::new((mutex(), Notifications(AtomicU32::new(0))));
        let waiter = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (mutex, notifications) = &*shared;
                mutex.0.acquire();
                while mutex.get() == 0 {
                    let seen = notifications.count();
                    mutex.0.release();
                    notifications.wait(seen, None);
                    mutex.0.acquire();
                }
                mutex.0.release();
            })
        };
        let (mutex, notifications) = &*shared;
        mutex.0.acquire();
        mutex.add_1();
        mutex.0.release();
        notifications.notify(1);
        waiter.join().unwrap();
    });
}
