//! The thread that writes back pages that buffered access left in the page cache, and counts. It waits for the disk, so
//! that threads that serve peers need not.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use terrace_sync::{Condvar, Mutex};

use crate::config::TierConfig;
use crate::engine::Engine;
use crate::region::Region;

/// The state that the thread and the tier share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) engine: Arc<Engine>,
    /// In the order in which they were added.
    pub(crate) regions: Mutex<Vec<Arc<Region>>>,
    stopped: Mutex<bool>,
    stop: Condvar,
}

impl Shared {
    pub(crate) fn new(engine: Arc<Engine>) -> Shared {
        Shared { engine, regions: Mutex::default(), stopped: Mutex::new(false), stop: Condvar::new() }
    }

    /// Stops the thread.
    pub(crate) fn stop(&self) {
        *self.stopped.lock() = true;
        self.stop.notify_all();
    }

    fn is_stopped(&self) -> bool {
        *self.stopped.lock()
    }

    /// Sleeps until the deadline. False if the thread must stop.
    fn sleep_until(&self, deadline: Instant) -> bool {
        let mut stopped = self.stopped.lock();
        while !*stopped {
            if self.stop.wait_until(&mut stopped, deadline) {
                break;
            }
        }
        !*stopped
    }
}

/// The thread's main loop.
pub(crate) fn run(shared: &Shared, config: &TierConfig) {
    let mut start = Instant::now();
    loop {
        start = (start + config.period).max(Instant::now());
        if !shared.sleep_until(start) {
            return;
        }
        let regions = shared.regions.lock().clone();
        clean(shared, &regions);
        shared.engine.finish_departures();
        regions.iter().for_each(|region| take_counts(region));
    }
}

fn take_counts(region: &Region) {
    let (mut hits, mut misses) = (0, 0);
    for unit in 0..region.presence.unit_count() {
        let counts = region.presence.take_counts(unit);
        hits += u64::from(counts.hits);
        misses += u64::from(counts.misses);
    }
    region.counters.hits.fetch_add(hits, Ordering::Relaxed);
    region.counters.misses.fetch_add(misses, Ordering::Relaxed);
}

/// Cleans absent units with pages in the page cache, and writes pages again after a failed write-back.
fn clean(shared: &Shared, regions: &[Arc<Region>]) {
    for region in regions {
        shared.engine.repair(region);
        shared.engine.check_for_readahead(region);
        for unit in shared.engine.take_to_clean(region) {
            if shared.is_stopped() {
                return;
            }
            // A unit that cannot be written back was logged, and is cleaned again later.
            if matches!(shared.engine.clean(region, unit), Ok(false)) {
                shared.engine.part_from_residents(region, unit);
            }
        }
    }
}
