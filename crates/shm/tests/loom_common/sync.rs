//! Stands in for `src/sync.rs` in the models.

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use loom::sync::{RwLockReadGuard, RwLockWriteGuard};

/// Four cache lines, so that a model gets around the ring.
pub(crate) const RING_BYTES: u64 = 256;
pub(crate) const HEADERS_BYTES_MAX: usize = 512;
/// What fills a cache line. A longer record is a run.
pub(crate) const PACKET_BYTES_MAX: usize = 40;
pub(crate) const RUN_HEAD_BYTES: usize = 8;

pub(crate) fn full_fence() {
    fence(Ordering::SeqCst);
}

/// `terrace_sync`'s interface, without poison.
pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> RwLock<T> {
        RwLock(loom::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap()
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap()
    }

    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.0.try_write().ok()
    }
}
