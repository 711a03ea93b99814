//! The statistics of a device's sessions.

use std::sync::atomic::{AtomicU64, Ordering};

use terrace_access::optimistic::Counters;

/// Sums over all sessions, those that have ended included.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    optimistic: AtomicU64,
    signatures: AtomicU64,
    version_changes: AtomicU64,
    absent: AtomicU64,
    chained: AtomicU64,
    calls: AtomicU64,
    holds: AtomicU64,
    /// Requests of peers that the targets have answered.
    pub served: AtomicU64,
}

impl Totals {
    /// Adds what an initiator has counted since `before`.
    pub fn add(&self, before: &Counters, now: &Counters) {
        for (total, before, now) in [
            (&self.optimistic, before.optimistic, now.optimistic),
            (&self.signatures, before.signatures, now.signatures),
            (&self.version_changes, before.version_changes, now.version_changes),
            (&self.absent, before.absent, now.absent),
            (&self.chained, before.chained, now.chained),
            (&self.calls, before.calls, now.calls),
            (&self.holds, before.holds, now.holds),
        ] {
            if now != before {
                total.fetch_add(now - before, Ordering::Relaxed);
            }
        }
    }

    /// As `terrace stat` shows them.
    pub fn report(&self) -> serde_json::Value {
        let get = |total: &AtomicU64| total.load(Ordering::Relaxed);
        serde_json::json!({
            "optimistic": get(&self.optimistic),
            "fallback_signature": get(&self.signatures),
            "fallback_version": get(&self.version_changes),
            "fallback_absent": get(&self.absent),
            "fallback_chained": get(&self.chained),
            "calls": get(&self.calls),
            "holds": get(&self.holds),
            "served": get(&self.served),
        })
    }
}
