//! The source of time: the only place that asks the system for it.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::time::{ClockId, clock_gettime};
use terrace_transport::Time;

/// A source of time that never runs backwards.
pub trait Clock: Send + Sync {
    /// Nanoseconds since an epoch of the clock's own.
    fn now(&self) -> Time;

    /// A time up to 10 ms after now, and before it only where the kernel updates its coarse clock late (a virtual
    /// processor that does not run): for deadlines that need not be exact, where the exact time would be a good part of
    /// the cost.
    fn coarse(&self) -> Time {
        self.now()
    }
}

/// The time of a pass, read on first use: most packets need none.
pub(crate) struct LazyTimestamp<'a> {
    clock: &'a dyn Clock,
    at: Cell<Option<Time>>,
}

impl LazyTimestamp<'_> {
    /// With the time, if it is known.
    pub fn new(clock: &dyn Clock, at: Option<Time>) -> LazyTimestamp<'_> {
        LazyTimestamp { clock, at: Cell::new(at) }
    }

    /// The time if it is known, otherwise [`Clock::coarse`].
    pub fn coarse(&self) -> Time {
        self.at.get().unwrap_or_else(|| self.clock.coarse())
    }

    /// The time.
    pub fn get(&self) -> Time {
        let at = self.at.get().unwrap_or_else(|| self.clock.now());
        self.at.set(Some(at));
        at
    }
}

/// Lag of the kernel's coarse clock at most: a tick of the slowest kernels.
const COARSE_LAG_NS: u64 = 10_000_000;

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct MonotonicClock {
    epoch_ns: u64,
}

impl MonotonicClock {
    /// A clock whose epoch is now.
    pub fn new() -> MonotonicClock {
        MonotonicClock { epoch_ns: read(ClockId::CLOCK_MONOTONIC) }
    }

    fn since_epoch(&self, ns: u64) -> Time {
        // 64 bits of nanoseconds last for 584 years.
        Time(ns.saturating_sub(self.epoch_ns))
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        MonotonicClock::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Time {
        self.since_epoch(read(ClockId::CLOCK_MONOTONIC))
    }

    fn coarse(&self) -> Time {
        self.since_epoch(read(ClockId::CLOCK_MONOTONIC_COARSE) + COARSE_LAG_NS)
    }
}

fn read(clock: ClockId) -> u64 {
    // Through the C library: rustix calls the vDSO itself, and dies under valgrind, which hides it. Linux has both
    // clocks.
    let time = clock_gettime(clock).expect("a clock that every Linux has");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

/// A clock that stands still until it is set: for simulations.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ns: AtomicU64,
}

impl ManualClock {
    /// A clock at 0.
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
