//! Absent memory. In some runs the regions with remote access have pagers, which map and unmap units at any time. The
//! programs' results must not depend on that.

#[path = "../../../crates/memory/tests/common/pager.rs"]
#[allow(dead_code)] // The simulation uses a part of the module.
mod pager;
#[path = "../../../crates/memory/tests/common/units.rs"]
#[allow(dead_code)] // As above.
mod units;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use terrace_hostmem::HostRange;
use terrace_nic::{Clock, ManualClock, Paging, ProgressCallback, RegionPolicy};
use terrace_sync::Mutex;

use crate::cells;
use crate::rng::{SimRng, Stream, stream_seed};
use pager::Cells;
pub(crate) use pager::TestPager;
use units::UNIT_BYTES;

/// The parameters of a node's pagers.
#[derive(Clone, Debug)]
pub(crate) struct PagingPlan {
    /// Limit of a pager's accesses in progress.
    pub slots: usize,
    /// Longest duration of an access, in nanoseconds.
    pub access_ns_max: u64,
    /// Probability at each tick of the program that a unit is mapped or unmapped.
    pub churn: f64,
    /// Probability that a region defers no request, so that its peers get RNR NAKs.
    pub faulting: f64,
    /// Probability that a unit is present at the start.
    pub present: f64,
}

impl PagingPlan {
    /// Draws the parameters of the node's pagers; `None` if its memory is not paged.
    pub fn draw(seed: u64, node: u8, perfect: bool) -> Option<PagingPlan> {
        let mut rng = SimRng::new(seed, Stream::Pager(node));
        rng.chance(0.4).then(|| PagingPlan {
            slots: if perfect { usize::MAX } else { rng.pick(&[4, 16, usize::MAX]) },
            access_ns_max: rng.spread(100..=200_000),
            churn: rng.pick(&[0.0, 0.02, 0.2]),
            // An unreliable connection has no RNR NAK, so it would lose messages in a perfect network.
            faulting: if perfect { 0.0 } else { rng.pick(&[0.0, 0.0, 0.5]) },
            present: rng.pick(&[0.0, 0.5, 0.9]),
        })
    }
}

/// The pagers of a node.
pub(crate) struct Pagers {
    plan: PagingPlan,
    clock: Arc<ManualClock>,
    seed: u64,
    rng: Mutex<SimRng>,
    all: Mutex<Vec<Paged>>,
}

#[derive(Clone)]
struct Paged {
    pager: Arc<TestPager>,
    policy: RegionPolicy,
}

impl Pagers {
    pub fn new(plan: PagingPlan, clock: &Arc<ManualClock>, seed: u64, node: u8) -> Pagers {
        // This seed must differ from the stream of the plan.
        let seed = stream_seed(seed, Stream::Pager(node)) ^ 1;
        let rng = Mutex::new(SimRng::from_seed(seed));
        Pagers { plan, clock: clock.clone(), seed, rng, all: Mutex::default() }
    }

    /// Creates a pager for some memory, of which a part is present.
    pub fn add(&self, cells: Arc<[AtomicU64]>) -> (Arc<TestPager>, Paging) {
        let mut rng = self.rng.lock();
        let memory = HostRange { addr: cells.as_ptr() as u64, len: cells.len() as u64 * 8 };
        let pages = rng.within(0..=memory.len / 4096);
        let ahead = if pages == 0 { 0 } else { UNIT_BYTES - pages * 4096 % UNIT_BYTES };
        let pager = TestPager::new(memory, ahead, Box::new(Words(cells)));
        let (clock, access_ns_max) = (self.clock.clone(), self.plan.access_ns_max);
        let mut times = SimRng::from_seed(self.seed ^ rng.word());
        let due = move || clock.now().0 + times.within(0..=access_ns_max);
        pager.set_habits(self.plan.slots, Box::new(due));
        for unit in 0..pager.units().unit_count() {
            if rng.chance(self.plan.present) {
                pager.admit(unit);
            }
        }
        let faults = rng.chance(self.plan.faulting);
        let policy = if faults { RegionPolicy::Fault } else { RegionPolicy::Wait };
        self.all.lock().push(Paged { pager: pager.clone(), policy });
        let paging = Paging { pager: pager.clone(), pattern: Arc::new([0xee; 4096]), policy };
        (pager, paging)
    }

    /// Returns the time when the next access ends, in nanoseconds.
    pub fn next_due(&self) -> Option<u64> {
        self.all.lock().iter().filter_map(|paged| paged.pager.next_due()).min()
    }

    /// Maps or unmaps a unit at random. Returns whether it did.
    pub fn churn(&self) -> bool {
        let mut rng = self.rng.lock();
        if !rng.chance(self.plan.churn) {
            return false;
        }
        let all = self.all.lock();
        if all.is_empty() {
            return false;
        }
        let pager = &all[rng.index(all.len())].pager;
        let unit = rng.index(pager.units().unit_count());
        if rng.chance(0.5) { pager.admit(unit) } else { pager.expel(unit) }
    }

    /// Ends every access in progress, so that no queue pair waits for one.
    pub fn finish(&self) {
        let all = self.all.lock().clone();
        while all.iter().any(|paged| paged.pager.complete_due(u64::MAX) > 0) {}
    }
}

impl ProgressCallback for Pagers {
    fn advance(&self) -> bool {
        let all = self.all.lock().clone();
        let mut active = false;
        for Paged { pager, policy } in all {
            let ended = pager.complete_due(self.clock.now().0);
            active |= ended > 0;
            if ended > 0 && policy == RegionPolicy::Fault {
                // Maps the units for which peers got RNR NAKs.
                for unit in 0..pager.units().unit_count() {
                    pager.admit(unit);
                }
            }
        }
        active
    }
}

/// The simulation's memory, as atomic words.
struct Words(Arc<[AtomicU64]>);

impl Cells for Words {
    fn get(&self, offset: usize, out: &mut [u8]) {
        cells::load(&self.0, offset, out);
    }

    fn set(&self, offset: usize, data: &[u8]) {
        cells::store(&self.0, offset, data);
    }
}
