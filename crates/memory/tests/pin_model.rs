//! The pin protocol in every interleaving that loom finds: no reader beside a writer, no wake-up lost.
//!
//! `src/pin.rs` is compiled here once more with loom's atomics, and with a futex made of loom's mutex and condition
//! variable. Loom fails the test when all threads sleep, or when a reader and a writer touch the content concurrently.
//!
//! Mutations that this has found: a relaxed addition in `pin`, or subtraction in `unpin`; a relaxed load of the pins in
//! `close`; a relaxed `open`; no `wake_all` in `unpin` or in `open`; WAITING not set before a sleep.

#[path = "../../shm/tests/loom_common/mod.rs"]
mod loom_common;
#[path = "../src/pin.rs"]
#[allow(dead_code, clippy::reversed_empty_ranges, reason = "the model uses not all of it, and does not spin")]
mod pin;

#[path = "loom_common/sync.rs"]
#[allow(dead_code, unused_imports, reason = "the model uses not all of it")]
mod sync;

use loom::sync::Arc;
use loom::thread;
use loom_common::{Watched, model};
use pin::PinLock;

fn lock() -> Arc<PinLock<Watched>> {
    Arc::new(PinLock::new(Watched::new()))
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
    model(2, || {
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
    model(2, || {
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
    model(2, || {
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
