//! What the models of this crate and of `terrace-memory` share.
#![allow(dead_code, reason = "each model uses its own part")]

/// Tries a body in every interleaving with at most so many preemptions.
pub(crate) fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

/// Content whose accesses loom watches.
pub(crate) struct Watched(loom::cell::UnsafeCell<u32>);

// SAFETY: that accesses do not conflict is what the models check.
unsafe impl Sync for Watched {}
// SAFETY: a number in a cell.
unsafe impl Send for Watched {}

impl Watched {
    pub(crate) fn new() -> Watched {
        Watched(loom::cell::UnsafeCell::new(0))
    }

    pub(crate) fn get(&self) -> u32 {
        // SAFETY: loom panics when another thread writes at the same time.
        self.0.with(|value| unsafe { *value })
    }

    pub(crate) fn set(&self, to: u32) {
        // SAFETY: loom panics when another thread reads or writes at the same time.
        self.0.with_mut(|value| unsafe { *value = to });
    }

    pub(crate) fn add(&self, amount: u32) {
        // SAFETY: as for `set`.
        self.0.with_mut(|value| unsafe { *value += amount });
    }
}
