//! The served mappings of this process: each is one region of the tier, shared by all that the program registers in
//! it.
//!
//! One, because accesses by different keys to the same bytes have to take effect in their order, and because locking
//! memory does not nest: with two regions, each would undo the other's locks.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use terrace_faults::Faults;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::{Pager, RegionPolicy};
use terrace_nic::{Paging, ProgressCallback};
use terrace_tier::{FaultModel, FaultPager, IoMethod, Source, Tier, TierConfig, TierError, TierRegion};

use super::backing::{self, Purpose};
use super::maps::Run;
use super::pager::MappingPager;
use super::settings::{Mode, Settings};
use super::{churn, ranges};
use crate::errno::{ENOMEM, Errno, Result};
use crate::log::tell_user;
use crate::shim::signals::without_signals;

/// A mapping that is served.
pub struct Served {
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
        Some(("memory".into(), serde_json::to_value(self.tier.stats()).ok()?))
    }
}

/// The mappings that this process serves.
#[derive(Default)]
struct Table {
    /// Opened for the first mapping.
    tier: Option<Arc<Tier>>,
    entries: Vec<Entry>,
}

struct Entry {
    served: Arc<Served>,
    users: usize,
}

/// Locked while a mapping begins or ceases to be served, and across `fork`.
static TABLE: Mutex<Table> = Mutex::new(Table { tier: None, entries: Vec::new() });

/// Counts forks in this line of processes. A lease of another generation is not to be touched.
static GENERATION: AtomicU32 = AtomicU32::new(1);

fn table() -> MutexGuard<'static, Table> {
    // Nothing panics while it holds the table; after a panic the table would still be valid.
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The generation of this process.
fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// A registered region's share of a served mapping.
pub struct Lease {
    served: Option<Arc<Served>>,
    generation: u32,
}

impl Lease {
    /// The generation of the process that took it.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The callback that drives the tier from the device.
    pub fn callback(&self) -> Arc<dyn ProgressCallback> {
        Arc::new(TierProgress { tier: self.served().tier.clone() })
    }

    /// The paging of a registration.
    pub fn paging(&self) -> Paging {
        let served = self.served();
        // Peers learn the signature page from a server, and this process has none.
        let pattern = Arc::new([0; PAGE_BYTES as usize]);
        let policy = if served.faults.is_some() { RegionPolicy::Fault } else { RegionPolicy::Wait };
        Paging { pager: served.pager.clone(), pattern, policy }
    }

    fn served(&self) -> &Served {
        self.served.as_ref().expect("only dropping takes it")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(served) = self.served.take() else { return };
        if self.generation != generation() {
            // The parent's: its threads and their work do not exist in this process.
            return std::mem::forget(served);
        }
        let mut table = table();
        let Some(index) = table.entries.iter().position(|entry| Arc::ptr_eq(&entry.served, &served)) else {
            return;
        };
        table.entries[index].users -= 1;
        if table.entries[index].users == 0 {
            table.entries.swap_remove(index);
            served.end();
        }
    }
}

/// Why a mapping is not served, for the log.
pub type Refusal = String;

/// Takes a share of the mapping `run`, which contains the range, and serves the mapping if it was not served yet.
///
/// # Errors
/// ENOMEM when the budget exceeds the memory that is available; the user is told. The inner error is for a mapping that
/// cannot be served.
pub fn lease(range: HostRange, run: Run, settings: &Settings) -> Result<std::result::Result<Lease, Refusal>> {
    let mut table = table();
    let overlaps = |entry: &&mut Entry| entry.served.run.overlaps(run.range);
    let served =
        match table.entries.iter_mut().filter(|entry| !entry.served.pager.is_ordinary()).find(overlaps) {
            Some(entry) if entry.served.run.serves(range, &run) => {
                entry.users += 1;
                entry.served.clone()
            }
            Some(_) => {
                return Ok(Err("part of the mapping is served already, and it has changed since".into()));
            }
            None => match table.serve(range, run, settings)? {
                Ok(served) => served,
                Err(refusal) => return Ok(Err(refusal)),
            },
        };
    Ok(Ok(Lease { served: Some(served), generation: generation() }))
}

/// The main loop of the `TERRACE_CHURN` thread.
fn churn() {
    for number in churn::numbers() {
        let table = table();
        // Under the lock, so that the region is not dropped meanwhile.
        let index = (number >> 16) as usize % table.entries.len().max(1);
        if let Some(Entry { served, .. }) = table.entries.get(index)
            && !served.pager.is_ordinary()
        {
            churn::step(&served.tier, &served.region, number);
        }
        drop(table);
        // Another thread may wait for the lock.
        std::thread::sleep(Duration::from_micros(20));
    }
}

impl Table {
    fn serve(
        &mut self,
        range: HostRange,
        run: Run,
        settings: &Settings,
    ) -> Result<std::result::Result<Arc<Served>, Refusal>> {
        let (file, file_len) = match backing::open(&run, Purpose::Paging) {
            Ok(found) => found,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let run = run.cut_at(file_len);
        if !run.serves(range, &run) {
            return Ok(Err("it goes beyond the end of the file".into()));
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
        let inner: Arc<dyn Pager> = match &faults {
            Some(faults) => faults.clone(),
            None => region.clone(),
        };
        let pager = Arc::new(MappingPager::new(inner));
        let served = Arc::new(Served { run, tier, region, faults, pager });
        self.entries.push(Entry { served: served.clone(), users: 1 });
        ranges::add(served.run.range);
        Ok(Ok(served))
    }

    fn tier(&mut self, settings: &Settings) -> Result<Arc<Tier>> {
        if let Some(tier) = &self.tier {
            return Ok(tier.clone());
        }
        let mut config = TierConfig::new(settings.dram_bytes);
        // The device's: a device is open when a region is registered.
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

/// A pager that pages as hardware does. Each mapping has the whole budget: it is a model for comparison.
fn fault_pager(tier: &Tier, region: &Arc<TierRegion>, settings: &Settings) -> Result<Arc<FaultPager>> {
    let pager =
        without_signals(|| FaultPager::new(region.clone(), FaultModel::default(), settings.dram_bytes));
    pager.map(Arc::new).map_err(|error| {
        tier.remove(region);
        out_of_memory(&error)
    })
}

/// Tells the user, who otherwise sees only an errno.
fn out_of_memory(error: &TierError) -> Errno {
    tell_user(error);
    ENOMEM
}

impl Served {
    /// Makes the tier release the mapping.
    fn let_go(&self) {
        ranges::remove(self.run.range);
        if let Some(faults) = &self.faults {
            faults.stop();
        }
        self.tier.remove(&self.region);
    }

    /// The last lease is dropped.
    fn end(self: Arc<Self>) {
        if !self.pager.is_ordinary() {
            self.let_go();
        }
        if backing::is_locked_by_us(self.run.file.inode()) {
            // Closing any descriptor of a file releases the process's locks on it.
            std::mem::forget(self);
        }
    }

    /// The program is about to change the mapping.
    fn make_ordinary(&self) {
        if self.pager.is_ordinary() {
            return;
        }
        self.pager.make_ordinary(|| self.let_go());
        let name = String::from_utf8_lossy(&self.run.path);
        tracing::warn!(file = %name, "the mapping changes: its regions are ordinary on-demand regions from now on");
    }
}

/// Called before mappings in a range go or change.
#[inline]
pub fn before_change(range: HostRange) {
    if ranges::may_touch(range) {
        leave(range);
    }
}

#[cold]
fn leave(range: HostRange) {
    let table = table();
    let concerned = table.entries.iter().filter(|entry| entry.served.run.overlaps(range));
    concerned.for_each(|entry| entry.served.make_ordinary());
}

/// Holds the table's lock while the process forks.
pub struct ForkHold {
    table: MutexGuard<'static, Table>,
}

/// Before `fork`: takes the lock.
pub fn hold_for_fork() -> ForkHold {
    ForkHold { table: table() }
}

impl ForkHold {
    /// In the child: its mappings are plain memory, and none of the parent's threads exist to serve them.
    pub fn forget_in_child(mut self) {
        GENERATION.fetch_add(1, Ordering::Relaxed);
        std::mem::forget(std::mem::take(&mut *self.table));
        ranges::clear();
    }
}
