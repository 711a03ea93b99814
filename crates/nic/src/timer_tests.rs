//! Unit tests of `timers`, which loom's models compile without them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use terrace_transport::Time;

use crate::schedule::Schedule;
use crate::timers::{SWEEP_ENTRIES_MIN, Timers};

static VISITS: AtomicUsize = AtomicUsize::new(0);

struct Visited(Schedule);

impl AsRef<Schedule> for Visited {
    fn as_ref(&self) -> &Schedule {
        VISITS.fetch_add(1, Relaxed);
        &self.0
    }
}

/// A queue pair that is in use has one entry, which leaves and comes again with each timeout.
#[test]
fn the_cost_of_a_timer_does_not_depend_on_the_number_of_timers() {
    for count in [1023, 1024, 2048, 4096] {
        let timers = Timers::default();
        let qps: Vec<_> = (0..count).map(|qpn| Arc::new(Visited(Schedule::new(qpn)))).collect();
        qps.iter().for_each(|qp| _ = timers.arm(qp, Time(u64::from(qp.0.qpn))));
        let before = VISITS.load(Relaxed);
        for round in 0..1000 {
            for qp in timers.take_due(Time(round)) {
                timers.arm(&qp, Time(10_000 + round));
            }
        }
        let visits = (VISITS.load(Relaxed) - before) / 1000;
        // Some for each level of the heap.
        assert!(visits < 200, "{visits} entries visited for each of {count} timers");
    }
}

#[test]
fn replaced_entries_are_swept_out() {
    let timers = Timers::default();
    let qps: Vec<_> = (0..10).map(|qpn| Arc::new(Visited(Schedule::new(qpn)))).collect();
    for round in 0..100_000 {
        // Ever earlier, so that each one replaces the one before.
        qps.iter().for_each(|qp| _ = timers.arm(qp, Time(200_000 - round)));
    }
    assert!(timers.heap.lock().entries.len() <= SWEEP_ENTRIES_MIN);
}
