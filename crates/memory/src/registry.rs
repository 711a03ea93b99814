//! Registering memory, and the data path.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use terrace_hostmem::{AtomicOp, CopySource, HostRange, fault};
use terrace_shm::{GracePeriod, KeyMemo, ReaderTimeout, SharedRegistry, forget_readers};

use crate::access::{Access, AccessError, AccessNeed, Accessor, RegisterError};
use crate::entry::{Entry, FlushHook, Kind};
use crate::flush::is_mapped;
use crate::paged;
use crate::paging::{Pager, Pattern, RegionPolicy};
use crate::pin::PinLock;
use crate::sync_mapping;
use crate::table::{Slot, Table, tag_of, vacate};

/// The size of a device's key table, and the seed of its keys.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most regions at a time.
    pub regions_max: u32,
    /// Most memory windows at a time.
    pub windows_max: u32,
    /// Decides the sequence of keys. A peer that knows it knows all keys: draw it from the system's random source.
    pub seed: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { regions_max: 1 << 22, windows_max: 1 << 22, seed: 0 }
    }
}

/// What to register.
#[derive(Clone, Debug)]
pub struct RegionSpec {
    /// Protection domain.
    pub pd: u32,
    /// First byte in the program's address space. With `len` = `u64::MAX`, `addr` = 0 and `ON_DEMAND`: all of it.
    pub addr: u64,
    /// Length in bytes. May be 0: the key then permits accesses of no bytes.
    pub len: u64,
    /// The address by which users of the key name the first byte; ignored (taken as 0) with `ZERO_BASED`.
    pub iova: u64,
    /// What may be done.
    pub access: Access,
    /// Makes the bytes durable on FLUSH; `None` for `msync`. A pager does that itself.
    pub flush: Option<Arc<dyn FlushHook>>,
    /// Pages the region, if its bytes need not be in memory. Its range must cover the region.
    pub pager: Option<Arc<dyn Pager>>,
    /// The signature page for peers that ask for it. Without it they wait for absent bytes like the others.
    pub pattern: Option<Pattern>,
    /// The fault policy.
    pub policy: RegionPolicy,
}

impl RegionSpec {
    /// A region whose bytes users of the key name by the program's own addresses.
    pub fn new(pd: u32, addr: u64, len: u64, access: Access) -> RegionSpec {
        RegionSpec {
            pd,
            addr,
            len,
            iova: addr,
            access,
            flush: None,
            pager: None,
            pattern: None,
            policy: RegionPolicy::Wait,
        }
    }

    /// Whether this is implicit on-demand paging: the whole address space.
    fn is_implicit(&self) -> bool {
        self.addr == 0 && self.len == u64::MAX && self.access.contains(Access::ON_DEMAND)
    }

    /// Whether its addresses are offsets in a file.
    fn is_by_offset(&self) -> bool {
        self.pager.as_ref().is_some_and(|pager| pager.translation().local_copies().is_some())
    }

    /// Checks everything and makes an entry. Whether the range is mapped, where it has to be, can have changed when
    /// this returns: what counts is what a copy finds.
    fn checked(&self) -> Result<Entry, RegisterError> {
        let mut entry = Entry::free(0, 1);
        self.apply(&mut entry)?;
        self.check_pager()?;
        let range = HostRange { addr: self.addr, len: self.len };
        let need_not_be_mapped =
            self.access.contains(Access::ON_DEMAND) || self.len == 0 || entry.is_by_offset;
        if need_not_be_mapped || is_mapped(range) {
            return Ok(entry);
        }
        Err(RegisterError::NotMapped)
    }

    fn check_pager(&self) -> Result<(), RegisterError> {
        let is_paged = self.pager.is_some() && !self.is_by_offset();
        if self.policy == RegionPolicy::Commodity && is_paged && self.pattern.is_none() {
            return Err(RegisterError::Invalid("absent pages without a signature page"));
        }
        let range = HostRange { addr: self.addr, len: self.len };
        if self.pager.as_ref().is_some_and(|pager| !pager.translation().covers(range)) {
            return Err(RegisterError::Invalid("the region is not within its pager's range"));
        }
        Ok(())
    }

    /// Checks the arguments and sets the fields that depend on them.
    fn apply(&self, entry: &mut Entry) -> Result<(), RegisterError> {
        if !self.access.writable_if_remotely_writable() {
            return Err(RegisterError::Invalid("remote write or atomic access needs local write access"));
        }
        let start = if self.access.contains(Access::ZERO_BASED) { 0 } else { self.iova };
        if self.addr.checked_add(self.len).is_none() || start.checked_add(self.len).is_none() {
            return Err(RegisterError::Invalid("the range's end overflows"));
        }
        if self.is_implicit() && start != 0 {
            return Err(RegisterError::Invalid("implicit on-demand paging does not translate addresses"));
        }
        entry.kind = Kind::Region;
        entry.bound = true;
        entry.is_by_offset = self.is_by_offset();
        entry.access = self.access;
        entry.pd = self.pd;
        entry.start = start;
        entry.len = self.len;
        entry.to_host = self.addr.wrapping_sub(start);
        entry.flush.clone_from(&self.flush);
        entry.pager.clone_from(&self.pager);
        entry.pattern.clone_from(&self.pattern);
        entry.policy = self.policy;
        Ok(())
    }
}

/// A registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Both lkey and rkey.
    pub key: u32,
    /// The address by which users of the key name the first byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The memory that a region moves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewRange {
    /// First byte in the program's address space.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The address by which users of the key name the first byte; ignored with `ZERO_BASED`.
    pub iova: u64,
}

/// How a region's absent bytes are reached from now on.
#[derive(Clone, Debug, Default)]
pub struct NewPaging {
    /// As in [`RegionSpec::pager`]; `None` makes it an ordinary region.
    pub pager: Option<Arc<dyn Pager>>,
    /// As in [`RegionSpec::pattern`].
    pub pattern: Option<Pattern>,
    /// As in [`RegionSpec::policy`].
    pub policy: RegionPolicy,
}

/// What `ibv_rereg_mr` changes; `None` leaves a property as it is.
#[derive(Clone, Debug, Default)]
pub struct RegionChange {
    /// New memory. The region's flush hook and pager go with the old one.
    pub range: Option<NewRange>,
    /// A new pager, or none.
    pub paging: Option<NewPaging>,
    /// New protection domain.
    pub pd: Option<u32>,
    /// New permissions.
    pub access: Option<Access>,
}

impl RegionChange {
    /// What the region that `key` names becomes.
    fn of(&self, entry: &Entry, key: u32) -> Result<RegionSpec, RegisterError> {
        if entry.kind != Kind::Region || entry.tag != tag_of(key) {
            return Err(RegisterError::UnknownKey);
        }
        if entry.windows.load(Ordering::Relaxed) != 0 {
            return Err(RegisterError::Busy);
        }
        let old_addr = entry.start.wrapping_add(entry.to_host);
        let old = NewRange { addr: old_addr, len: entry.len, iova: entry.start };
        let NewRange { addr, len, iova } = self.range.unwrap_or(old);
        let stays = self.range.is_none();
        let old_paging = || NewPaging {
            pager: entry.pager.clone().filter(|_| stays),
            pattern: entry.pattern.clone().filter(|_| stays),
            policy: entry.policy,
        };
        let NewPaging { pager, pattern, policy } = self.paging.clone().unwrap_or_else(old_paging);
        Ok(RegionSpec {
            pd: self.pd.unwrap_or(entry.pd),
            addr,
            len,
            iova,
            access: self.access.unwrap_or(entry.access),
            flush: entry.flush.clone().filter(|_| stays),
            pager,
            pattern,
            policy,
        })
    }
}

/// The translation and protection table of one device.
pub struct Registry {
    pub(crate) table: Table,
    /// A change of the table pins this; `fork` closes it, so that the child finds no change half made. Copies ignore
    /// it.
    pub(crate) changes: PinLock<()>,
    /// The shared registry, once it was asked for.
    pub(crate) shared_registry: OnceLock<SharedRegistry>,
    /// This is a forked child, and the shared registry is the parent's.
    pub(crate) is_detached: AtomicBool,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (regions, windows) = self.counts();
        f.debug_struct("Registry").field("regions", &regions).field("windows", &windows).finish()
    }
}

impl Registry {
    /// An empty table. Makes sure that faults in copies are caught in this process.
    ///
    /// # Errors
    /// When the signal handlers cannot be installed.
    pub fn new(limits: Limits) -> std::io::Result<Registry> {
        fault::install()?;
        Ok(Registry {
            table: Table::new(limits.regions_max, limits.windows_max, limits.seed),
            changes: PinLock::new(()),
            shared_registry: OnceLock::new(),
            is_detached: AtomicBool::new(false),
        })
    }

    /// How many regions and windows exist.
    pub fn counts(&self) -> (u32, u32) {
        // Changes nothing, but takes the allocator's lock, which must be free when the process forks.
        let _changing = self.changes.pin();
        self.table.counts()
    }

    /// Registers memory. Nothing is touched; the cost depends on the number of mappings in the range, not on its
    /// length.
    ///
    /// # Errors
    /// `Invalid` for an end that overflows, remote write or atomic access without local write access, implicit
    /// on-demand paging that translates addresses, a range that the pager's does not cover, or a commodity region without a signature page; `NotMapped` when part of
    /// the range is not mapped and `ON_DEMAND` is not given; `NoRoom`.
    pub fn register(&self, spec: &RegionSpec) -> Result<Region, RegisterError> {
        // Checked before a slot is taken, so that a refusal leaves no trace.
        let mut checked = spec.checked()?;
        let _changing = self.changes.pin();
        let (key, slot) = self.table.allocate(false).ok_or(RegisterError::NoRoom)?;
        checked.tag = tag_of(key);
        let region = Region { key, start: checked.start, len: checked.len };
        let mut entry = slot.close();
        checked.step = entry.step;
        *entry = checked;
        self.publish_region(key, &entry);
        Ok(region)
    }

    /// Changes a region and keeps its key. On error the region is as it was. When this returns, no access that passed
    /// the old checks is still running.
    ///
    /// # Errors
    /// As for [`Registry::register`]; `Busy` when windows are bound, or when the memory may be absent from now on and the key
    /// is retained ([`Registry::retain`]): somebody knows where else its memory is; `UnknownKey`; `ReaderTimeout`.
    pub fn reregister(&self, key: u32, change: &RegionChange) -> Result<Region, RegisterError> {
        {
            let _changing = self.changes.pin();
            // Walks the mappings before the slot is closed.
            change.of(&self.region_slot(key)?.pin(), key)?.checked()?;
        }
        let check = |entry: &Entry| {
            let spec = change.of(entry, key)?;
            spec.check_pager()?;
            let is_same = change.range.is_none()
                && spec
                    .pager
                    .as_ref()
                    .zip(entry.pager.as_ref())
                    .is_some_and(|(new, old)| Arc::ptr_eq(new, old));
            let is_unexpected = spec.pager.is_some() && !is_same && self.table.is_retained(key);
            if is_unexpected { Err(RegisterError::Busy) } else { Ok(()) }
        };
        let (region, old_pager) = self.change_region(key, check, GracePeriod::wait_long, |entry| {
            let old_pager = entry.pager.clone();
            change.of(entry, key)?.apply(entry)?;
            Ok((Region { key, start: entry.start, len: entry.len }, old_pager))
        })?;
        // Dropping it may take a while: not while the slot is closed.
        drop(old_pager);
        Ok(region)
    }

    /// Ends a region. When this returns, no access to it is still running, and its key names nothing.
    ///
    /// # Errors
    /// `Busy` when windows are bound; `UnknownKey`; `ReaderTimeout`. The region is then as it was.
    pub fn deregister(&self, key: u32) -> Result<(), RegisterError> {
        self.end_region(key, GracePeriod::wait_long)
    }

    /// Ends a region, if other processes' accesses to it end within this time.
    ///
    /// # Errors
    /// As for [`Registry::deregister`].
    pub fn deregister_within(&self, key: u32, limit: Duration) -> Result<(), RegisterError> {
        self.end_region(key, |grace| grace.wait(limit))
    }

    fn end_region(
        &self,
        key: u32,
        wait: impl FnOnce(&mut GracePeriod) -> Result<(), ReaderTimeout>,
    ) -> Result<(), RegisterError> {
        let check = |entry: &Entry| match entry {
            _ if entry.kind != Kind::Region || entry.tag != tag_of(key) => Err(RegisterError::UnknownKey),
            _ if entry.windows.load(Ordering::Relaxed) != 0 => Err(RegisterError::Busy),
            _ => Ok(()),
        };
        let before = self.change_region(key, check, wait, |entry| Ok(vacate(entry)))?;
        // Dropping its pager may take a while.
        drop(before);
        let _changing = self.changes.pin();
        self.table.release(key, false);
        Ok(())
    }

    /// Has no other region or window get a key while it is retained, also when its own has ended. Ends with
    /// [`Registry::end_retention`], once for each call.
    pub fn retain(&self, key: u32) {
        let _changing = self.changes.pin();
        self.table.retain(key);
    }

    /// Ends one retention of a key.
    pub fn end_retention(&self, key: u32) {
        let _changing = self.changes.pin();
        self.table.end_retention(key);
    }

    fn region_slot(&self, key: u32) -> Result<&Slot, RegisterError> {
        self.table.slot_of(key).ok_or(RegisterError::UnknownKey)
    }

    /// Whether a key permits an access of this kind to any of its memory.
    ///
    /// # Errors
    /// `UnknownKey`, `WrongPd`, `WrongQp`, `Permission`, in this order of precedence.
    pub fn check_right(&self, who: Accessor, key: u32, need: AccessNeed) -> Result<(), AccessError> {
        self.slot(key)?.pin().check_right(tag_of(key), who, need)
    }

    /// Checks an access to the whole range without touching memory. The answer can be outdated when it arrives: every
    /// access checks again.
    ///
    /// # Errors
    /// `UnknownKey`, `WrongPd`, `WrongQp`, `Permission`, `OutOfRange`, in this order of precedence.
    pub fn check(
        &self,
        who: Accessor,
        key: u32,
        va: u64,
        len: u64,
        need: AccessNeed,
    ) -> Result<(), AccessError> {
        if len == 0 && need.needs_no_key_for_nothing() {
            return Ok(());
        }
        self.slot(key)?.pin().locate(tag_of(key), who, need, va, len).map(drop)
    }

    /// Copies registered memory to `out`. Aligned parts of 1, 2, 4 and 8 bytes are each read with one load. Zero bytes
    /// may be read with any key.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `Fault` when the memory is not there or not readable; `out` is then partly written.
    /// For peers `NotReady` and `Retry` when part of it is absent.
    pub fn read(&self, who: Accessor, key: u32, va: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.read_again(who, key, &KeyMemo::default(), va, out)
    }

    /// The same, by a key that most likely is that of the last access with this memo.
    ///
    /// # Errors
    /// As for [`Registry::read`].
    #[inline]
    pub fn read_again(
        &self,
        who: Accessor,
        key: u32,
        memo: &KeyMemo,
        va: u64,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        // SAFETY: the program registered this range for the device to read, and it stays registered meanwhile.
        self.read_by(who, key, memo, va, out, |host, out| unsafe { fault::copy_from(host, out) })
    }

    /// The same in any order and in loads of any size ([`fault::copy_unordered`]), except from a paged region for a peer.
    ///
    /// # Errors
    /// As for [`Registry::read`].
    pub fn read_unordered(
        &self,
        who: Accessor,
        key: u32,
        memo: &KeyMemo,
        va: u64,
        out: &mut [u8],
    ) -> Result<(), AccessError> {
        self.read_by(who, key, memo, va, out, |host, out| {
            // SAFETY: as in `read_again`; `out` is ours.
            unsafe { fault::copy_unordered(out.as_mut_ptr() as u64, host, out.len()) }
        })
    }

    /// Reads registered memory by `copy`, which gets its address.
    #[inline(always)]
    fn read_by(
        &self,
        who: Accessor,
        key: u32,
        memo: &KeyMemo,
        va: u64,
        out: &mut [u8],
        copy: impl FnOnce(u64, &mut [u8]) -> Result<(), fault::Fault>,
    ) -> Result<(), AccessError> {
        if out.is_empty() {
            return Ok(());
        }
        let slot = self.table.slot_again(key, memo).ok_or(AccessError::UnknownKey)?;
        let entry = slot.pin();
        let host = entry.locate(tag_of(key), who, AccessNeed::Read, va, out.len() as u64)?;
        if let Some(pager) = entry.pager_for(who) {
            return paged::read(&entry, &**pager, who, host, out);
        }
        copy(host, out).map_err(|fault::Fault| AccessError::Fault)
    }

    /// Copies `data` to registered memory, ascending, the last byte last. Aligned parts of 1, 2, 4 and 8 bytes are each
    /// written with one store. Zero bytes may be written with any key.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `Fault` when the memory is not there or not writable; bytes before the fault are
    /// then written. For peers `NotReady` and `Retry` when part of it is absent; nothing is written then.
    pub fn write(&self, who: Accessor, key: u32, va: u64, data: &[u8]) -> Result<(), AccessError> {
        self.write_from(who, key, &KeyMemo::default(), va, data)
    }

    /// The same from any source, by a key that most likely is that of the last access with this memo.
    ///
    /// # Errors
    /// As for [`Registry::write`]; `Fault`, too, when the source is not readable.
    #[inline]
    pub fn write_from(
        &self,
        who: Accessor,
        key: u32,
        memo: &KeyMemo,
        va: u64,
        data: impl CopySource,
    ) -> Result<(), AccessError> {
        if data.bytes() == 0 {
            return Ok(());
        }
        let slot = self.table.slot_again(key, memo).ok_or(AccessError::UnknownKey)?;
        let entry = slot.pin();
        let host = entry.locate(tag_of(key), who, AccessNeed::Write, va, data.bytes() as u64)?;
        if let Some(pager) = entry.pager_for(who) {
            let written = data.with_bytes(|data| paged::write(&entry, &**pager, who, host, data));
            return written.unwrap_or(Err(AccessError::Fault));
        }
        // SAFETY: the program registered this range for the device to write, and the pin keeps it registered.
        unsafe { data.copy_to(host) }.map_err(|fault::Fault| AccessError::Fault)
    }

    /// Performs an atomic operation and returns the value before it. Atomic with respect to the program's own atomic
    /// instructions as well.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `Misaligned`; `Fault` when the memory is not there or not writable. For peers
    /// `NotReady` and `Retry` when it is absent.
    pub fn atomic(&self, who: Accessor, key: u32, va: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let entry = self.slot(key)?.pin();
        let host = locate_atomic(&entry, key, who, va, op)?;
        if let Some(pager) = entry.pager_for(who) {
            return paged::atomic(&entry, &**pager, who, host, op);
        }
        // SAFETY: the program registered these bytes for the device to change, the pin keeps them registered, and the
        // address is aligned.
        unsafe { fault::atomic(host, op) }.map_err(|fault::Fault| AccessError::Fault)
    }

    #[inline]
    pub(crate) fn slot(&self, key: u32) -> Result<&Slot, AccessError> {
        self.table.slot_of(key).ok_or(AccessError::UnknownKey)
    }

    /// Before `fork`, in the parent: waits for changes under way and keeps new ones out, so that the child inherits a
    /// whole table. Copies go on. Pair with [`Registry::after_fork_parent`] or [`Registry::after_fork_child`].
    pub fn before_fork(&self) {
        self.changes.close_raw();
    }

    /// After `fork`, in the parent.
    pub fn after_fork_parent(&self) {
        self.changes.open_raw();
    }

    /// After `fork`, in the child: forgets the copies of threads that exist only in the parent. Pagers are the parent's
    /// as well; the child has the memory itself, as the kernel gives it. The keys of regions that are files name nothing
    /// in the child.
    pub fn after_fork_child(&self) {
        // The shared registry, its readers, and the reader slots are the parent's.
        self.is_detached.store(true, Ordering::Relaxed);
        // SAFETY: the child has one thread, which has forked, and is here.
        unsafe { forget_readers() };
        for (_, slot) in self.table.slots() {
            slot.forget_pins();
            let mut entry = slot.close();
            entry.withdrawals = 0;
            // Without the pager, offsets in a file would be taken for addresses.
            entry.bound &= !entry.is_by_offset;
            if let Some(pager) = entry.pager.take() {
                pager.translation().forget_copies();
                // Dropping it might wait for threads that this process does not have.
                std::mem::forget(pager);
            }
        }
        self.changes.forget_pins();
        sync_mapping::after_fork_child();
    }
}

/// The checks on an atomic, and the program's address of its 8 bytes.
pub(crate) fn locate_atomic(
    entry: &Entry,
    key: u32,
    who: Accessor,
    va: u64,
    op: AtomicOp,
) -> Result<u64, AccessError> {
    let need = match op {
        AtomicOp::Write { .. } => AccessNeed::Write,
        AtomicOp::CompareSwap { .. }
        | AtomicOp::FetchAdd { .. }
        | AtomicOp::MaskedCompareSwap { .. }
        | AtomicOp::MaskedFetchAdd { .. } => AccessNeed::Atomic,
    };
    let host = entry.locate(tag_of(key), who, need, va, 8)?;
    // A region whose iova and address differ modulo 8 permits no atomics at all.
    if !va.is_multiple_of(8) || !host.is_multiple_of(8) {
        return Err(AccessError::Misaligned);
    }
    Ok(host)
}
