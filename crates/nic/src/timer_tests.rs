//! Unit tests of `timers`, which loom's models compile without them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use terrace_transport::Time;

use crate::schedule::Schedule;
use crate::timers::{SWEEP_ENTRIES_MIN, Timers};

struct Visited {
    schedule: Schedule,
    visits: Arc<AtomicUsize>,
}

impl AsRef<Schedule> for Visited {
    fn as_ref(&self) -> &Schedule {
        self.visits.fetch_add(1, Relaxed);
        &self.schedule
    }
}

/// Queue pairs, and the number of visits to them.
fn visited(count: u32) -> (Vec<Arc<Visited>>, Arc<AtomicUsize>) {
    let visits = Arc::new(AtomicUsize::new(0));
    let visited = |qpn| Arc::new(Visited { schedule: Schedule::new(qpn), visits: visits.clone() });
    ((0..count).map(visited).collect(), visits)
}

/// A queue pair that is in use has one entry, which leaves and comes again with each timeout.
#[test]
fn the_cost_of_a_timer_does_not_depend_on_the_number_of_timers() {
    for count in [1023, 1024, 2048, 4096] {
        let timers = Timers::default();
        let (qps, visits) = visited(count);
        qps.iter().for_each(|qp| _ = timers.arm(qp, Time(u64::from(qp.schedule.qpn))));
        let before = visits.load(Relaxed);
        for round in 0..1000 {
            for qp in timers.take_due(Time(round)) {
                timers.arm(&qp, Time(10_000 + round));
            }
        }
        let per_round = (visits.load(Relaxed) - before) / 1000;
        // Some for each level of the heap.
        assert!(per_round < 200, "{per_round} entries visited for each of {count} timers");
    }
}

#[test]
fn replaced_entries_are_swept_out() {
    let timers = Timers::default();
    let (qps, _) = visited(10);
    for round in 0..100_000 {
        // Ever earlier, so that each one replaces the one before.
        qps.iter().for_each(|qp| _ = timers.arm(qp, Time(200_000 - round)));
    }
    assert!(timers.heap.lock().entries.len() <= SWEEP_ENTRIES_MIN);
}
