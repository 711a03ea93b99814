//! Stands in for `src/platform.rs` in models: the mutex's interface, without poison, over loom's.

use loom::sync::MutexGuard;
#[allow(unused_imports, reason = "a model may bring atomics of its own")]
pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}
