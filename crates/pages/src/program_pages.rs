//! Pages that the program itself swaps (NP-RDMA, section 6.2): it tells of each that leaves and comes, and is asked for
//! those that peers need.
//!
//! ```text
//!            the program brings it, then swap_in: parts that wait are carried out, the version becomes odd
//!   absent ----------------------------------------------------------------------------------------------> present
//!      ^                                                                                                      |
//!      +------- swap_out: the version becomes even, copies under way end; then the program takes it away -----+
//! ```

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use terrace_hostmem::fault::Fault;
use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, Pager, PeerTables, Transfer, Translation, Waker};
use terrace_sync::{Mutex, RwLock, RwLockReadGuard};

use crate::access::{Access, Kind, Part, Piece, Task, pieces};
use crate::ended::Ended;
use crate::stats::{RegionCounters, add};
use crate::sys;

/// The longest access, in bytes: a peer cannot have more memory taken for one.
const ACCESS_BYTES_MAX: u64 = crate::TRANSFER_BYTES_MAX;
/// The most bytes of a region that peers can have pinned: the program brings them, and cannot take them away.
const PINNED_BYTES_MAX: u64 = 64 << 20;
/// The most parts of accesses that wait for pages.
const PARTS_MAX: usize = 4096;
/// The most wakers of accesses for which there was no room.
const REJECTED_MAX: usize = 1024;

/// Has the program bring pages: called with each run of absent ones, from any thread, without locks of the pages' state. The
/// program tells by [`ProgramPages::swap_in`] when they are there, and may do so before it returns. It must not call
/// [`ProgramPages::close`], which waits for it.
pub type BringPages = Box<dyn Fn(HostRange) + Send + Sync>;

/// Memory whose pages the program swaps.
pub struct ProgramPages {
    range: HostRange,
    /// Of each page: odd while it is present.
    versions: Box<[AtomicU32]>,
    /// Locked for reading by a copy that has seen its pages present; for writing between a page's last copy and its
    /// leaving.
    copies: RwLock<()>,
    state: Mutex<State>,
    counters: Arc<RegionCounters>,
    bring: BringPages,
    /// Locked for reading while the program is called; for writing when the region closes.
    calls: RwLock<()>,
}

#[derive(Default)]
struct State {
    /// Parts that wait for each page, in the order of the requests.
    waiting: HashMap<u64, Vec<Part>>,
    part_count: usize,
    /// The region is no more.
    is_closed: bool,
    /// The wakers of accesses for whose parts there was no room.
    rejected: Vec<Waker>,
    /// Pages that must not leave, and how often each is pinned.
    pins: HashMap<u64, u32>,
}

impl State {
    /// Keeps the waker of an access for which there is no room. Returns wakers to call at once: all others if they are too
    /// many. Those of accesses that have ended are gone then, and the rest come back.
    fn reject(&mut self, waker: &Waker) -> Vec<Waker> {
        if self.rejected.iter().any(|known| Arc::ptr_eq(known, waker)) {
            return Vec::new();
        }
        let is_full = self.rejected.len() >= REJECTED_MAX;
        let others = if is_full { std::mem::take(&mut self.rejected) } else { Vec::new() };
        self.rejected.push(waker.clone());
        others
    }
}

impl fmt::Debug for ProgramPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgramPages").field("range", &self.range).finish_non_exhaustive()
    }
}

impl ProgramPages {
    /// Memory at a range that begins and ends at a page, all of it present.
    ///
    /// # Errors
    /// `OutOfRange` for an empty range, or one that begins or ends within a page.
    pub fn new(range: HostRange, bring: BringPages) -> Result<ProgramPages, AccessError> {
        let is_whole = range.len > 0 && (range.addr | range.len).is_multiple_of(PAGE_BYTES);
        if !is_whole || range.addr.checked_add(range.len).is_none() {
            return Err(AccessError::OutOfRange);
        }
        Ok(ProgramPages {
            range,
            versions: (0..range.len / PAGE_BYTES).map(|_| AtomicU32::new(1)).collect(),
            copies: RwLock::new(()),
            state: Mutex::default(),
            counters: Arc::default(),
            bring,
            calls: RwLock::new(()),
        })
    }

    /// The pages of a range that begins and ends at a page.
    ///
    /// # Errors
    /// `OutOfRange` for another range.
    fn pages(&self, range: HostRange) -> Result<Range<u64>, AccessError> {
        let is_whole = (range.addr | range.len).is_multiple_of(PAGE_BYTES);
        if !is_whole || !self.range.covers(range) {
            return Err(AccessError::OutOfRange);
        }
        let first = (range.addr - self.range.addr) / PAGE_BYTES;
        Ok(first..first + range.len / PAGE_BYTES)
    }

    /// The program is about to take these pages away. When this returns, no copy of the NIC touches them, and peers find
    /// them absent.
    ///
    /// # Errors
    /// `OutOfRange` for a range that is not of whole pages within the region; `NotReady` while one of them is in use for a
    /// peer: nothing has changed then.
    pub fn swap_out(&self, range: HostRange) -> Result<(), AccessError> {
        let pages = self.pages(range)?;
        let state = self.state.lock();
        if !state.pins.is_empty() && pages.clone().any(|page| state.pins.contains_key(&page)) {
            return Err(AccessError::NotReady);
        }
        let mut count = 0;
        for page in pages {
            let version = &self.versions[page as usize];
            if version.load(Ordering::Relaxed) % 2 == 1 {
                version.fetch_add(1, Ordering::AcqRel);
                count += 1;
            }
        }
        add(&self.counters.evictions, count);
        drop(state);
        // Copies that have seen them present end.
        drop(self.copies.write());
        Ok(())
    }

    /// The program has brought these pages. When this returns, peers find them present, and what has waited for them is
    /// carried out.
    ///
    /// # Errors
    /// `OutOfRange` for a range that is not of whole pages within the region.
    pub fn swap_in(&self, range: HostRange) -> Result<(), AccessError> {
        let pages = self.pages(range)?;
        let mut ended = Ended::default();
        let mut state = self.state.lock();
        for page in pages {
            let parts = state.waiting.remove(&page).unwrap_or_default();
            state.part_count -= parts.len();
            for part in parts {
                let result = self.carry_out(page, &part);
                ended.end_part(&part, result);
            }
            let version = &self.versions[page as usize];
            if version.load(Ordering::Relaxed).is_multiple_of(2) {
                version.fetch_add(1, Ordering::AcqRel);
                add(&self.counters.pages_read, 1);
            }
        }
        let rejected = std::mem::take(&mut state.rejected);
        drop(state);
        ended.tell();
        rejected.iter().for_each(|waker| waker());
        Ok(())
    }

    /// The region has been deregistered: fails the accesses that wait, and all later ones. When this returns, the program is
    /// not called any more.
    pub fn close(&self) {
        let mut ended = Ended::default();
        let mut state = self.state.lock();
        state.is_closed = true;
        state.part_count = 0;
        for part in std::mem::take(&mut state.waiting).into_values().flatten() {
            ended.end_part(&part, Err(AccessError::Fault));
        }
        let rejected = std::mem::take(&mut state.rejected);
        drop(state);
        ended.tell();
        rejected.iter().for_each(|waker| waker());
        // Calls of the program that have seen the region open end.
        drop(self.calls.write());
    }

    /// Calls the program for runs of absent pages, unless the region has been closed.
    fn ask_for(&self, absent: Vec<Range<u64>>) {
        if absent.is_empty() {
            return;
        }
        let _call = self.calls.read();
        for pages in absent {
            if self.state.lock().is_closed {
                return;
            }
            let addr = self.range.addr + pages.start * PAGE_BYTES;
            (self.bring)(HostRange { addr, len: (pages.end - pages.start) * PAGE_BYTES });
        }
    }

    fn carry_out(&self, page: u64, part: &Part) -> Result<(), AccessError> {
        part.carry_out_in_program(self.range.addr + page * PAGE_BYTES).map_err(|Fault| AccessError::Fault)
    }

    fn is_page_present(&self, page: u64) -> bool {
        self.versions[page as usize].load(Ordering::Acquire) % 2 == 1
    }

    /// Keeps all pages of a range for a copy; `None` when one is absent.
    fn hold(&self, part: HostRange) -> Option<RwLockReadGuard<'_, ()>> {
        // First: what is present under the lock stays so.
        let held = self.copies.read();
        pieces(self.range.addr, part).all(|piece| self.is_page_present(piece.page)).then_some(held)
    }

    fn begin(
        &self,
        kind: Kind,
        range: HostRange,
        waker: &Waker,
        task_of: impl Fn(&Piece) -> Task,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        if range.len > ACCESS_BYTES_MAX || !self.range.covers(range) {
            return Err(AccessError::OutOfRange);
        }
        let mut state = self.state.lock();
        if state.is_closed {
            return Err(AccessError::Fault);
        }
        if state.part_count > PARTS_MAX {
            let others = state.reject(waker);
            drop(state);
            others.iter().for_each(|waker| waker());
            return Err(AccessError::NotReady);
        }
        let access = Access::new(kind, range.len as usize, &self.counters, waker, None);
        let (mut ended, mut absent) = (Ended::default(), Vec::<Range<u64>>::new());
        for piece in pieces(self.range.addr, range) {
            access.add_part();
            let part = Part { access: access.clone(), offset: piece.offset, task: task_of(&piece) };
            if self.is_page_present(piece.page) {
                let result = self.carry_out(piece.page, &part);
                ended.end_part(&part, result);
                continue;
            }
            match absent.last_mut().filter(|run| run.end == piece.page) {
                Some(run) => run.end += 1,
                None => absent.push(piece.page..piece.page + 1),
            }
            state.waiting.entry(piece.page).or_default().push(part);
            state.part_count += 1;
        }
        ended.end_access_part(&access, Ok(()));
        drop(state);
        ended.tell();
        self.ask_for(absent);
        Ok(access)
    }
}

impl Translation for ProgramPages {
    fn range(&self) -> HostRange {
        self.range
    }

    fn unit_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn is_present(&self, part: HostRange) -> bool {
        pieces(self.range.addr, part).all(|piece| self.is_page_present(piece.page))
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        let _held = self.hold(part)?;
        Some(sys::copy_out(part.addr, out).map_err(|Fault| AccessError::Fault))
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        let _held = self.hold(HostRange { addr, len: data.len() as u64 })?;
        Some(sys::copy_in(addr, data).map_err(|Fault| AccessError::Fault))
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        let _held = self.hold(HostRange { addr, len: 8 })?;
        Some(sys::atomic(addr, op).map_err(|Fault| AccessError::Fault))
    }

    fn count(&self, _part: HostRange, is_hit: bool) {
        add(if is_hit { &self.counters.hits } else { &self.counters.misses }, 1);
    }

    /// Empty: only regions that a server exports are read by clients.
    fn bitmap(&self) -> &[AtomicU64] {
        &[]
    }

    fn versions(&self) -> HostRange {
        HostRange { addr: self.versions.as_ptr() as u64, len: size_of_val(&*self.versions) as u64 }
    }

    /// The memory is the program's: other processes cannot know when it leaves.
    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        None
    }

    fn forget_copies(&self) {}
}

impl Pager for ProgramPages {
    fn translation(&self) -> &dyn Translation {
        self
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.begin(Kind::Read, range, waker, |piece| Task::Read(piece.base..piece.base + piece.len))
    }

    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        let range = HostRange { addr, len: data.len() as u64 };
        self.begin(Kind::Write, range, waker, |piece| {
            Task::Write(data[piece.base..piece.base + piece.len].into())
        })
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !addr.is_multiple_of(8) {
            return Err(AccessError::Misaligned);
        }
        self.begin(Kind::Atomic, HostRange { addr, len: 8 }, waker, |_| Task::Atomic(op))
    }

    /// The memory is volatile: what is written is where the program keeps it.
    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.begin(Kind::Write, HostRange { len: 0, ..range }, waker, |_| Task::Barrier)
    }

    fn pin(&self, range: HostRange) -> bool {
        if !self.range.covers(range) {
            return false;
        }
        let mut state = self.state.lock();
        let pinned_bytes = state.pins.len() as u64 * PAGE_BYTES;
        if range.len.saturating_add(pinned_bytes) > PINNED_BYTES_MAX {
            return false;
        }
        for piece in pieces(self.range.addr, range) {
            *state.pins.entry(piece.page).or_default() += 1;
        }
        true
    }

    fn pin_bytes_max(&self) -> u64 {
        PINNED_BYTES_MAX
    }

    fn unpin(&self, range: HostRange) {
        let mut state = self.state.lock();
        for piece in pieces(self.range.addr, range) {
            if let Some(count) = state.pins.get_mut(&piece.page) {
                *count -= 1;
                if *count == 0 {
                    state.pins.remove(&piece.page);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranges that the program was asked for.
    type Asked = Arc<Mutex<Vec<HostRange>>>;

    /// Four pages of memory, and what was asked for.
    fn pages() -> (Box<[u64]>, Arc<ProgramPages>, Asked) {
        terrace_hostmem::fault::install().expect("handlers");
        let memory = vec![0_u64; 5 * 512].into_boxed_slice();
        let addr = (memory.as_ptr() as u64).next_multiple_of(PAGE_BYTES);
        let asked = Asked::default();
        let list = asked.clone();
        let bring: BringPages = Box::new(move |range| list.lock().push(range));
        let pages = ProgramPages::new(HostRange { addr, len: 4 * PAGE_BYTES }, bring).expect("whole pages");
        (memory, Arc::new(pages), asked)
    }

    fn nobody() -> Waker {
        Arc::new(|| {})
    }

    fn page(pages: &ProgramPages, index: u64) -> HostRange {
        HostRange { addr: pages.range.addr + index * PAGE_BYTES, len: PAGE_BYTES }
    }

    #[test]
    fn what_waits_for_a_page_is_carried_out_in_order_when_the_program_brings_it() {
        let (_memory, pages, asked) = pages();
        let (one, two) = (page(&pages, 1), page(&pages, 2));
        assert!(
            Pager::read(&*pages, one, &nobody()).unwrap().outcome().is_some(),
            "present pages are read at once"
        );
        pages.swap_out(HostRange { len: 2 * PAGE_BYTES, ..one }).unwrap();
        assert!(
            Translation::write(&*pages, one.addr, &[1]).is_none(),
            "the NIC does not write to absent pages"
        );
        let across = HostRange { addr: two.addr - 4, len: 8 };
        let written = Pager::write(&*pages, across.addr, &[7; 8], &nobody()).unwrap();
        let read = Pager::read(&*pages, across, &nobody()).unwrap();
        assert_eq!(*asked.lock(), [HostRange { len: 2 * PAGE_BYTES, ..one }; 2]);
        pages.swap_in(two).unwrap();
        assert!(written.outcome().is_none() && read.outcome().is_none());
        pages.swap_in(one).unwrap();
        assert_eq!((written.outcome(), read.outcome()), (Some(Ok(())), Some(Ok(()))));
        let mut out = [0; 8];
        read.read(0, &mut out).unwrap();
        assert_eq!(out, [7; 8]);
        assert!(pages.is_present(pages.range));
    }

    #[test]
    fn when_an_access_has_ended_its_page_is_present() {
        let (_memory, pages, _) = pages();
        let one = page(&pages, 1);
        pages.swap_out(one).unwrap();
        let first = Pager::read(&*pages, one, &nobody()).unwrap();
        // They take some milliseconds, between the first one and the change of the version.
        let _others: Vec<_> = (1..PARTS_MAX).map(|_| Pager::read(&*pages, one, &nobody()).unwrap()).collect();
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| {
                while first.outcome().is_none() {
                    std::hint::spin_loop();
                }
                pages.is_present(one)
            });
            pages.swap_in(one).unwrap();
            assert!(ended.join().unwrap(), "NP-RDMA's target copies then");
        });
    }

    #[test]
    fn a_cancelled_change_is_not_carried_out() {
        let (_memory, pages, _) = pages();
        let one = page(&pages, 1);
        pages.swap_out(one).unwrap();
        let write = Pager::write(&*pages, one.addr, &[7; 8], &nobody()).unwrap();
        let add = Pager::atomic(&*pages, one.addr, AtomicOp::FetchAdd { add: 1 }, &nobody()).unwrap();
        let kept = Pager::atomic(&*pages, one.addr, AtomicOp::FetchAdd { add: 2 }, &nobody()).unwrap();
        write.cancel();
        add.cancel();
        pages.swap_in(one).unwrap();
        let outcomes = [write, add, kept].map(|change| change.outcome());
        assert_eq!(outcomes, [Some(Err(AccessError::Fault)), Some(Err(AccessError::Fault)), Some(Ok(()))]);
        let mut word = [0; 8];
        Translation::read(&*pages, HostRange { len: 8, ..one }, &mut word).unwrap().unwrap();
        assert_eq!(u64::from_ne_bytes(word), 2);
    }

    #[test]
    fn only_absent_pages_are_asked_for_and_none_of_a_closed_region() {
        let (_memory, pages, asked) = pages();
        pages.swap_out(pages.range).unwrap();
        pages.swap_in(page(&pages, 1)).unwrap();
        let read = Pager::read(&*pages, pages.range, &nobody()).unwrap();
        let behind = HostRange { len: 2 * PAGE_BYTES, ..page(&pages, 2) };
        assert_eq!(*asked.lock(), [page(&pages, 0), behind]);
        pages.close();
        assert_eq!(read.outcome(), Some(Err(AccessError::Fault)));
        assert!(Pager::read(&*pages, pages.range, &nobody()).is_err());
        assert_eq!(asked.lock().len(), 2);
    }

    #[test]
    fn versions_follow_and_repeated_calls_change_nothing() {
        let (_memory, pages, _) = pages();
        let version = || pages.versions[3].load(Ordering::Relaxed);
        for _ in 0..2 {
            pages.swap_out(page(&pages, 3)).unwrap();
            assert_eq!(version(), 2);
        }
        for _ in 0..2 {
            pages.swap_in(page(&pages, 3)).unwrap();
            assert_eq!(version(), 3);
        }
        let odd = HostRange { addr: pages.range.addr + 1, len: PAGE_BYTES };
        assert_eq!(pages.swap_out(odd), Err(AccessError::OutOfRange));
        assert_eq!(pages.swap_in(page(&pages, 4)), Err(AccessError::OutOfRange));
    }

    #[test]
    fn the_wakers_of_rejected_accesses_are_kept_once_and_not_without_bound() {
        let mut state = State::default();
        let first = nobody();
        for _ in 0..2 {
            assert!(state.reject(&first).is_empty());
        }
        assert_eq!(state.rejected.len(), 1);
        let told: usize = (0..REJECTED_MAX).map(|_| state.reject(&nobody()).len()).sum();
        assert_eq!((told, state.rejected.len()), (REJECTED_MAX, 1));
    }

    #[test]
    fn a_peer_pins_no_more_than_the_limit() {
        let all = HostRange { addr: 1 << 40, len: 2 * PINNED_BYTES_MAX };
        let pages = ProgramPages::new(all, Box::new(|_| {})).expect("whole pages");
        assert!(!pages.pin(all));
        assert!(pages.state.lock().pins.is_empty(), "no pin is left behind");
        let half = HostRange { len: PINNED_BYTES_MAX, ..all };
        let page = HostRange { addr: all.addr + PINNED_BYTES_MAX, len: PAGE_BYTES };
        assert!(pages.pin(half) && !pages.pin(page));
        pages.unpin(half);
        assert!(pages.pin(page));
    }

    #[test]
    fn pinned_pages_do_not_leave() {
        let (_memory, pages, _) = pages();
        let part = HostRange { addr: page(&pages, 1).addr + 5, len: 1 };
        assert!(pages.pin(part) && pages.pin(part));
        pages.unpin(part);
        assert_eq!(pages.swap_out(pages.range), Err(AccessError::NotReady));
        assert!(pages.is_present(pages.range));
        pages.unpin(part);
        assert_eq!(pages.swap_out(pages.range), Ok(()));
        assert!(!pages.is_present(part));
    }
}
