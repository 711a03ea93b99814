//! Access to another process's registered memory.

mod list;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrace_hostmem::{AtomicOp, HostRange, fault};
use terrace_sync::RwLock;

use crate::prefetch_hint::{Likely, PrefetchHint};
use crate::reader_line::EpochGuard;
use crate::reader_slots::{ReaderSlot, ReaderSlots};
use crate::record::Version;
use crate::rights::Rights;
use crate::shared_registry::{RegionView, Seen, SeenRegion, SeenRights, SharedRegistryView, halves};
use crate::source::{Direction, Missing, Source};

/// Longest copy, in bytes, that a change of a region has to wait for.
const COPY_BYTES_MAX: u64 = 256 << 10;

/// Why an access was not made here. The caller sends packets instead, which find the error if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Not possible with this region, now or at all.
    NotHere,
    /// The source of the region's bytes is not known yet: see [`PeerMemory::set_source`].
    Unknown(Version),
}

/// Another process's memory: the regions in its shared registry, and how their bytes are accessed.
#[derive(Debug)]
pub struct PeerMemory {
    registry: SharedRegistryView,
    reader_slots: Arc<ReaderSlots>,
    pid: i32,
    gone: AtomicBool,
    sources: RwLock<HashMap<u32, (Version, Arc<Source>)>>,
}

impl PeerMemory {
    /// Opens the records of process `pid`, which has received `reader_slots`.
    ///
    /// # Errors
    /// `InvalidData` when they are something else, or of another version.
    pub fn new(registry: OwnedFd, reader_slots: Arc<ReaderSlots>, pid: i32) -> io::Result<Arc<PeerMemory>> {
        let (gone, sources) = (AtomicBool::new(false), RwLock::default());
        Ok(Arc::new(PeerMemory {
            registry: SharedRegistryView::open(registry)?,
            reader_slots,
            pid,
            gone,
            sources,
        }))
    }

    /// Sets how the bytes of a region are accessed, as long as its record has this version. The first source of a version
    /// stays, and is not replaced by that of an earlier one: several queue pairs ask about a region at a time, and those
    /// that were answered first keep the source that they accessed last.
    pub fn set_source(&self, key: u32, version: Version, source: Source) {
        let mut sources = self.sources.write();
        if sources.get(&key).is_some_and(|(known, _)| known.0 >= version.0) {
            return;
        }
        self.drop_ended(&mut sources);
        if let Some((_, source)) = sources.insert(key, (version, Arc::new(source))) {
            source.give_up();
        }
    }

    /// Drops the sources of regions that are no more when there is no room for another one: the other process tells of the
    /// end of regions that are mapped only.
    fn drop_ended(&self, sources: &mut HashMap<u32, (Version, Arc<Source>)>) {
        if sources.len() < sources.capacity() {
            return;
        }
        sources.retain(|&key, (version, source)| {
            let mut seen = SeenRegion::default();
            let is_current =
                self.registry.region(key, &mut seen).is_some_and(|view| view.version == *version);
            if !is_current {
                source.give_up();
            }
            is_current
        });
        // The next search comes after as many more.
        sources.reserve(sources.len() + 1);
    }

    /// The other process has taken away the region that had this version. Its mapping is emptied here: queue pairs keep
    /// the source that they accessed last, for any time, and the memory would stay in use after the other process has
    /// freed it.
    pub fn forget(&self, key: u32, version: Version) {
        let mut sources = self.sources.write();
        if let Entry::Occupied(known) = sources.entry(key)
            && known.get().0 == version
        {
            known.remove().1.give_up();
        }
    }

    /// The process has ended, or permits no more accesses.
    pub fn note_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
        self.sources.write().drain().for_each(|(_, (_, source))| source.give_up());
    }

    /// Whether [`PeerMemory::note_gone`] was called.
    #[inline(always)]
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Access for a queue pair of this process, number `own_qpn` at address `own`, that is connected to the other one's
    /// queue pair `qpn`; `None` when all reader slots are in use.
    pub fn direct_access(self: &Arc<Self>, own: [u8; 16], own_qpn: u32, qpn: u32) -> Option<DirectAccess> {
        let reader_slot = self.reader_slots.take(qpn)?;
        let (own, seen, last) = (halves(own), Seen::default(), Last::default());
        Some(DirectAccess { peer: self.clone(), reader_slot, own, own_qpn, qpn, seen, last })
    }

    fn source(&self, key: u32, version: Version) -> Result<Arc<Source>, Refusal> {
        let sources = self.sources.read();
        let known = sources.get(&key).filter(|(known, _)| *known == version);
        known.map(|(_, source)| source.clone()).ok_or(Refusal::Unknown(version))
    }
}

/// Direct access to another process's memory, for one queue pair.
#[derive(Debug)]
pub struct DirectAccess {
    peer: Arc<PeerMemory>,
    reader_slot: ReaderSlot,
    own: [u64; 2],
    own_qpn: u32,
    qpn: u32,
    seen: Seen,
    last: Last,
}

/// Memory of this process: the local end of a copy, as it is known before the copy.
///
/// A copy takes the type as a parameter, so that the checks on local memory are compiled into it: a short copy makes no
/// call for them.
///
/// # Safety
/// The range that [`LocalMemory::locate`] and [`LocalMemory::hold`] give is memory that the program has given for copies
/// in this direction (by a registration, or by a borrow), as long as the epoch is odd or `act` runs.
pub unsafe trait LocalMemory: Copy {
    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// The slot of this process's key table that the reader's epoch is to protect, if the memory is a region's.
    fn slot(&self) -> Option<u32>;

    /// Where the memory is, if it is registered for a copy in this direction. The answer stays true only while the
    /// epoch is odd.
    ///
    /// # Errors
    /// `NotHere` if it is not registered for that.
    fn locate(&self, direction: Direction, guard: &EpochGuard<'_>) -> Result<HostRange, Refusal>;

    /// Keeps the memory registered, without an epoch, while `act` copies from or to it: for copies that take long.
    ///
    /// # Errors
    /// `NotHere` if it is not registered for that; those of `act`.
    fn hold(
        &self,
        direction: Direction,
        act: impl FnOnce(HostRange) -> Result<(), Refusal>,
    ) -> Result<(), Refusal>;
}

/// Memory that the caller of a copy keeps for as long as it takes.
#[derive(Clone, Copy)]
struct Borrowed(HostRange);

// SAFETY: the callers of the functions that make one give the range for the copy.
unsafe impl LocalMemory for Borrowed {
    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.0.len
    }

    #[inline(always)]
    fn slot(&self) -> Option<u32> {
        None
    }

    #[inline(always)]
    fn locate(&self, _: Direction, _: &EpochGuard<'_>) -> Result<HostRange, Refusal> {
        Ok(self.0)
    }

    #[inline(always)]
    fn hold(&self, _: Direction, act: impl FnOnce(HostRange) -> Result<(), Refusal>) -> Result<(), Refusal> {
        act(self.0)
    }
}

/// The region that was accessed last.
#[derive(Debug, Default)]
struct Last {
    region: Option<(u32, Version, Arc<Source>)>,
    /// The region before, until [`DirectAccess::update_prefetch_hint`]: dropping a mapping takes locks that no thread
    /// may wait for while its epoch is odd.
    before: Option<(u32, Version, Arc<Source>)>,
    /// From the region's addresses to those of the other process.
    to_host: u64,
    /// For the prefetch hint.
    likely: Likely,
    /// The prefetch hint is of a region before this one.
    is_hint_due: bool,
}

impl DirectAccess {
    /// Updates the hint if the last access was to another region than the one before.
    #[inline(always)]
    pub fn update_prefetch_hint(&mut self, prefetch_hint: &PrefetchHint) {
        if self.last.is_hint_due {
            self.last.update_prefetch_hint(prefetch_hint);
        }
    }

    /// Has the processor load the first line of an access to a region in frames, whose entry it has been told to load by a
    /// [`PrefetchHint`]. Nothing is checked.
    #[inline]
    pub fn prefetch_framed(&self, key: u32, va: u64) {
        if let Some((last, _, source)) = &self.last.region
            && *last == key
            && let Source::Framed(framed) = &**source
        {
            framed.prefetch(va.wrapping_add(self.last.to_host));
        }
    }

    /// The other process's memory.
    pub fn peer(&self) -> &Arc<PeerMemory> {
        &self.peer
    }

    /// Reads from `va` on into memory of the caller's own, which need not be registered.
    ///
    /// # Errors
    /// See [`Refusal`]; part of it may then have been overwritten.
    #[inline]
    pub fn read_into(&mut self, key: u32, va: u64, into: &mut [u8]) -> Result<(), Refusal> {
        let into = HostRange { addr: into.as_mut_ptr() as u64, len: into.len() as u64 };
        self.copy_piece(Direction::Read, key, va, Borrowed(into))
    }

    /// Writes memory of the caller's own, which need not be registered, to `va` on.
    ///
    /// # Errors
    /// See [`Refusal`]; a part may then have been written.
    #[inline]
    pub fn write_from(&mut self, key: u32, va: u64, from: &[u8]) -> Result<(), Refusal> {
        let from = HostRange { addr: from.as_ptr() as u64, len: from.len() as u64 };
        self.copy_piece(Direction::Write, key, va, Borrowed(from))
    }

    /// Copies one piece of memory from `va` on, or to there.
    ///
    /// # Errors
    /// See [`Refusal`]: `NotHere`, too, if the piece is not registered for that. A part may then have been copied.
    #[inline(always)]
    pub fn copy_piece(
        &mut self,
        direction: Direction,
        key: u32,
        va: u64,
        local: impl LocalMemory,
    ) -> Result<(), Refusal> {
        let len = local.bytes();
        if !(1..=COPY_BYTES_MAX).contains(&len) {
            return self.copy_long_piece(direction, key, va, local);
        }
        self.copy_part(direction, key, va, len, local)
    }

    #[cold]
    #[inline(never)]
    fn copy_long_piece(
        &mut self,
        direction: Direction,
        key: u32,
        va: u64,
        local: impl LocalMemory,
    ) -> Result<(), Refusal> {
        local.hold(direction, |range| self.copy(direction, key, va, &[range]))
    }

    /// Performs an atomic operation, and returns the value before it.
    ///
    /// # Errors
    /// See [`Refusal`]; nothing has happened then.
    pub fn atomic(&mut self, key: u32, va: u64, op: AtomicOp) -> Result<u64, Refusal> {
        let need = match op {
            AtomicOp::Write { .. } => Rights::WRITE,
            AtomicOp::CompareSwap { .. }
            | AtomicOp::FetchAdd { .. }
            | AtomicOp::MaskedCompareSwap { .. }
            | AtomicOp::MaskedFetchAdd { .. } => Rights::ATOMIC,
        };
        let DirectAccess { peer, reader_slot, own, own_qpn, qpn, seen, last } = self;
        let region = peer.region(key, &mut seen.region)?;
        let theirs = HostRange { addr: region.locate(va, 8)?, len: 8 };
        let _guard = reader_slot.enter(region.region.pd, theirs);
        let connection = (*own, *own_qpn, *qpn);
        let version = peer.check(connection, &mut seen.rights, &region, need)?;
        let source = last.source(peer, key, version, va, theirs.addr)?;
        let addr = source.place_of_atomic(theirs.addr).map_err(|Missing| Refusal::NotHere)?;
        if !va.is_multiple_of(8) || !addr.is_multiple_of(8) {
            return Err(Refusal::NotHere);
        }
        // SAFETY: aligned, and in our mapping of the other process's file.
        unsafe { fault::atomic(addr, op) }.map_err(|fault::Fault| Refusal::NotHere)
    }

    /// The same, and stores the value before it, as the host stores integers, at the start of `into`: memory that the
    /// caller has found registered for that, and keeps so meanwhile.
    ///
    /// # Errors
    /// See [`Refusal`]; nothing has happened then. The inner error: the operation was performed, but the memory for the
    /// value went away meanwhile.
    pub fn atomic_into(
        &mut self,
        key: u32,
        va: u64,
        op: AtomicOp,
        into: HostRange,
    ) -> Result<Result<(), fault::Fault>, Refusal> {
        let mut before = [0; 8];
        if into.len < before.len() as u64 {
            return Err(Refusal::NotHere);
        }
        // An operation whose result would be lost must not be performed.
        // SAFETY: memory that the caller has found registered for the device to write.
        let is_there = unsafe {
            fault::copy_from(into.addr, &mut before).and_then(|()| fault::copy_to(into.addr, &before))
        };
        is_there.map_err(|fault::Fault| Refusal::NotHere)?;
        let before = self.atomic(key, va, op)?;
        // SAFETY: the same.
        Ok(unsafe { fault::copy_to(into.addr, &before.to_ne_bytes()) })
    }

    /// Copies the program's memory from `va` on, or to there.
    ///
    /// # Errors
    /// See [`Refusal`]; a part may then have been copied.
    pub fn copy(
        &mut self,
        direction: Direction,
        key: u32,
        va: u64,
        locals: &[HostRange],
    ) -> Result<(), Refusal> {
        let whole: u64 = locals.iter().map(|local| local.len).sum();
        let mut va = va;
        let mut left = whole;
        for local in locals {
            let mut rest = *local;
            while rest.len > 0 {
                let part = HostRange { addr: rest.addr, len: rest.len.min(COPY_BYTES_MAX) };
                // Checks all that is left, so that nothing of a refused access is written.
                self.copy_part(direction, key, va, left, Borrowed(part))?;
                rest = HostRange { addr: rest.addr + part.len, len: rest.len - part.len };
                (va, left) = (va.wrapping_add(part.len), left - part.len);
            }
        }
        if whole == 0 { Err(Refusal::NotHere) } else { Ok(()) }
    }

    #[inline(always)]
    fn copy_part(
        &mut self,
        direction: Direction,
        key: u32,
        va: u64,
        whole: u64,
        local: impl LocalMemory,
    ) -> Result<(), Refusal> {
        let DirectAccess { peer, reader_slot, own, own_qpn, qpn, seen, last } = self;
        let region = peer.region(key, &mut seen.region)?;
        let theirs = HostRange { addr: region.locate(va, whole)?, len: local.bytes() };
        let guard = reader_slot.enter_for(local.slot(), region.region.pd, theirs);
        let here = local.locate(direction, &guard)?;
        let connection = (*own, *own_qpn, *qpn);
        let version = peer.check(connection, &mut seen.rights, &region, direction.needs())?;
        let source = last.source(peer, key, version, va, theirs.addr)?;
        source.copy(direction, peer.pid, theirs.addr, here).map_err(|Missing| Refusal::NotHere)
    }
}

impl Last {
    /// The source of a region in which the other process has `va` at `host`: the last one, if it is still right.
    #[inline(always)]
    fn source(
        &mut self,
        peer: &PeerMemory,
        key: u32,
        version: Version,
        va: u64,
        host: u64,
    ) -> Result<&Source, Refusal> {
        let is_last = matches!(&self.region, Some((last, known, _)) if (*last, *known) == (key, version));
        if !is_last {
            self.find(peer, key, version, va, host)?;
        }
        self.region.as_ref().map(|(.., source)| &**source).ok_or(Refusal::NotHere)
    }

    #[cold]
    fn find(
        &mut self,
        peer: &PeerMemory,
        key: u32,
        version: Version,
        va: u64,
        host: u64,
    ) -> Result<(), Refusal> {
        let source = peer.source(key, version)?;
        self.likely = source.likely(va, host);
        self.to_host = host.wrapping_sub(va);
        self.before = self.region.replace((key, version, source));
        self.is_hint_due = true;
        Ok(())
    }

    #[cold]
    fn update_prefetch_hint(&mut self, prefetch_hint: &PrefetchHint) {
        if let Some((key, ..)) = self.region {
            prefetch_hint.note(key, self.likely);
        }
        self.before = None;
        self.is_hint_due = false;
    }
}

impl PeerMemory {
    /// The region that a key names, as its record says now.
    #[inline(always)]
    fn region<'a>(&'a self, key: u32, seen: &'a mut SeenRegion) -> Result<RegionView<'a>, Refusal> {
        if self.is_gone() {
            return Err(Refusal::NotHere);
        }
        self.registry.region(key, seen).ok_or(Refusal::NotHere)
    }

    /// All checks that the other process would make on a packet's access; returns the region's version. The answer
    /// stays true only while the connection's epoch is odd.
    #[inline(always)]
    fn check(
        &self,
        (own, own_qpn, qpn): ([u64; 2], u32, u32),
        seen: &mut SeenRights,
        view: &RegionView<'_>,
        need: Rights,
    ) -> Result<Version, Refusal> {
        let (pd, access) = self.registry.rights(qpn, own, own_qpn, seen).ok_or(Refusal::NotHere)?;
        let is_permitted = pd == view.region.pd && access.contains(need) && view.region.access.contains(need);
        if is_permitted && view.is_current() { Ok(view.version) } else { Err(Refusal::NotHere) }
    }
}

impl RegionView<'_> {
    /// The other process's address for `va`, when `len` bytes from there lie within the region.
    #[inline(always)]
    fn locate(&self, va: u64, len: u64) -> Result<u64, Refusal> {
        let offset = va.wrapping_sub(self.region.start);
        let is_within = offset <= self.region.len && len <= self.region.len - offset;
        if is_within { Ok(va.wrapping_add(self.region.to_host)) } else { Err(Refusal::NotHere) }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;
    use crate::keys::KeyOrder;
    use crate::shared_registry::{PublishedRegion, SharedRegistry};

    #[test]
    fn sources_of_regions_that_are_no_more_take_no_memory() {
        let order = KeyOrder::new(&mut StdRng::seed_from_u64(4));
        let registry = SharedRegistry::new(&order).expect("made");
        let slots = ReaderSlots::new().expect("slots");
        let sent = registry.file().try_clone_to_owned().expect("a descriptor");
        let peer = PeerMemory::new(sent, slots, std::process::id() as i32).expect("mapped");
        let region = PublishedRegion { tag: 0, access: Rights::READ, pd: 1, start: 0, len: 8, to_host: 0 };
        for number in 0..10_000 {
            registry.publish_region(number, &region);
            let version = registry.region_version(number).expect("published");
            peer.set_source(order.key_of(number), version, Source::Process);
            if number > 0 {
                registry.withdraw_region(number);
            }
        }
        assert!(peer.sources.read().len() < 100);
        let version = registry.region_version(0).expect("published");
        assert!(peer.source(order.key_of(0), version).is_ok(), "that one has not ended");
    }
}
