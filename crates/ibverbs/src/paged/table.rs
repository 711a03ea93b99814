//! The paged mappings of this process. Each is one region of the pager, which all registrations in the mapping share.
//!
//! The region is shared because accesses by different keys to the same bytes have to take effect in order, and because
//! a page has one place in the budget.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use terrace_faults::Faults;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::RegionPolicy;
use terrace_nic::{Paging, ProgressCallback};
use terrace_pages::MemoryStats;
use terrace_pages::cached::{CachedConfig, CachedFiles, CachedRegion, CachedSource};
use terrace_tier::{FaultModel, FaultPager, IoMethod, Source, Tier, TierConfig, TierRegion};

use super::backing::{self, Purpose};
use super::maps::Run;
use super::pager::{Inner, MappingPager};
use super::settings::{Mode, Settings};
use super::{churn, ranges};
use crate::errno::{ENOMEM, Errno, Result};
use crate::log::write_line;
use crate::shim::signals::without_signals;

/// A paged mapping.
pub struct PagedMapping {
    run: Run,
    region: Region,
    pager: Arc<MappingPager>,
}

/// The region of a mapping.
enum Region {
    Cached(Arc<CachedFiles>, Arc<CachedRegion>),
    /// With the pager of the ODP mode. Both modes are for comparison.
    Tier(Arc<Tier>, Arc<TierRegion>, Option<Arc<FaultPager>>),
}

/// What pages the mappings, as a device's progress callback.
#[derive(Clone)]
enum Budget {
    Cached(Arc<CachedFiles>),
    Tier(Arc<Tier>),
}

impl ProgressCallback for Budget {
    fn advance(&self) -> bool {
        match self {
            Budget::Cached(files) => files.advance(),
            Budget::Tier(tier) => tier.advance(),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(match self {
            Budget::Cached(files) => files.descriptor(),
            Budget::Tier(tier) => tier.descriptor(),
        })
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        let stats = match self {
            Budget::Cached(files) => files.stats(),
            Budget::Tier(tier) => MemoryStats::from(tier.stats()),
        };
        Some(("memory".into(), serde_json::to_value(stats).ok()?))
    }
}

/// The paged mappings of this process.
#[derive(Default)]
struct Table {
    /// Opened for the first mapping.
    budget: Option<Budget>,
    entries: Vec<Entry>,
}

struct Entry {
    mapping: Arc<PagedMapping>,
    users: usize,
}

/// Locked while a mapping is added or removed, and across `fork`.
static TABLE: Mutex<Table> = Mutex::new(Table { budget: None, entries: Vec::new() });

/// The number of forks that led to this process. A lease of another generation must not be used.
static GENERATION: AtomicU32 = AtomicU32::new(1);

fn table() -> MutexGuard<'static, Table> {
    // No code panics while it holds the table; the table would be valid even after a panic.
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The generation of this process.
fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// A registered region's reference to a paged mapping.
pub struct Lease {
    mapping: Option<Arc<PagedMapping>>,
    generation: u32,
}

impl Lease {
    /// The generation of the process that took it.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The callback that drives the pager from the device.
    pub fn callback(&self) -> Arc<dyn ProgressCallback> {
        Arc::new(match &self.mapping().region {
            Region::Cached(files, _) => Budget::Cached(files.clone()),
            Region::Tier(tier, ..) => Budget::Tier(tier.clone()),
        })
    }

    /// The paging of a registration.
    pub fn paging(&self) -> Paging {
        let mapping = self.mapping();
        // Peers get the signature page from a server, and this process has none.
        let pattern = Arc::new([0; PAGE_BYTES as usize]);
        let policy = match &mapping.region {
            Region::Tier(_, _, Some(_)) => RegionPolicy::Fault,
            Region::Cached(..) | Region::Tier(..) => RegionPolicy::Wait,
        };
        Paging { pager: mapping.pager.clone(), pattern, policy }
    }

    fn mapping(&self) -> &PagedMapping {
        self.mapping.as_ref().expect("taken only by drop")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        if self.generation != generation() {
            // The lease is the parent's, whose threads do not exist in this process.
            return std::mem::forget(mapping);
        }
        let mut table = table();
        let Some(index) = table.entries.iter().position(|entry| Arc::ptr_eq(&entry.mapping, &mapping)) else {
            return;
        };
        table.entries[index].users -= 1;
        if table.entries[index].users == 0 {
            table.entries.swap_remove(index);
            mapping.end();
        }
    }
}

/// The reason why a mapping is not paged, for the log.
pub type Refusal = String;

/// Takes a lease of the mapping `run`, which contains the range. Adds the mapping if it is new.
///
/// # Errors
/// ENOMEM if the budget exceeds the available memory, after a line for the user. The inner error is for a mapping that
/// cannot be paged.
pub fn lease(range: HostRange, run: Run, settings: &Settings) -> Result<std::result::Result<Lease, Refusal>> {
    let mut table = table();
    let overlaps = |entry: &&mut Entry| entry.mapping.run.overlaps(run.range);
    let mapping =
        match table.entries.iter_mut().filter(|entry| !entry.mapping.pager.is_ordinary()).find(overlaps) {
            Some(entry) if entry.mapping.run.covers(range, &run) => {
                entry.users += 1;
                entry.mapping.clone()
            }
            Some(_) => {
                return Ok(Err(
                    "a part of the mapping is paged already, and the mapping has changed since".into()
                ));
            }
            None => match table.add_mapping(range, run, settings)? {
                Ok(mapping) => mapping,
                Err(refusal) => return Ok(Err(refusal)),
            },
        };
    Ok(Ok(Lease { mapping: Some(mapping), generation: generation() }))
}

/// The main loop of the `TERRACE_CHURN` thread.
fn churn() {
    for number in churn::numbers() {
        let table = table();
        // The lock is held, so that the region is not dropped meanwhile.
        let index = (number >> 16) as usize % table.entries.len().max(1);
        if let Some(Entry { mapping, .. }) = table.entries.get(index)
            && let Region::Cached(files, region) = &mapping.region
            && !mapping.pager.is_ordinary()
        {
            churn::step(files, region, number);
        }
        drop(table);
        // Another thread may wait for the lock.
        std::thread::sleep(Duration::from_micros(20));
    }
}

impl Table {
    fn add_mapping(
        &mut self,
        range: HostRange,
        run: Run,
        settings: &Settings,
    ) -> Result<std::result::Result<Arc<PagedMapping>, Refusal>> {
        let (file, file_len) = match backing::open(&run, Purpose::Paging) {
            Ok(found) => found,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let run = run.cut_at(file_len);
        if !run.covers(range, &run) {
            return Ok(Err("the range exceeds the file".into()));
        }
        let region = match self.budget(settings)? {
            Budget::Cached(files) => add_cached(files, file, &run),
            Budget::Tier(tier) => add_to_tier(tier, file, &run, settings)?,
        };
        let region = match region {
            Ok(region) => region,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let inner = match &region {
            Region::Cached(_, region) => Inner::Cached(region.clone()),
            Region::Tier(_, _, Some(faults)) => Inner::Units(faults.clone()),
            Region::Tier(_, region, None) => Inner::Units(region.clone()),
        };
        let pager = Arc::new(MappingPager::new(inner));
        let mapping = Arc::new(PagedMapping { run, region, pager });
        self.entries.push(Entry { mapping: mapping.clone(), users: 1 });
        ranges::add(mapping.run.range);
        Ok(Ok(mapping))
    }

    fn budget(&mut self, settings: &Settings) -> Result<Budget> {
        if let Some(budget) = &self.budget {
            return Ok(budget.clone());
        }
        let budget = without_signals(|| open_budget(settings))?;
        self.budget = Some(budget.clone());
        Ok(budget)
    }
}

/// Opens what the mode needs.
fn open_budget(settings: &Settings) -> Result<Budget> {
    // The settings of the device: a device is open when a region is registered.
    let faults = Faults::all_of_process().pop();
    if settings.mode == Mode::Wait {
        let config = CachedConfig { faults, ..CachedConfig::new(settings.dram_bytes) };
        let files = CachedFiles::open(config).map_err(|error| out_of_memory(&error))?;
        if settings.churn {
            std::thread::spawn(churn);
        }
        return Ok(Budget::Cached(files));
    }
    let mut config = TierConfig::new(settings.dram_bytes);
    config.faults = faults;
    if settings.mode == Mode::Odp {
        config.io = IoMethod::Mapping;
    }
    Ok(Budget::Tier(Tier::open(config).map_err(|error| out_of_memory(&error))?))
}

fn add_cached(files: Arc<CachedFiles>, file: OwnedFd, run: &Run) -> std::result::Result<Region, Refusal> {
    let source =
        CachedSource { file, file_offset: run.file_offset, map: run.range, is_writable: run.writable };
    let region = files.add(source).map_err(|error| error.to_string())?;
    Ok(Region::Cached(files, region))
}

/// Adds a mapping for a mode of comparison.
fn add_to_tier(
    tier: Arc<Tier>,
    file: OwnedFd,
    run: &Run,
    settings: &Settings,
) -> Result<std::result::Result<Region, Refusal>> {
    let (map, file_offset, writable) = (run.range, run.file_offset, run.writable);
    let region = match tier.add(Source { file, file_offset, map, exclusive: false, writable }) {
        Ok(region) => region,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let faults = match settings.mode {
        Mode::Odp => Some(fault_pager(&tier, &region, settings)?),
        Mode::Pin | Mode::Wait => None,
    };
    if settings.mode == Mode::Pin {
        tier.pin(&region).map_err(|error| {
            tier.remove(&region);
            out_of_memory(&error)
        })?;
    }
    Ok(Ok(Region::Tier(tier, region, faults)))
}

/// A pager that models the paging of hardware, for comparison. Each mapping has the whole budget.
fn fault_pager(tier: &Tier, region: &Arc<TierRegion>, settings: &Settings) -> Result<Arc<FaultPager>> {
    let pager =
        without_signals(|| FaultPager::new(region.clone(), FaultModel::default(), settings.dram_bytes));
    pager.map(Arc::new).map_err(|error| {
        tier.remove(region);
        out_of_memory(&error)
    })
}

/// Writes a line for the user, who otherwise gets only an errno.
fn out_of_memory(error: &impl std::fmt::Display) -> Errno {
    write_line(error);
    ENOMEM
}

impl PagedMapping {
    /// Releases the mapping from its budget.
    fn release(&self) {
        ranges::remove(self.run.range);
        match &self.region {
            Region::Cached(files, region) => files.remove(region),
            Region::Tier(tier, region, faults) => {
                if let Some(faults) = faults {
                    faults.stop();
                }
                tier.remove(region);
            }
        }
    }

    /// Removes the mapping after its last lease was dropped.
    fn end(self: Arc<Self>) {
        if !self.pager.is_ordinary() {
            self.release();
        }
        if backing::is_locked_by_us(self.run.file.inode()) {
            // Closing any descriptor of a file releases the process's locks on it.
            std::mem::forget(self);
        }
    }

    /// Makes the mapping ordinary memory. Called before the program changes it.
    fn make_ordinary(&self) {
        if self.pager.is_ordinary() {
            return;
        }
        self.pager.make_ordinary(|| self.release());
        let name = String::from_utf8_lossy(&self.run.path);
        tracing::warn!(file = %name, "the program changes the mapping: its regions become ordinary on-demand regions");
    }
}

/// Called before mappings in a range are removed or changed.
#[inline]
pub fn before_change(range: HostRange) {
    if ranges::may_overlap(range) {
        make_range_ordinary(range);
    }
}

#[cold]
fn make_range_ordinary(range: HostRange) {
    let table = table();
    let concerned = table.entries.iter().filter(|entry| entry.mapping.run.overlaps(range));
    concerned.for_each(|entry| entry.mapping.make_ordinary());
}

/// Holds the table's lock while the process forks.
pub struct ForkHold {
    table: MutexGuard<'static, Table>,
}

/// Takes the lock before `fork`.
pub fn hold_for_fork() -> ForkHold {
    ForkHold { table: table() }
}

impl ForkHold {
    /// Forgets all mappings in the child, where they are plain memory, because the parent's threads do not exist.
    pub fn forget_in_child(mut self) {
        GENERATION.fetch_add(1, Ordering::Relaxed);
        std::mem::forget(std::mem::take(&mut *self.table));
        ranges::clear();
    }
}
