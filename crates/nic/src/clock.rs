//! Where the time comes from: the only place that asks the system for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use terrace_transport::Time;

/// A source of time that never runs backwards.
pub trait Clock: Send + Sync {
    /// Nanoseconds since an epoch of the clock's own.
    fn now(&self) -> Time;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct MonotonicClock {
    epoch: Instant,
}

impl MonotonicClock {
    /// A clock whose epoch is now.
    pub fn new() -> MonotonicClock {
        MonotonicClock { epoch: Instant::now() }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        MonotonicClock::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Time {
        // 64 bits of nanoseconds last for 584 years.
        Time(self.epoch.elapsed().as_nanos() as u64)
    }
}

/// A clock that stands still until it is set: for simulations.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ns: AtomicU64,
}

impl ManualClock {
    /// A clock that shows 0.
    pub fn new() -> ManualClock {
        ManualClock::default()
    }

    /// Sets the clock. A time in its past is ignored.
    pub fn set(&self, now: Time) {
        self.now_ns.fetch_max(now.0, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Time {
        Time(self.now_ns.load(Ordering::SeqCst))
    }
}
