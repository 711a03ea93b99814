//! Absent memory: in some runs the regions with remote access have pagers, whose units are mapped and unmapped without
//! the programs' knowledge. Peers must see no difference.

#[path = "../../../crates/memory/tests/common/pager.rs"]
#[allow(dead_code)] // The simulation uses a part of it.
mod pager;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_hostmem::{HostRange, UNIT_BYTES};
use terrace_memory::Pager;
use terrace_nic::{Clock, ManualClock, Paging, ProgressCallback, RegionPolicy};
use terrace_sync::Mutex;

use crate::dice::{Dice, Stream, stream_seed};
use pager::Cells;
pub(crate) use pager::TestPager;

/// How a node's memory is paged.
#[derive(Clone, Debug)]
pub(crate) struct PagingPlan {
    /// Most accesses that a pager has in progress.
    pub room: usize,
    /// Longest duration of an access, in nanoseconds.
    pub access_ns_max: u64,
    /// Probability at each tick of the program that a unit is mapped or unmapped.
    pub churn: f64,
    /// Probability that a region answers its peers with RNR NAKs instead of letting them wait.
    pub faulting: f64,
    /// Probability that a unit is present at the beginning.
    pub present: f64,
}

impl PagingPlan {
    /// Whether, and how, the node's memory is paged.
    pub fn draw(seed: u64, node: u8, calm: bool) -> Option<PagingPlan> {
        let mut dice = Dice::new(seed, Stream::Pager(node));
        dice.chance(0.4).then(|| PagingPlan {
            room: if calm { usize::MAX } else { dice.pick(&[4, 16, usize::MAX]) },
            access_ns_max: dice.spread(100..=200_000),
            churn: dice.pick(&[0.0, 0.02, 0.2]),
            // An unreliable connection has no RNR NAK: it would lose messages in a perfect network.
            faulting: if calm { 0.0 } else { dice.pick(&[0.0, 0.0, 0.5]) },
            present: dice.pick(&[0.0, 0.5, 0.9]),
        })
    }
}

/// The pagers of a node.
pub(crate) struct Pagers {
    plan: PagingPlan,
    clock: Arc<ManualClock>,
    seed: u64,
    dice: Mutex<Dice>,
    all: Mutex<Vec<Paged>>,
}

#[derive(Clone)]
struct Paged {
    pager: Arc<TestPager>,
    policy: RegionPolicy,
}

impl Pagers {
    pub fn new(plan: PagingPlan, clock: &Arc<ManualClock>, seed: u64, node: u8) -> Pagers {
        // Not the stream that the plan is drawn from.
        let seed = stream_seed(seed, Stream::Pager(node)) ^ 1;
        let dice = Mutex::new(Dice::from_seed(seed));
        Pagers { plan, clock: clock.clone(), seed, dice, all: Mutex::default() }
    }

    /// A pager for some memory, of which a part is present.
    pub fn add(&self, cells: Arc<[AtomicU64]>) -> (Arc<TestPager>, Paging) {
        let mut dice = self.dice.lock();
        let memory = HostRange { addr: cells.as_ptr() as u64, len: cells.len() as u64 * 8 };
        let pages = dice.within(0..=memory.len / 4096);
        let ahead = if pages == 0 { 0 } else { UNIT_BYTES - pages * 4096 % UNIT_BYTES };
        let pager = TestPager::new(memory, ahead, Box::new(Words(cells)));
        let (clock, access_ns_max) = (self.clock.clone(), self.plan.access_ns_max);
        let mut times = Dice::from_seed(self.seed ^ dice.word());
        let due = move || clock.now().0 + times.within(0..=access_ns_max);
        pager.set_habits(self.plan.room, Box::new(due));
        for unit in 0..pager.presence().unit_count() {
            if dice.chance(self.plan.present) {
                pager.admit(unit);
            }
        }
        let faults = dice.chance(self.plan.faulting);
        let policy = if faults { RegionPolicy::Fault } else { RegionPolicy::Wait };
        self.all.lock().push(Paged { pager: pager.clone(), policy });
        let paging = Paging { pager: pager.clone(), pattern: Arc::new([0xee; 4096]), policy };
        (pager, paging)
    }

    /// When the next access ends, in nanoseconds.
    pub fn next_due(&self) -> Option<u64> {
        self.all.lock().iter().filter_map(|paged| paged.pager.next_due()).min()
    }

    /// Maps or unmaps a unit at random. Returns whether it did.
    pub fn churn(&self) -> bool {
        let mut dice = self.dice.lock();
        if !dice.chance(self.plan.churn) {
            return false;
        }
        let all = self.all.lock();
        if all.is_empty() {
            return false;
        }
        let pager = &all[dice.index(all.len())].pager;
        let unit = dice.index(pager.presence().unit_count());
        if dice.chance(0.5) { pager.admit(unit) } else { pager.expel(unit) }
    }

    /// Ends every access in progress: no queue pair waits for one any more.
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
                // Maps the units whose absence peers were told of.
                for unit in 0..pager.presence().unit_count() {
                    pager.admit(unit);
                }
            }
        }
        active
    }
}

/// The simulation's memory: atomic words.
struct Words(Arc<[AtomicU64]>);

impl Cells for Words {
    fn get(&self, offset: usize, out: &mut [u8]) {
        for (index, byte) in (offset..).zip(out) {
            *byte = self.0[index / 8].load(Ordering::Relaxed).to_ne_bytes()[index % 8];
        }
    }

    fn set(&self, offset: usize, data: &[u8]) {
        for (index, byte) in (offset..).zip(data) {
            let mut word = self.0[index / 8].load(Ordering::Relaxed).to_ne_bytes();
            word[index % 8] = *byte;
            self.0[index / 8].store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
    }
}
