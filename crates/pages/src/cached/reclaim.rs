//! Pages leave: they are written back, unmapped and dropped from the page cache.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_faults::StorageOperation;
use terrace_memory::AccessError;

use super::engine::{Engine, Work};
use super::kernel;
use super::region::Region;
use super::scan::Scans;
use super::shard::Leaver;
use crate::stats::add;

/// The shortest interval between scans.
const PERIOD: Duration = Duration::from_millis(10);
/// For how long accesses wait for slots while pages cannot be written back.
const STARVED_PATIENCE: Duration = Duration::from_secs(1);
/// Scans that find nothing take at most one in so many parts of a processor. Those that find pages have them leave, too:
/// one in two.
const SCAN_SHARE: u32 = 20;
/// The longest interval between scans, while they find nothing.
const QUIET_PERIOD: Duration = Duration::from_millis(100);

/// The main loop of the thread.
pub(super) fn run(engine: &Engine) {
    let (mut scans, mut period, mut next_scan) = (Scans::default(), PERIOD, Instant::now());
    while engine.reclaim.wait(next_scan.saturating_duration_since(Instant::now())) {
        engine.reclaim();
        let begun = Instant::now();
        if begun < next_scan {
            continue;
        }
        let mut found_count = 0;
        for region in engine.regions() {
            let Some(_used) = region.begin_use() else { continue };
            engine.repair(&region);
            found_count += engine.scan(&region, &mut scans);
        }
        period = if found_count > 0 || engine.is_short() { PERIOD } else { QUIET_PERIOD.min(2 * period) };
        let share = if found_count > 0 { 1 } else { SCAN_SHARE };
        next_scan = Instant::now() + period.max(begun.elapsed() * share);
    }
}

impl Engine {
    fn is_short(&self) -> bool {
        self.shards().iter().any(|shard| shard.lock().is_short())
    }

    /// Frees slots where few are free, and gives them to the parts that wait. Returns whether there are more.
    pub(super) fn reclaim(&self) -> bool {
        let mut has_freed = false;
        for index in 0..self.shards().len() {
            // The regions outlive what is chosen: a region that is being removed waits for its users.
            let regions: HashMap<u8, Arc<Region>> =
                self.regions().into_iter().map(|region| (region.slot, region)).collect();
            let used: HashMap<u8, _> = regions
                .iter()
                .filter(|(_, region)| !region.losses.are_there())
                .filter_map(|(slot, region)| Some((*slot, region.begin_use()?)))
                .collect();
            let may_leave = |slot: u8| used.contains_key(&slot).then(|| &*regions[&slot]);
            let mut shard = self.shards()[index].lock();
            if !shard.is_short() && shard.starved.is_empty() {
                continue;
            }
            let free_before = shard.free_count();
            shard.free_lost();
            let mut leavers = shard.choose(&self.counters, |key| may_leave(key.slot));
            let mut has_freed_here = shard.free_count() > free_before;
            drop(shard);
            leavers.sort_unstable();
            for leavers in leavers.chunk_by(|before, next| before.key.slot == next.key.slot) {
                has_freed_here |= self.let_go(&regions[&leavers[0].key.slot], leavers);
            }
            has_freed |= has_freed_here;
            let mut work = Work::default();
            self.feed_starved(&mut self.shards()[index].lock(), &mut work);
            self.settle(work);
            let has_lasted = |region: &Arc<Region>| region.losses.have_lasted(STARVED_PATIENCE);
            if !has_freed_here && regions.values().any(has_lasted) {
                // Until pages can be written back, perhaps none leaves.
                self.fail_starved(&self.shards()[index], |_| true, AccessError::Device);
            }
            self.advance();
        }
        has_freed
    }

    /// Has pages leave, which are sorted. Returns whether any has; after a failed write-back they stay. The caller keeps
    /// the region.
    pub(super) fn let_go(&self, region: &Region, leavers: &[Leaver]) -> bool {
        let runs: Vec<(u64, u64)> = leavers
            .chunk_by(|before, next| before.key.page + 1 == next.key.page)
            .flat_map(|run| run.chunks(kernel::WINDOW_PAGES as usize))
            .map(|run| (run[0].key.page, run.len() as u64))
            .collect();
        // Held until the pages are dropped: another thread must not consume a failure report that concerns them.
        let _alone = region.losses.alone();
        if let Err(error) = self.write_back(region, &runs) {
            region.note_loss(&error);
            add(&region.counters.write_backs_failed, 1);
        }
        if region.losses.are_there() {
            leavers.iter().for_each(|leaver| self.lock(leaver.key).keep(region, leaver));
            return false;
        }
        let mut leavers = leavers.iter();
        for (first, count) in runs {
            let range = region.range_of(first, count);
            let left = match region.is_memory {
                true => Vec::new(),
                false => kernel::drop_pages(
                    region.file.as_fd(),
                    region.offset_of(first),
                    range,
                    region.is_swap_file,
                ),
            };
            for (index, leaver) in leavers.by_ref().take(count as usize).enumerate() {
                let is_kept = left.get(index).is_some_and(|is_left| *is_left);
                self.lock(leaver.key).end_leaving(region, leaver, !is_kept);
            }
        }
        true
    }

    /// Writes pages back. Not durable by itself: the device may cache them.
    ///
    /// # Errors
    /// The device's.
    fn write_back(&self, region: &Region, runs: &[(u64, u64)]) -> io::Result<()> {
        let (Some(first), Some(last), true) =
            (runs.first(), runs.last(), region.is_writable && !region.is_memory)
        else {
            return Ok(());
        };
        self.suffer(StorageOperation::WriteBack)?;
        let file = region.file.as_fd();
        for (first, count) in runs {
            kernel::begin_write_back(file, region.offset_of(*first), region.range_of(*first, *count).len)?;
        }
        let whole = region.range_of(first.0, last.0 + last.1 - first.0);
        kernel::end_write_back(file, region.offset_of(first.0), whole.len)
    }
}
