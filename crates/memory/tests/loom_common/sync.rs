//! Stands in for `src/sync.rs` in the models, and for that of `terrace-shm`, of which they compile a part.

pub(crate) use std::cell::UnsafeCell;

pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
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

pub(crate) fn full_fence() {
    loom::sync::atomic::fence(Ordering::SeqCst);
}
