//! Memory of which each page of 4 KiB is present or absent. What is absent is overwritten, so that an access to it that
//! should not be is found out.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager, PeerTables, Transfer, Translation, Waker};
use terrace_sync::Mutex;

use crate::cells;

pub(super) const PAGE: usize = 4096;

/// The byte that overwrites absent pages, and memory that is lent no more.
pub(super) const SPOILED: u8 = 0xdb;

/// A page table, the memory, and the bytes of the absent pages.
pub(super) struct Pages {
    pub cells: Arc<[AtomicU64]>,
    present: Box<[AtomicBool]>,
    /// Odd while the page is present.
    pub versions: Box<[AtomicU32]>,
    store: Mutex<Vec<u8>>,
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").field("present", &self.present).finish_non_exhaustive()
    }
}

impl Pages {
    /// Memory with this content, all of it absent.
    pub fn new(content: &[u8]) -> Pages {
        let spoiled = u64::from_ne_bytes([SPOILED; 8]);
        let page_count = content.len() / PAGE;
        Pages {
            cells: (0..content.len() / 8).map(|_| AtomicU64::new(spoiled)).collect(),
            present: (0..page_count).map(|_| AtomicBool::new(false)).collect(),
            versions: (0..page_count).map(|_| AtomicU32::new(0)).collect(),
            store: Mutex::new(content.to_vec()),
        }
    }

    pub fn page_count(&self) -> usize {
        self.present.len()
    }

    pub fn addr(&self) -> u64 {
        self.cells.as_ptr() as u64
    }

    pub fn is_page_present(&self, page: usize) -> bool {
        self.present[page].load(Ordering::Relaxed)
    }

    /// Brings a page: maps it, then makes its version odd.
    pub fn admit(&self, page: usize) {
        if self.is_page_present(page) {
            return;
        }
        let at = page * PAGE;
        cells::store(&self.cells, at, &self.store.lock()[at..at + PAGE]);
        self.present[page].store(true, Ordering::Relaxed);
        self.versions[page].fetch_add(1, Ordering::Relaxed);
    }

    /// Takes a page away: makes its version even, then unmaps it.
    pub fn expel(&self, page: usize) {
        if !self.is_page_present(page) {
            return;
        }
        let at = page * PAGE;
        self.versions[page].fetch_add(1, Ordering::Relaxed);
        self.present[page].store(false, Ordering::Relaxed);
        cells::load(&self.cells, at, &mut self.store.lock()[at..at + PAGE]);
        cells::store(&self.cells, at, &[SPOILED; PAGE]);
    }

    /// What the program sees, present or not.
    pub fn peek(&self, offset: usize, out: &mut [u8]) {
        let store = self.store.lock();
        for (at, byte) in (offset..).zip(out) {
            *byte = store[at];
            if self.is_page_present(at / PAGE) {
                cells::load(&self.cells, at, std::slice::from_mut(byte));
            }
        }
    }

    /// Stores as the program does, present or not.
    pub fn poke(&self, offset: usize, data: &[u8]) {
        let mut store = self.store.lock();
        for (at, byte) in (offset..).zip(data) {
            store[at] = *byte;
            if self.is_page_present(at / PAGE) {
                cells::store(&self.cells, at, std::slice::from_ref(byte));
            }
        }
    }

    fn offset(&self, addr: u64) -> usize {
        (addr - self.addr()) as usize
    }
}

impl Translation for Pages {
    fn range(&self) -> HostRange {
        HostRange { addr: self.addr(), len: self.cells.len() as u64 * 8 }
    }

    fn unit_bytes(&self) -> u64 {
        PAGE as u64
    }

    fn is_present(&self, part: HostRange) -> bool {
        let start = self.offset(part.addr);
        part.len == 0
            || (start / PAGE..=(start + part.len as usize - 1) / PAGE).all(|page| self.is_page_present(page))
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        self.is_present(part).then(|| {
            cells::load(&self.cells, self.offset(part.addr), out);
            Ok(())
        })
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        self.is_present(HostRange { addr, len: data.len() as u64 }).then(|| {
            cells::store(&self.cells, self.offset(addr), data);
            Ok(())
        })
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        let cell = &self.cells[self.offset(addr) / 8];
        self.is_present(HostRange { addr, len: 8 }).then(|| Ok(apply(cell, op)))
    }

    fn count(&self, _part: HostRange, _is_hit: bool) {}

    fn bitmap(&self) -> &[AtomicU64] {
        &[]
    }

    fn versions(&self) -> HostRange {
        HostRange { addr: self.versions.as_ptr() as u64, len: self.versions.len() as u64 * 4 }
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        None
    }

    fn forget_copies(&self) {}
}

/// Performs an atomic operation on a word that is present.
pub(super) fn apply(cell: &AtomicU64, op: AtomicOp) -> u64 {
    let before = cell.load(Ordering::Relaxed);
    cell.store(op.apply(before), Ordering::Relaxed);
    before
}

/// A commodity NIC never asks a pager.
impl Pager for Pages {
    fn translation(&self) -> &dyn Translation {
        self
    }

    fn read(&self, _range: HostRange, _waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Device)
    }

    fn write(&self, _addr: u64, _data: &[u8], _waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Device)
    }

    fn atomic(&self, _addr: u64, _op: AtomicOp, _waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Device)
    }

    fn flush(&self, _range: HostRange, _waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Device)
    }
}

/// The identity of a hold: the pair, and the token of the request.
pub(super) type HoldId = (usize, u64);

/// Pages that do not leave while requests hold them.
pub(super) struct Holds {
    pub pages: Arc<Pages>,
    counts: Vec<u32>,
    held: BTreeMap<HoldId, Vec<usize>>,
    /// Holds whose pages are being brought, and when they are all there.
    arriving: Vec<(u64, HoldId)>,
}

impl Holds {
    pub fn new(pages: Arc<Pages>) -> Holds {
        Holds { counts: vec![0; pages.page_count()], pages, held: BTreeMap::new(), arriving: Vec::new() }
    }

    /// Holds the pages of byte ranges. True if all of them are present; else they are at `due`.
    pub fn hold(&mut self, id: HoldId, ranges: impl Iterator<Item = Range<usize>>, due: u64) -> bool {
        let pages: Vec<usize> = ranges
            .filter(|range| !range.is_empty())
            .flat_map(|range| range.start / PAGE..range.end.div_ceil(PAGE))
            .collect();
        pages.iter().for_each(|page| self.counts[*page] += 1);
        let is_present = pages.iter().all(|page| self.pages.is_page_present(*page));
        assert!(self.held.insert(id, pages).is_none(), "{id:?} is held once");
        if !is_present {
            self.arriving.push((due, id));
        }
        is_present
    }

    pub fn release(&mut self, id: HoldId) {
        let pages = self.held.remove(&id).expect("what is released was held");
        pages.iter().for_each(|page| self.counts[*page] -= 1);
        self.arriving.retain(|(_, other)| *other != id);
    }

    /// Brings the pages that are due. Returns their holds.
    pub fn arrive(&mut self, now: u64) -> Vec<HoldId> {
        let due: Vec<HoldId> = self.arriving.extract_if(.., |(at, _)| *at <= now).map(|(_, id)| id).collect();
        for id in &due {
            self.held[id].iter().for_each(|page| self.pages.admit(*page));
        }
        due
    }

    pub fn next_arrival(&self) -> Option<u64> {
        self.arriving.iter().map(|(at, _)| *at).min()
    }

    /// Has a page come or go, unless it is held.
    pub fn churn(&self, page: usize) -> bool {
        match (self.pages.is_page_present(page), self.counts[page]) {
            (false, _) => self.pages.admit(page),
            (true, 0) => self.pages.expel(page),
            (true, _) => return false,
        }
        true
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}
