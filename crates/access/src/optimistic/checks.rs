//! How an initiator finds out what met an absent page: READs by what they returned, WRITEs by the versions of their pages
//! before and after.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use smallvec::SmallVec;
use terrace_transport::{LocalError, SendWr, Sge, Time, WcStatus};

use super::entry::{Check, Seq, State};
use super::order::Class;
use super::versions::{AGE_NS_MAX, VersionTable};
use super::{Initiator, Post, Scratch, Tables, What, scratch_read};
use crate::sge_list::{LocalMemory, gather};
use crate::signature::{CHUNK_BYTES, PAGE_BYTES};

/// Versions between two wanted ones that are read along with them, instead of by a READ of their own.
const GAP_MAX: u64 = 16;

/// While this many checks are under way, WRITEs wait for the end of one of them, even if somebody waits for the WRITEs: then
/// one check suffices for all that have come meanwhile. Without a limit each signaled WRITE would have a READ of its own, and
/// no two of them would share a packet's costs. The limits on the number of unchecked WRITEs and on their delay come first.
const CHECKS_MAX: usize = 4;

/// The purpose of a READ of versions.
#[derive(Clone, Debug)]
pub(super) enum Reader {
    /// A WRITE that is to be posted.
    Learn(Seq),
    /// WRITEs that were posted before it, by the number of the check.
    Check(u64),
}

/// A READ of the versions of adjacent pages.
#[derive(Clone, Debug)]
pub(super) struct VersionRead {
    reader: Reader,
    region_id: u64,
    table: VersionTable,
    first_page: u64,
    count: u64,
    /// The slot of the scratch memory that it reads to.
    slot: u32,
    /// When it was posted.
    at: Time,
}

/// The checks of an initiator.
#[derive(Debug)]
pub(super) struct Checks {
    free_slots: Vec<u32>,
    next_id: u64,
    /// Those under way: how many READs they wait for, and which WRITEs they are of.
    under_way: HashMap<u64, (usize, Vec<Seq>)>,
    /// Whether somebody waits for the WRITEs that are due to be checked.
    is_requested: bool,
    /// How many WRITEs are due, and since when.
    due_count: usize,
    due_since: Time,
}

impl Checks {
    pub(super) fn new(slot_count: u32) -> Checks {
        Checks {
            free_slots: (0..slot_count).collect(),
            next_id: 0,
            under_way: HashMap::new(),
            is_requested: false,
            due_count: 0,
            due_since: Time(0),
        }
    }

    pub(super) fn has_slot(&self) -> bool {
        !self.free_slots.is_empty()
    }

    /// Notes that a WRITE is due to be checked.
    pub(super) fn add_due(&mut self, now: Time) {
        if self.due_count == 0 {
            self.due_since = now;
        }
        self.due_count += 1;
    }

    /// Has the due WRITEs checked at once.
    pub(super) fn request(&mut self) {
        self.is_requested = true;
    }

    /// The work request of a READ of versions, which takes a slot.
    pub(super) fn post(
        &mut self,
        token: u64,
        read: &mut VersionRead,
        scratch: &Scratch,
        now: Time,
    ) -> SendWr {
        read.slot = self.free_slots.pop().expect("the caller has seen a free slot");
        read.at = now;
        let (rkey, va, length) = read.table.part(read.first_page, read.count);
        let addr = scratch.addr + u64::from(read.slot) * u64::from(scratch.slot_bytes);
        scratch_read(token, va, rkey, Sge { addr, length, lkey: scratch.lkey })
    }
}

impl Initiator {
    /// Queues READs of the versions of these pages, which are ascending. Returns how many.
    pub(super) fn read_versions(
        &mut self,
        reader: &Reader,
        region_id: u64,
        table: VersionTable,
        pages: &[u64],
    ) -> usize {
        let count_max = table.versions_in(self.config.scratch.slot_bytes);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for &page in pages {
            match runs.last_mut() {
                Some(run) if page - run.end <= GAP_MAX && page + 1 - run.start <= count_max => {
                    run.end = page + 1
                }
                _ => runs.push(page..page + 1),
            }
        }
        if let Reader::Learn(seq) = reader
            && let Some(index) = self.index(*seq)
        {
            self.entries[index].posts += runs.len() as u32;
        }
        for run in &runs {
            let (first_page, count) = (run.start, run.end - run.start);
            let (slot, at, reader) = (0, Time(0), reader.clone());
            let read = VersionRead { reader, region_id, table, first_page, count, slot, at };
            self.unposted.push_back(Post::new(What::Versions(read)));
        }
        runs.len()
    }

    /// When WRITEs are checked that nobody waits for.
    pub(super) fn check_deadline(&self) -> Option<Time> {
        let is_any = self.checks.due_count > 0;
        is_any.then(|| self.checks.due_since.after_ns(self.config.check_delay_ns))
    }

    /// Has the versions of all posted WRITEs read again, if somebody waits for them, or they are many or have waited for
    /// long. The queue pair is in order, so the READ is executed behind all of these WRITEs, and one suffices for WRITEs to
    /// the same pages.
    pub(super) fn check_writes(&mut self, now: Time) {
        let is_due = self.checks.is_requested && self.checks.under_way.len() < CHECKS_MAX
            || self.checks.due_count >= self.config.unchecked_count_max
            || self.check_deadline().is_some_and(|deadline| deadline <= now);
        // A request that has to wait is not forgotten: the end of a check is progress.
        self.checks.is_requested &= !is_due && self.checks.due_count > 0;
        if !is_due || self.checks.due_count == 0 {
            return;
        }
        self.checks.due_count = 0;
        let (id, mut of) = (self.checks.next_id, Vec::new());
        let mut pages: HashMap<u64, BTreeSet<u64>> = HashMap::new();
        for (seq, entry) in (self.first..).zip(&mut self.entries) {
            let (Check::Due, Some(region)) = (entry.check, &entry.region) else { continue };
            let set = pages.entry(region.description().region_id).or_default();
            let numbered = entry.pages().zip(&entry.bases);
            set.extend(numbered.filter(|(_, base)| base.is_some()).map(|(page, _)| page));
            entry.check = Check::Posted;
            of.push(seq);
        }
        self.checks.next_id += 1;
        let mut read_count = 0;
        for (region_id, pages) in pages {
            let Some(Tables::Known(table)) = self.tables.get(&region_id) else { continue };
            let pages: Vec<u64> = pages.into_iter().collect();
            read_count += self.read_versions(&Reader::Check(id), region_id, *table, &pages);
        }
        if read_count > 0 {
            self.checks.under_way.insert(id, (read_count, of));
        }
    }

    /// Takes the completion of a READ of versions.
    pub(super) fn take_versions(
        &mut self,
        now: Time,
        read: &VersionRead,
        status: WcStatus,
        memory: &impl LocalMemory,
    ) {
        let versions = self.versions_of(read, status, memory);
        self.checks.free_slots.push(read.slot);
        let numbered = (read.first_page..read.first_page + read.count).zip(&versions);
        for (page, version) in numbered {
            match version {
                Some(version) => self.known.note(read.region_id, page, *version, read.at),
                None => self.known.forget(read.region_id, page),
            }
        }
        match read.reader {
            Reader::Learn(seq) => self.take_learned(now, seq, read, &versions),
            Reader::Check(id) => self.take_checked(now, id, read, &versions),
        }
    }

    /// The versions that a READ has brought; none if it has failed.
    fn versions_of(
        &self,
        read: &VersionRead,
        status: WcStatus,
        memory: &impl LocalMemory,
    ) -> Vec<Option<u32>> {
        let Scratch { addr, lkey, slot_bytes, .. } = self.config.scratch;
        let (_, _, length) = read.table.part(read.first_page, read.count);
        let sge = Sge { addr: addr + u64::from(read.slot) * u64::from(slot_bytes), length, lkey };
        let mut bytes = vec![0; length as usize];
        let is_read = status == WcStatus::Success && memory.read(&sge, 0, &mut bytes).is_ok();
        (0..read.count as usize).map(|index| read.table.version(&bytes, index).filter(|_| is_read)).collect()
    }

    /// A WRITE is posted when the versions of all of its pages are known. Those of absent pages are even.
    fn take_learned(&mut self, now: Time, seq: Seq, read: &VersionRead, versions: &[Option<u32>]) {
        let Some(index) = self.index(seq) else { return };
        let entry = &mut self.entries[index];
        entry.posts -= 1;
        let first = entry.pages().start;
        for (page, version) in (read.first_page..).zip(versions) {
            let base = page.checked_sub(first).and_then(|page| entry.bases.get_mut(page as usize));
            if let Some(base @ None) = base {
                *base = version.filter(|version| version % 2 == 1);
            }
        }
        entry.bases_at = entry.bases_at.min(read.at);
        if entry.posts == 0 && entry.state == State::Learning {
            self.post_write(index, now);
        }
    }

    /// A page that had the same odd version before a WRITE and behind it was there in between.
    fn take_checked(&mut self, now: Time, id: u64, read: &VersionRead, versions: &[Option<u32>]) {
        let Some((left, of)) = self.checks.under_way.get_mut(&id) else { return };
        *left -= 1;
        let (is_over, of) = (*left == 0, of.clone());
        for seq in &of {
            let Some(index) = self.index(*seq) else { continue };
            let entry = &self.entries[index];
            let is_of_region =
                entry.paged().is_some_and(|(region, _)| region.description().region_id == read.region_id);
            let is_late = now.0.saturating_sub(entry.bases_at.0) > AGE_NS_MAX;
            let pages = if is_of_region { entry.pages() } else { 0..0 };
            let changed: SmallVec<[usize; 4]> = pages
                .enumerate()
                .filter(|(at, page)| {
                    let version =
                        page.checked_sub(read.first_page).and_then(|page| versions.get(page as usize));
                    let base = entry.bases[*at];
                    version.is_some_and(|version| base.is_some() && (*version != base || is_late))
                })
                .map(|(at, _)| at)
                .collect();
            changed.into_iter().for_each(|page| self.repeat_page(index, page));
        }
        if is_over {
            self.checks.under_way.remove(&id);
            for index in of.iter().filter_map(|seq| self.index(*seq)).collect::<Vec<_>>() {
                self.entries[index].check = Check::None;
            }
        }
    }

    /// Has a page of a WRITE repeated, and that of all later WRITEs to the same bytes of it that have begun: whether those
    /// found the page or not, the repetition of this one overwrites them. None of them has completed, because this one has
    /// not.
    pub(super) fn repeat_page(&mut self, index: usize, page: usize) {
        let number = self.entries[index].pages().start + page as u64;
        if let Some((region, _)) = self.entries[index].paged() {
            self.known.forget(region.description().region_id, number);
        }
        self.entries[index].mark(page);
        self.counters.version_changes += 1;
        let mut repeated: SmallVec<[usize; 8]> = SmallVec::from_slice(&[index]);
        for later in index + 1..self.next_index {
            let entry = &self.entries[later];
            let has_begun = entry.class == Class::Write && matches!(entry.state, State::Active | State::Done);
            let is_chained = |earlier: &usize| self.entries[*earlier].shares_page(entry, number);
            if has_begun && entry.failure.is_none() && repeated.iter().any(is_chained) {
                let at = (number - entry.pages().start) as usize;
                self.counters.chained += u64::from(self.entries[later].mark(at));
                repeated.push(later);
            }
        }
    }

    /// Marks the pages of a READ of which a piece equals the signature page. A NIC looks a page up once for each packet, and
    /// a page may come or go between two packets. So the first bytes of each packet and page are compared.
    pub(super) fn inspect(
        &mut self,
        index: usize,
        range: &Range<u64>,
        memory: &impl LocalMemory,
    ) -> Result<(), LocalError> {
        let entry = &mut self.entries[index];
        let Some((region, va)) = entry.paged() else { return Ok(()) };
        let region = region.clone();
        let (mtu_bytes, mut at) = (u64::from(self.config.mtu_bytes), range.start);
        while at < range.end {
            let page_offset = region.layout().page_offset(va + at);
            let to_next_page = (PAGE_BYTES - page_offset) as u64;
            let to_next_packet = mtu_bytes - (at - range.start) % mtu_bytes;
            let len = to_next_page.min(to_next_packet).min(range.end - at);
            let mut chunk = [0; CHUNK_BYTES];
            let chunk = &mut chunk[..CHUNK_BYTES.min(len as usize)];
            gather(memory, entry.sges(), at, chunk)?;
            if chunk == &region.signature_page().bytes()[page_offset..][..chunk.len()] {
                let first = region.layout().grid(va) / PAGE_BYTES as u64;
                let page = region.layout().grid(va + at) / PAGE_BYTES as u64 - first;
                self.counters.signatures += u64::from(entry.mark(page as usize));
            }
            at += len;
        }
        Ok(())
    }
}
