//! The tiered mappings of this process. Each is one region of the tier, which all registrations in the mapping share.
//!
//! The region is shared because accesses by different keys to the same bytes have to take effect in order, and because
//! memory locks do not nest: each of two regions would release the other's locks.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use terrace_faults::Faults;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::{RegionPolicy, UnitPager};
use terrace_nic::{Paging, ProgressCallback};
use terrace_pages::MemoryStats;
use terrace_tier::{FaultModel, FaultPager, IoMethod, Source, Tier, TierConfig, TierError, TierRegion};

use super::backing::{self, Purpose};
use super::maps::Run;
use super::pager::MappingPager;
use super::settings::{Mode, Settings};
use super::{churn, ranges};
use crate::errno::{ENOMEM, Errno, Result};
use crate::log::write_line;
use crate::shim::signals::without_signals;

/// A tiered mapping.
pub struct TieredMapping {
    run: Run,
    tier: Arc<Tier>,
    region: Arc<TierRegion>,
    /// The pager of the ODP mode, for comparison.
    faults: Option<Arc<FaultPager>>,
    pager: Arc<MappingPager>,
}

/// Drives the tier, as a device's progress callback.
struct TierProgress {
    tier: Arc<Tier>,
}

impl ProgressCallback for TierProgress {
    fn advance(&self) -> bool {
        self.tier.advance()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tier.descriptor())
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some(("memory".into(), serde_json::to_value(MemoryStats::from(self.tier.stats())).ok()?))
    }
}

/// The tiered mappings of this process.
#[derive(Default)]
struct Table {
    /// Opened for the first mapping.
    tier: Option<Arc<Tier>>,
    entries: Vec<Entry>,
}

struct Entry {
    mapping: Arc<TieredMapping>,
    users: usize,
}

/// Locked while a mapping is added or removed, and across `fork`.
static TABLE: Mutex<Table> = Mutex::new(Table { tier: None, entries: Vec::new() });

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

/// A registered region's reference to a tiered mapping.
pub struct Lease {
    mapping: Option<Arc<TieredMapping>>,
    generation: u32,
}

impl Lease {
    /// The generation of the process that took it.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The callback that drives the tier from the device.
    pub fn callback(&self) -> Arc<dyn ProgressCallback> {
        Arc::new(TierProgress { tier: self.mapping().tier.clone() })
    }

    /// The paging of a registration.
    pub fn paging(&self) -> Paging {
        let mapping = self.mapping();
        // Peers get the signature page from a server, and this process has none.
        let pattern = Arc::new([0; PAGE_BYTES as usize]);
        let policy = if mapping.faults.is_some() { RegionPolicy::Fault } else { RegionPolicy::Wait };
        Paging { pager: mapping.pager.clone(), pattern, policy }
    }

    fn mapping(&self) -> &TieredMapping {
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

/// The reason why a mapping is not tiered, for the log.
pub type Refusal = String;

/// Takes a lease of the mapping `run`, which contains the range. Adds the mapping if it is new.
///
/// # Errors
/// ENOMEM if the budget exceeds the available memory, after a line for the user. The inner error is for a mapping that
/// cannot be tiered.
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
                    "a part of the mapping is tiered already, and the mapping has changed since".into()
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
            && !mapping.pager.is_ordinary()
        {
            churn::step(&mapping.tier, &mapping.region, number);
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
    ) -> Result<std::result::Result<Arc<TieredMapping>, Refusal>> {
        let (file, file_len) = match backing::open(&run, Purpose::Paging) {
            Ok(found) => found,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let run = run.cut_at(file_len);
        if !run.covers(range, &run) {
            return Ok(Err("the range exceeds the file".into()));
        }
        let tier = self.tier(settings)?;
        let source = Source {
            file,
            file_offset: run.file_offset,
            map: run.range,
            exclusive: false,
            writable: run.writable,
        };
        let region = match tier.add(source) {
            Ok(region) => region,
            Err(error) => return Ok(Err(error.to_string())),
        };
        if settings.mode == Mode::Pin {
            tier.pin(&region).map_err(|error| {
                tier.remove(&region);
                out_of_memory(&error)
            })?;
        }
        let faults = match settings.mode {
            Mode::Odp => Some(fault_pager(&tier, &region, settings)?),
            Mode::Pin | Mode::Wait => None,
        };
        let inner: Arc<dyn UnitPager> = match &faults {
            Some(faults) => faults.clone(),
            None => region.clone(),
        };
        let pager = Arc::new(MappingPager::new(inner));
        let mapping = Arc::new(TieredMapping { run, tier, region, faults, pager });
        self.entries.push(Entry { mapping: mapping.clone(), users: 1 });
        ranges::add(mapping.run.range);
        Ok(Ok(mapping))
    }

    fn tier(&mut self, settings: &Settings) -> Result<Arc<Tier>> {
        if let Some(tier) = &self.tier {
            return Ok(tier.clone());
        }
        let mut config = TierConfig::new(settings.dram_bytes);
        // The settings of the device: a device is open when a region is registered.
        config.faults = Faults::all_of_process().pop();
        config.period = settings.period.unwrap_or(config.period);
        if settings.mode == Mode::Odp {
            (config.io, config.promote) = (IoMethod::Mapping, false);
        }
        let tier = without_signals(|| {
            let tier = Tier::open(config);
            if tier.is_ok() && settings.churn {
                std::thread::spawn(churn);
            }
            tier
        });
        let tier = tier.map_err(|error| out_of_memory(&error))?;
        self.tier = Some(tier.clone());
        Ok(tier)
    }
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
fn out_of_memory(error: &TierError) -> Errno {
    write_line(error);
    ENOMEM
}

impl TieredMapping {
    /// Releases the mapping from the tier.
    fn release(&self) {
        ranges::remove(self.run.range);
        if let Some(faults) = &self.faults {
            faults.stop();
        }
        self.tier.remove(&self.region);
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
