//! The paged mappings of this process. Each is one region of the pager, which all registrations in the mapping share.
//!
//! The region is shared because accesses by different keys to the same bytes have to take effect in order, and because
//! a page has one place in the budget.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use terrace_hostmem::HostRange;
use terrace_nic::{Paging, ProgressCallback};
use terrace_vm::maps::{self, Run};
use terrace_vm::{BACKED_MIN_BYTES, Refusal, SwapSpace, Swapped};

use super::backing::{self, Purpose};
use super::budget::{Budget, Region, add_swapped};
use super::churn;
use super::mapping::PagedMapping;
use super::ranges;
use super::settings::Settings;
use crate::errno::Result;
use crate::np;
use crate::process_lock::{Locked, lock};
use crate::shim::signals::without_signals;

/// The paged mappings of this process.
#[derive(Default)]
struct Table {
    /// Opened for the first mapping.
    budget: Option<Budget>,
    entries: Vec<Entry>,
    /// Registered ranges (address, length) of memory that is not paged, and how often each is registered. Empty where no
    /// memory moves.
    ordinary: BTreeMap<(u64, u64), usize>,
}

struct Entry {
    mapping: Arc<PagedMapping>,
    /// 0 for memory that was private, and is not registered at present.
    users: usize,
}

/// Beyond this many mappings, memory that is not registered becomes private again, to make room.
const IDLE_MAX: usize = 128;

/// Locked while a mapping is added or removed, and across `fork`.
static TABLE: Mutex<Table> =
    Mutex::new(Table { budget: None, entries: Vec::new(), ordinary: BTreeMap::new() });

/// The number of forks that led to this process. A lease of another generation must not be used.
static GENERATION: AtomicU32 = AtomicU32::new(1);

fn table() -> Locked<Table> {
    lock(&TABLE)
}

/// The generation of this process.
fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// A registered region's claim to its memory. Dropping it waits for accesses under way: the region's key is closed by then.
pub struct Lease {
    /// Taken only by drop.
    held: Option<Held>,
    generation: u32,
}

enum Held {
    /// A paged mapping.
    Paged(Arc<PagedMapping>),
    /// Memory that is not paged, and stays where it is: same-host peers have the kernel copy to its pages.
    Ordinary(HostRange),
}

impl Lease {
    /// The generation of the process that took it.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The callback that drives the pager from the device, if the memory is paged.
    pub fn callback(&self) -> Option<Arc<dyn ProgressCallback>> {
        Some(Arc::new(self.mapping()?.region.budget()))
    }

    /// The paging of a registration; `None` if its memory is not paged, or all of it is locked.
    pub fn paging(&self) -> Option<Paging> {
        let mapping = self.mapping()?;
        let policy = mapping.region.policy()?;
        Some(Paging { pager: mapping.pager.clone(), pattern: np::signature_page(), policy })
    }

    fn mapping(&self) -> Option<&PagedMapping> {
        match self.held.as_ref()? {
            Held::Paged(mapping) => Some(mapping),
            Held::Ordinary(_) => None,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        if self.generation != generation() {
            // The lease is the parent's, whose threads do not exist in this process.
            return std::mem::forget(held);
        }
        match held {
            Held::Paged(mapping) => {
                mapping.region.wait_for_accesses();
                table().release(&mapping);
            }
            Held::Ordinary(range) => table().remove_ordinary(range),
        }
    }
}

/// The reason why memory is not paged.
pub enum NotPaged {
    /// The program has not registered a file's mapping for on-demand paging, or private memory is not to be moved.
    NotWanted,
    /// It is private memory that stays where it is.
    Private(Refusal),
    /// It cannot be paged, for a reason for the log.
    Refused(String),
}

/// Takes a lease of the memory of a range. Adds the mapping that contains it if that is new, and the program asks for
/// on-demand paging; private memory moves into a file in `space` first. Without `space` there is no lease of memory that is
/// not paged. The reason is for such memory.
///
/// # Errors
/// ENOMEM if the budget exceeds the available memory, after a line for the user.
pub fn lease(
    range: HostRange,
    is_on_demand: bool,
    space: Option<&SwapSpace>,
    settings: &Settings,
) -> Result<(Option<Lease>, Option<NotPaged>)> {
    let mut table = table();
    let (held, reason) = match table.find_or_add(range, is_on_demand, space, settings)? {
        Ok(mapping) => (Some(Held::Paged(mapping)), None),
        // Under the lock under which memory moves.
        Err(reason) => (space.map(|_| table.add_ordinary(range)), Some(reason)),
    };
    let lease = held.map(|held| Lease { held: Some(held), generation: generation() });
    Ok((lease, reason))
}

/// The main loop of the `TERRACE_CHURN` thread.
fn churn() {
    for number in churn::numbers() {
        let table = table();
        // The lock is held, so that the region is not dropped meanwhile.
        let index = (number >> 16) as usize % table.entries.len().max(1);
        if let Some(Entry { mapping, .. }) = table.entries.get(index)
            && let Region::Cached(files, region, _) = &mapping.region
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
    /// The paged mapping that contains a range.
    fn find_or_add(
        &mut self,
        range: HostRange,
        is_on_demand: bool,
        space: Option<&SwapSpace>,
        settings: &Settings,
    ) -> Result<std::result::Result<Arc<PagedMapping>, NotPaged>> {
        // Most regions are small, and need no look at the list of mappings.
        let is_private = space.is_some() && (range.len >= BACKED_MIN_BYTES || ranges::may_be_swapped(range));
        let is_everything = range.len == u64::MAX;
        if is_everything || !is_on_demand && !is_private {
            return Ok(Err(NotPaged::NotWanted));
        }
        Ok(match self.find_run(range) {
            Ok(Ok(run)) => self.lease_file(range, run, is_on_demand, settings)?,
            Ok(Err(maps::NoRun::NoSharedFile)) => match space {
                Some(space) => self.add_private(range, space, settings)?.map_err(NotPaged::Private),
                None => Err(NotPaged::NotWanted),
            },
            Ok(Err(_)) if !is_on_demand => Err(NotPaged::NotWanted),
            Ok(Err(other)) => Err(NotPaged::Refused(other.to_string())),
            Err(error) => Err(NotPaged::Refused(format!("cannot read the list of mappings: {error}"))),
        })
    }

    /// Ends a lease of a mapping.
    fn release(&mut self, mapping: &Arc<PagedMapping>) {
        let Some(index) = self.entries.iter().position(|entry| Arc::ptr_eq(&entry.mapping, mapping)) else {
            return;
        };
        self.entries[index].users -= 1;
        if self.entries[index].users == 0 {
            self.leave(index);
        }
    }

    fn add_ordinary(&mut self, range: HostRange) -> Held {
        *self.ordinary.entry((range.addr, range.len)).or_default() += 1;
        Held::Ordinary(range)
    }

    fn remove_ordinary(&mut self, range: HostRange) {
        let place = (range.addr, range.len);
        if let Some(count) = self.ordinary.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.ordinary.remove(&place);
            }
        }
    }

    /// Whether a registered region has memory in these pages. A paged one has, if the program has mapped other memory in
    /// the place of its file.
    fn has_region_in(&self, pages: HostRange) -> bool {
        let is_in = |&(addr, len): &(u64, u64)| HostRange { addr, len }.overlaps(pages);
        self.ordinary.keys().any(is_in)
            || self.entries.iter().any(|entry| entry.users > 0 && entry.mapping.run.overlaps(pages))
    }

    /// Ends a mapping that has no lease any more. Memory that was private stays in its swap file, because the program may
    /// register it again, or end with it.
    fn leave(&mut self, index: usize) {
        let mapping = &self.entries[index].mapping;
        if mapping.is_swapped() && !mapping.pager.is_ordinary() {
            mapping.listed.set_leased(false);
        } else {
            self.entries.swap_remove(index).mapping.end();
        }
    }

    /// Ends mappings without leases. Returns whether there was any.
    fn end_idle(&mut self, is_one: impl Fn(&PagedMapping) -> bool) -> bool {
        let ended = self.entries.extract_if(.., |entry| entry.users == 0 && is_one(&entry.mapping));
        ended.map(|entry| entry.mapping.end()).count() > 0
    }

    /// The mapping of a file that covers a range. Mappings without leases that were there, or of which the program has
    /// moved or lengthened a part, end first, which changes what is found.
    fn find_run(&mut self, range: HostRange) -> io::Result<std::result::Result<Run, maps::NoRun>> {
        let found = maps::find(range)?;
        let is_other = |mapping: &PagedMapping| match &found {
            Ok(run) => {
                (mapping.is_swap_file(run.file) || mapping.run.overlaps(run.range))
                    && !mapping.run.covers(range, run)
            }
            Err(_) => mapping.run.overlaps(range),
        };
        if self.end_idle(is_other) { maps::find(range) } else { Ok(found) }
    }

    fn lease_file(
        &mut self,
        range: HostRange,
        run: Run,
        is_on_demand: bool,
        settings: &Settings,
    ) -> Result<std::result::Result<Arc<PagedMapping>, NotPaged>> {
        let is_its =
            |entry: &Entry| !entry.mapping.pager.is_ordinary() && entry.mapping.run.overlaps(run.range);
        // The file of memory that was private is nothing else's.
        let is_of_swap = self.entries.iter().any(|entry| entry.mapping.is_swap_file(run.file));
        match self.entries.iter_mut().find(|entry| is_its(entry)) {
            Some(entry) if !is_on_demand && !entry.mapping.is_swapped() => {
                return Ok(Err(NotPaged::NotWanted));
            }
            Some(entry) if entry.mapping.run.covers(range, &run) => {
                entry.users += 1;
                entry.mapping.listed.set_leased(true);
                return Ok(Ok(entry.mapping.clone()));
            }
            None if !is_on_demand => return Ok(Err(NotPaged::NotWanted)),
            None if !is_of_swap => {
                return Ok(self.add_file(range, run, settings)?.map_err(NotPaged::Refused));
            }
            Some(_) | None => {}
        }
        let reason = "a part of the mapping is paged already, and the mapping has changed since";
        Ok(Err(NotPaged::Refused(reason.into())))
    }

    /// Makes room among the mappings: ends those without leases that the C library has unmapped meanwhile and, if there
    /// are many, the others, too.
    fn make_room(&mut self) {
        if self.entries.iter().all(|entry| entry.users > 0) {
            return;
        }
        let is_full = self.entries.len() >= IDLE_MAX;
        let mapped = maps::files().unwrap_or_default();
        self.end_idle(|mapping| {
            let swapped = mapping.swapped.lock().unwrap_or_else(PoisonError::into_inner);
            is_full || !swapped.as_ref().is_some_and(|swapped| swapped.is_among(&mapped))
        });
    }

    fn add_file(
        &mut self,
        range: HostRange,
        run: Run,
        settings: &Settings,
    ) -> Result<std::result::Result<Arc<PagedMapping>, String>> {
        let (file, file_len) = match backing::open(&run, Purpose::Paging) {
            Ok(found) => found,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let run = run.cut_at(file_len);
        if !run.covers(range, &run) {
            return Ok(Err("the range exceeds the file".into()));
        }
        let region = self.budget(settings)?.add(file, &run, settings)?;
        Ok(region.map(|region| self.add_mapping(run, region, None)))
    }

    fn add_private(
        &mut self,
        range: HostRange,
        space: &SwapSpace,
        settings: &Settings,
    ) -> Result<std::result::Result<Arc<PagedMapping>, Refusal>> {
        let Budget::Cached(files) = self.budget(settings)? else {
            unreachable!("the modes for comparison have no swap files")
        };
        self.make_room();
        // A signal handler on this thread would wait for ever if it touched the memory meanwhile.
        let swapped = match without_signals(|| space.back(range, |pages| self.has_region_in(pages))) {
            Ok(swapped) => swapped,
            Err(refusal) => return Ok(Err(refusal)),
        };
        match add_swapped(files, &swapped) {
            Ok((run, region)) => Ok(Ok(self.add_mapping(run, region, Some(swapped)))),
            Err(refusal) => {
                let ended = without_signals(|| swapped.end());
                let ended = ended.map_err(|source| Refusal::System { attempt: "map the swap file", source });
                Ok(Err(ended.err().unwrap_or(refusal)))
            }
        }
    }

    fn add_mapping(&mut self, run: Run, region: Region, swapped: Option<Swapped>) -> Arc<PagedMapping> {
        let mapping = Arc::new(PagedMapping::new(run, region, swapped));
        self.entries.push(Entry { mapping: mapping.clone(), users: 1 });
        mapping
    }

    fn budget(&mut self, settings: &Settings) -> Result<Budget> {
        if let Some(budget) = &self.budget {
            return Ok(budget.clone());
        }
        let budget = without_signals(|| -> Result<Budget> {
            let budget = Budget::open(settings)?;
            if settings.churn && matches!(budget, Budget::Cached(_)) {
                std::thread::spawn(churn);
            }
            Ok(budget)
        })?;
        self.budget = Some(budget.clone());
        Ok(budget)
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
    table: Locked<Table>,
}

/// Takes the lock before `fork`. Memory that is not registered becomes private, so that the child has it.
pub fn hold_for_fork() -> ForkHold {
    let mut table = table();
    table.end_idle(|_| true);
    ForkHold { table }
}

impl ForkHold {
    /// Forgets all mappings in the child, where they are plain memory, because the parent's threads do not exist.
    pub fn forget_in_child(mut self) {
        GENERATION.fetch_add(1, Ordering::Relaxed);
        for entry in &self.table.entries {
            // Its descriptor would keep the space when the parent has ended.
            drop(entry.mapping.swapped.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
        std::mem::forget(std::mem::take(&mut *self.table));
        ranges::clear();
        terrace_vm::forget_changes_in_child();
    }
}
