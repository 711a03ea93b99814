//! The pin protocol in every interleaving that loom finds: no reader beside a writer, no wake-up lost.
//!
//! `src/pin.rs` is compiled here once more with loom's atomics, and with a futex made of loom's mutex and condition
//! variable. Loom fails the test when all threads sleep, or when a reader and a writer touch the content concurrently.

#[path = "../src/pin.rs"]
#[allow(dead_code, clippy::reversed_empty_ranges, reason = "the model uses not all of it, and does not spin")]
mod pin;

/// Stands in for `src/sync.rs`.
mod sync {
    pub(crate) use std::cell::UnsafeCell;

    pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};

    pub(crate) const SPINS: u32 = 0;

    pub(crate) fn pause() {}

    loom::lazy_static! {
        static ref QUEUE: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
    }

    pub(crate) fn wait(word: &AtomicU32, expected: u32) {
        let guard = QUEUE.0.lock().unwrap();
        if word.load(Ordering::Relaxed) == expected {
            drop(QUEUE.1.wait(guard).unwrap());
        }
    }

    pub(crate) fn wake_all(_word: &AtomicU32) {
        drop(QUEUE.0.lock().unwrap());
        QUEUE.1.notify_all();
    }
}

use loom::sync::Arc;
use loom::thread;
use pin::PinLock;

/// Content whose accesses loom watches.
struct Watched(loom::cell::UnsafeCell<u32>);

// SAFETY: that accesses do not conflict is what the model checks.
unsafe impl Sync for Watched {}
// SAFETY: a number in a cell.
unsafe impl Send for Watched {}

impl Watched {
    fn get(&self) -> u32 {
        // SAFETY: loom panics when another thread writes at the same time.
        self.0.with(|value| unsafe { *value })
    }

    fn add(&self, amount: u32) {
        // SAFETY: loom panics when another thread reads or writes at the same time.
        self.0.with_mut(|value| unsafe { *value += amount });
    }
}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(body);
}

fn lock() -> Arc<PinLock<Watched>> {
    Arc::new(PinLock::new(Watched(loom::cell::UnsafeCell::new(0))))
}

fn reader(lock: &Arc<PinLock<Watched>>) -> thread::JoinHandle<()> {
    let lock = lock.clone();
    thread::spawn(move || {
        let pinned = lock.pin();
        assert_eq!(pinned.get(), pinned.get(), "the content changed under a pin");
    })
}

fn writer(lock: &Arc<PinLock<Watched>>) -> thread::JoinHandle<()> {
    let lock = lock.clone();
    thread::spawn(move || lock.close().add(1))
}

#[test]
fn readers_and_a_writer_exclude_each_other() {
    model(|| {
        let lock = lock();
        let threads = [reader(&lock), reader(&lock)];
        lock.close().add(1);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(lock.pin().get(), 1);
    });
}

#[test]
fn writers_exclude_each_other() {
    model(|| {
        let lock = lock();
        let threads = [writer(&lock), reader(&lock)];
        lock.close().add(1);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(lock.pin().get(), 2);
    });
}

#[test]
fn a_raw_hold_excludes_readers_until_it_ends() {
    model(|| {
        let lock = lock();
        let threads = [reader(&lock), writer(&lock)];
        lock.close_raw();
        lock.open_raw();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(lock.pin().get(), 1);
    });
}
