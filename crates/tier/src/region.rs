//! The tier's knowledge of a region, except for the state of its units.

use std::sync::atomic::{AtomicBool, Ordering};

use terrace_hostmem::HostRange;
use terrace_memory::{AccessError, Presence};

use crate::config::IoMethod;
use crate::file::Ways;
use crate::losses::Losses;
use crate::part::{Part, Task};
use crate::regions::RegionId;
use crate::stats::{Kind, RegionCounters};

/// The constants and counters of a region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) id: RegionId,
    pub(crate) presence: Presence,
    pub(crate) ways: Ways,
    pub(crate) file_offset: u64,
    pub(crate) exclusive: bool,
    pub(crate) writable: bool,
    pub(crate) method: IoMethod,
    /// Direct access was tried and refused.
    direct_refused: AtomicBool,
    pub(crate) counters: RegionCounters,
    pub(crate) losses: Losses,
}

impl Region {
    pub(crate) fn new(
        id: RegionId,
        map: HostRange,
        ways: Ways,
        source: (u64, bool, bool),
        method: IoMethod,
    ) -> Region {
        let presence = Presence::new(map);
        let (file_offset, exclusive, writable) = source;
        Region {
            id,
            presence,
            ways,
            file_offset,
            exclusive,
            writable,
            method,
            direct_refused: AtomicBool::new(false),
            counters: RegionCounters::default(),
            losses: Losses::default(),
        }
    }

    pub(crate) fn direct_works(&self) -> bool {
        self.ways.direct.is_some() && !self.direct_refused.load(Ordering::Relaxed)
    }

    pub(crate) fn give_up_direct(&self) {
        self.direct_refused.store(true, Ordering::Relaxed);
    }

    /// Whether to log another failed access: the first, the second, the fourth and so on, because a peer determines how
    /// many there are.
    pub(crate) fn may_complain(&self) -> bool {
        (self.counters.errors.load(Ordering::Relaxed) + 1).is_power_of_two()
    }

    /// Counts an ended part.
    pub(crate) fn count(&self, part: &Part, result: Result<(), AccessError>) {
        let add = |counter: &std::sync::atomic::AtomicU64, count: usize| {
            counter.fetch_add(count as u64, Ordering::Relaxed);
        };
        if result.is_err() {
            add(&self.counters.errors, 1);
        }
        match part.task {
            Task::Flush { .. } => return add(&self.counters.flushes, 1),
            Task::Read => {
                self.counters.reads.add(part.kind);
                add(&self.counters.bytes_read, part.len);
            }
            Task::Write | Task::Atomic(_) => {
                self.counters.writes.add(part.kind);
                add(&self.counters.bytes_written, part.len);
            }
        }
        if part.kind != Kind::Late {
            self.counters.latency.add(part.access.since.elapsed());
        }
    }
}
