//! Stands in for `src/sync.rs`.
//!
//! Loom takes a sequentially consistent access for an acquire and release one, and finds interleavings that the
//! language does not have. So fences are added here: one before each such load, or one behind each such store, and both
//! at a change. Either of the two gives "if each of two threads stores and then loads what the other one stores, one of
//! them sees it". Each model runs with both: the fences before loads would hide a store that is not sequentially
//! consistent, and those behind stores would hide such a load.

use std::cell::Cell;

pub(crate) use loom::sync::atomic::Ordering;
use loom::sync::atomic::fence;
pub(crate) use platform::Mutex;

/// Stands in for `terrace_sync`.
#[path = "../../../sync/tests/loom_common/platform.rs"]
mod platform;

thread_local! {
    /// Whether the fences are before loads. Loom's threads are all on one thread of the system.
    static BEFORE_LOADS: Cell<bool> = const { Cell::new(false) };
}

/// Tries a body in every interleaving with at most so many preemptions.
pub(crate) fn model(preemptions: usize, body: impl Fn() + Sync + Send + Copy + 'static) {
    for before_loads in [false, true] {
        BEFORE_LOADS.set(before_loads);
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(body);
    }
}

fn fence_before_load(order: Ordering) {
    if order == Ordering::SeqCst && BEFORE_LOADS.get() {
        fence(Ordering::SeqCst);
    }
}

fn fence_behind_store(order: Ordering) {
    if order == Ordering::SeqCst && !BEFORE_LOADS.get() {
        fence(Ordering::SeqCst);
    }
}

fn changed<T>(order: Ordering, change: impl FnOnce() -> T) -> T {
    fence_before_load(order);
    let before = change();
    fence_behind_store(order);
    before
}

macro_rules! atomics {
    ($($name:ident($of:ty)),*) => { $(
        #[derive(Debug, Default)]
        pub(crate) struct $name(loom::sync::atomic::$name);

        #[allow(dead_code, reason = "not each type is used in each way")]
        impl $name {
            pub(crate) fn new(value: $of) -> $name {
                $name(loom::sync::atomic::$name::new(value))
            }

            #[track_caller]
            pub(crate) fn load(&self, order: Ordering) -> $of {
                fence_before_load(order);
                self.0.load(order)
            }

            #[track_caller]
            pub(crate) fn store(&self, value: $of, order: Ordering) {
                self.0.store(value, order);
                fence_behind_store(order);
            }

            #[track_caller]
            pub(crate) fn swap(&self, value: $of, order: Ordering) -> $of {
                changed(order, || self.0.swap(value, order))
            }

            #[track_caller]
            pub(crate) fn compare_exchange(
                &self,
                from: $of,
                to: $of,
                order: Ordering,
                failed: Ordering,
            ) -> Result<$of, $of> {
                changed(order, || self.0.compare_exchange(from, to, order, failed))
            }

            #[track_caller]
            pub(crate) fn fetch_update(
                &self,
                order: Ordering,
                failed: Ordering,
                change: impl FnMut($of) -> Option<$of>,
            ) -> Result<$of, $of> {
                changed(order, || self.0.fetch_update(order, failed, change))
            }
        }
    )* };
}

macro_rules! sums {
    ($($name:ident($of:ty)),*) => { $(
        #[allow(dead_code, reason = "not each type is used in each way")]
        impl $name {
            #[track_caller]
            pub(crate) fn fetch_add(&self, more: $of, order: Ordering) -> $of {
                changed(order, || self.0.fetch_add(more, order))
            }

            #[track_caller]
            pub(crate) fn fetch_sub(&self, less: $of, order: Ordering) -> $of {
                changed(order, || self.0.fetch_sub(less, order))
            }
        }
    )* };
}

atomics!(AtomicBool(bool), AtomicU8(u8), AtomicU32(u32), AtomicU64(u64));
sums!(AtomicU8(u8), AtomicU32(u32), AtomicU64(u64));
