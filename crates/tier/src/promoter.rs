//! The thread that moves hot units into memory, and writes back pages that buffered access left in the page cache. It
//! waits for the disk, so that threads that serve peers need not.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use terrace_hostmem::UNIT_BYTES;
use terrace_sync::{Condvar, Mutex};

use crate::config::TierConfig;
use crate::engine::Engine;
use crate::heat::{Candidate, Heat, choose};
use crate::region::Region;
use crate::residency::AHEAD_MAX;
use crate::unit::Residency;

/// The most moves per period; more than a disk can do.
const MOVES_MAX: usize = 2048;

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

/// A region and the hotness estimates of its units.
struct Watched {
    region: Arc<Region>,
    heat: Vec<Heat>,
}

/// Region index and unit index.
type Key = (usize, usize);

/// The thread's main loop.
pub(crate) fn run(shared: &Shared, config: &TierConfig) {
    let mut watched: Vec<Watched> = Vec::new();
    let mut start = Instant::now();
    loop {
        start = (start + config.period).max(Instant::now());
        if !shared.sleep_until(start) {
            return;
        }
        let deadline = start + config.period;
        follow(shared, &mut watched);
        clean(shared, &watched);
        shared.engine.finish_departures();
        take_counts(&mut watched);
        if config.promote {
            move_units(shared, &watched, deadline);
        }
    }
}

/// Adds new regions to the list, and removes regions that are gone.
fn follow(shared: &Shared, watched: &mut Vec<Watched>) {
    let regions = shared.regions.lock();
    watched.retain(|one| regions.iter().any(|region| Arc::ptr_eq(region, &one.region)));
    for region in regions.iter() {
        if !watched.iter().any(|one| Arc::ptr_eq(region, &one.region)) {
            let heat = vec![Heat::default(); region.presence.unit_count()];
            watched.push(Watched { region: region.clone(), heat });
        }
    }
}

fn take_counts(watched: &mut [Watched]) {
    for Watched { region, heat } in watched {
        let (mut hits, mut misses) = (0, 0);
        for (unit, heat) in heat.iter_mut().enumerate() {
            let counts = region.presence.take_counts(unit);
            heat.tick(counts.hits.saturating_add(counts.misses));
            hits += u64::from(counts.hits);
            misses += u64::from(counts.misses);
        }
        region.counters.hits.fetch_add(hits, Ordering::Relaxed);
        region.counters.misses.fetch_add(misses, Ordering::Relaxed);
    }
}

/// Cleans absent units with pages in the page cache, and writes pages again after a failed write-back.
fn clean(shared: &Shared, watched: &[Watched]) {
    for Watched { region, .. } in watched {
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

fn move_units(shared: &Shared, watched: &[Watched], deadline: Instant) {
    let (absent, resident, room) = survey(shared, watched);
    let mut on_their_way: VecDeque<Key> = VecDeque::new();
    for step in choose(absent, resident, room, MOVES_MAX) {
        if shared.is_stopped() || Instant::now() >= deadline {
            break;
        }
        if let Some((region, unit)) = step.demote {
            // A unit that cannot be written back was logged, and stays resident.
            if shared.engine.demote(&watched[region].region, unit).is_err() {
                continue;
            }
        }
        let (region, unit) = step.promote;
        if shared.engine.begin_promotion(&watched[region].region, unit) {
            on_their_way.push_back(step.promote);
        }
        if on_their_way.len() == AHEAD_MAX && !finish_first(shared, watched, &mut on_their_way) {
            break;
        }
    }
    while !on_their_way.is_empty() {
        finish_first(shared, watched, &mut on_their_way);
    }
}

/// Finishes the oldest promotion. False if it fails: further ones would fail, too.
fn finish_first(shared: &Shared, watched: &[Watched], on_their_way: &mut VecDeque<Key>) -> bool {
    let Some((region, unit)) = on_their_way.pop_front() else { return true };
    let finished = shared.engine.finish_promotion(&watched[region].region, unit);
    finished.inspect_err(|error| tracing::warn!(%error, unit, "a unit cannot be brought into memory")).is_ok()
}

/// The absent and resident units that may move, and how many more units fit.
fn survey(shared: &Shared, watched: &[Watched]) -> (Vec<Candidate<Key>>, Vec<Candidate<Key>>, usize) {
    let (mut absent, mut resident) = (Vec::new(), Vec::new());
    let core = shared.engine.core.lock();
    for (index, Watched { region, heat }) in watched.iter().enumerate() {
        let Some(state) = core.regions.get(region.id) else { continue };
        for (unit, (heat, state)) in heat.iter().zip(&state.units).enumerate() {
            let candidate = Candidate { key: (index, unit), heat: *heat };
            match state.residency {
                Residency::Absent if heat.is_warm() => absent.push(candidate),
                Residency::Resident if !state.pinned && !state.leaving && !region.losses.are_there() => {
                    resident.push(candidate)
                }
                _ => {}
            }
        }
    }
    let room = (shared.engine.dram_bytes - core.locked_bytes) / UNIT_BYTES;
    (absent, resident, room as usize)
}
