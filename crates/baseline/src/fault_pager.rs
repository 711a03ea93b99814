//! On-demand paging as a hardware NIC does it: a baseline for comparison, never a default.
//!
//! Such a NIC has page tables of its own. On an access to a page that they lack, it stalls the queue pair and
//! interrupts a processor; an ordinary page fault reads the page, the driver updates the NIC's page table, and the
//! queue pair resumes. When memory is scarce, the kernel removes pages from both tables again. [`FaultPager`] does the
//! same with 4 KiB pages of a region's mapping, within a budget, and evicts the oldest page first. [`FaultModel`] sets
//! the least time of a fault; it includes reading the page, as in hardware.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use terrace_faults::StorageOperation;
use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, Pager, Transfer, Translation, Waker};
use terrace_sync::{Condvar, Mutex};

use crate::baseline_region::BaselineRegion;
use crate::error::BaselineError;
use crate::plan::pages_of;
use crate::pool::TRANSFER_BYTES_MAX;
use crate::sys;
use crate::transfer::{Access, Brought};

/// The duration of faults.
#[derive(Clone, Copy, Debug)]
pub struct FaultModel {
    /// The least time from the interrupt until the queue pair resumes. Faults are handled one after the other.
    pub fault: Duration,
}

impl Default for FaultModel {
    /// The latency that the TeRM paper (FAST'24) is quoted with for an access that takes a page fault of the NIC: 570
    /// µs, against 3.66 µs for one to pinned memory. See `bench/term/README.md`.
    fn default() -> FaultModel {
        FaultModel { fault: Duration::from_micros(570) }
    }
}

/// A region behind a NIC that takes page faults. No page is present for the NIC's own copies. An access to mapped pages
/// completes before the call returns. Any other access queues faults for its missing pages and returns `NotReady`; the
/// waker is called when pages have been mapped.
///
/// The first fault also maps all pages that are in the page cache, as `ibv_advise_mr` would in advance: at a few
/// thousand faults a second, filling memory takes minutes.
///
/// The inner region takes no other accesses. Its statistics count faults as misses.
#[derive(Debug)]
pub struct FaultPager {
    region: Arc<BaselineRegion>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    region: Arc<BaselineRegion>,
    pages: Mutex<Pages>,
    /// Signals a fault to handle, or the stop.
    more: Condvar,
    capacity: usize,
    model: FaultModel,
}

#[derive(Default)]
struct Pages {
    mapped: HashSet<u64>,
    /// Oldest first.
    order: VecDeque<u64>,
    faults: VecDeque<u64>,
    /// Pages in `faults`, and the one being handled.
    faulting: HashSet<u64>,
    waiting: Vec<Waker>,
    stopped: bool,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages")
            .field("mapped", &self.mapped.len())
            .field("faults", &self.faults.len())
            .finish()
    }
}

impl FaultPager {
    /// A pager for a region, with at most `dram_bytes` mapped.
    ///
    /// # Errors
    /// `System` when no thread can be started.
    pub fn new(
        region: Arc<BaselineRegion>,
        model: FaultModel,
        dram_bytes: u64,
    ) -> Result<FaultPager, BaselineError> {
        let capacity = ((dram_bytes / PAGE_BYTES) as usize).max(1);
        let shared =
            Shared { region: region.clone(), pages: Mutex::default(), more: Condvar::new(), capacity, model };
        let shared = Arc::new(shared);
        let builder = std::thread::Builder::new().name("terrace-fault".into());
        let handler = shared.clone();
        let thread = builder
            .spawn(move || handler.handle_faults())
            .map_err(BaselineError::system("start a thread"))?;
        Ok(FaultPager { region, shared, thread: Mutex::new(Some(thread)) })
    }

    /// The inner region.
    pub fn region(&self) -> &Arc<BaselineRegion> {
        &self.region
    }

    /// Stops fault handling, and calls the wakers that wait for a fault. When this returns, only accesses to mapped
    /// pages still use the mapping.
    pub fn stop(&self) {
        let waiting = {
            let mut pages = self.shared.pages.lock();
            pages.stopped = true;
            std::mem::take(&mut pages.waiting)
        };
        self.shared.more.notify_all();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            // If a waker that the thread called held the last reference, the thread itself is here.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
        waiting.iter().for_each(|wake| wake());
    }

    /// Queues faults for the pages of a range that are not mapped.
    ///
    /// # Errors
    /// `OutOfRange`; `NotReady` when a page is not mapped.
    fn demand(&self, range: HostRange, waker: &Waker) -> Result<(), AccessError> {
        if range.len > TRANSFER_BYTES_MAX || !self.translation().covers(range) {
            return Err(AccessError::OutOfRange);
        }
        let mut pages = self.shared.pages.lock();
        let mut missing = false;
        for page in self.pages_of(range) {
            if pages.mapped.contains(&page) {
                continue;
            }
            missing = true;
            if pages.faulting.insert(page) {
                pages.faults.push_back(page);
            }
        }
        if !missing {
            return Ok(());
        }
        if !pages.waiting.iter().any(|known| Arc::ptr_eq(known, waker)) {
            pages.waiting.push(waker.clone());
        }
        self.shared.more.notify_one();
        Err(AccessError::NotReady)
    }

    fn pages_of(&self, range: HostRange) -> Range<u64> {
        if range.len == 0 {
            return 0..0;
        }
        pages_of(range.addr - self.translation().range().addr, range.len as usize)
    }
}

/// Completes an access.
fn ended(access: Access, result: Result<(), AccessError>) -> Arc<dyn Transfer> {
    access.end(result)();
    Arc::new(access)
}

impl Pager for FaultPager {
    fn translation(&self) -> &dyn Translation {
        self.region.translation()
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.demand(range, waker)?;
        let len = range.len as usize;
        let mut buffer = self.region.engine.pool.take(len, waker).ok_or(AccessError::NotReady)?;
        let result = sys::copy_out(range.addr, &mut buffer[..len]).map_err(|_| AccessError::Fault);
        let access = Access::new(len, false, waker);
        access.bring(Brought { buffer, skip: 0 });
        Ok(ended(access, result))
    }

    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.demand(HostRange { addr, len: data.len() as u64 }, waker)?;
        let result = sys::copy_in(addr, data).map_err(|_| AccessError::Fault);
        Ok(ended(Access::new(data.len(), false, waker), result))
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !addr.is_multiple_of(8) {
            return Err(AccessError::Misaligned);
        }
        self.demand(HostRange { addr, len: 8 }, waker)?;
        let access = Access::new(8, true, waker);
        let result = sys::atomic(addr, op).map_err(|_| AccessError::Fault);
        if let Ok(before) = result {
            access.found(before);
        }
        Ok(ended(access, result.map(drop)))
    }

    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.region.flush(range, waker)
    }
}

impl Shared {
    /// The thread's main loop: handles one fault after the other.
    fn handle_faults(&self) {
        let mut is_first = true;
        while let Some(page) = self.next() {
            let begun = Instant::now();
            if std::mem::take(&mut is_first) {
                self.map_what_is_cached();
            }
            let deadline = begun + self.model.fault;
            // If the page is gone, the access itself reports that.
            let _ = sys::copy_out(self.page_range(page).addr, &mut [0]);
            self.make_room();
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            let waiting = {
                let mut pages = self.pages.lock();
                pages.faulting.remove(&page);
                if pages.mapped.insert(page) {
                    pages.order.push_back(page);
                }
                std::mem::take(&mut pages.waiting)
            };
            self.region.region.counters.misses.fetch_add(1, Ordering::Relaxed);
            self.region.region.counters.latency.add(begun.elapsed());
            for waker in waiting {
                waker();
            }
        }
    }

    fn map_what_is_cached(&self) {
        let page_count = self.region.translation().range().len.div_ceil(PAGE_BYTES);
        for first in (0..page_count).step_by(sys::MINCORE_PAGES) {
            let count = (page_count - first).min(sys::MINCORE_PAGES as u64);
            let range = HostRange { len: count * PAGE_BYTES, ..self.page_range(first) };
            let cached = sys::cached(range).into_iter().flatten();
            let mut pages = self.pages.lock();
            for page in (first..).zip(cached).filter_map(|(page, is_cached)| is_cached.then_some(page)) {
                if pages.order.len() < self.capacity && pages.mapped.insert(page) {
                    pages.order.push_back(page);
                }
            }
        }
    }

    fn next(&self) -> Option<u64> {
        let mut pages = self.pages.lock();
        loop {
            if pages.stopped {
                return None;
            }
            if let Some(page) = pages.faults.pop_front() {
                return Some(page);
            }
            self.more.wait(&mut pages);
        }
    }

    /// Unmaps the oldest page if the budget is used up.
    fn make_room(&self) {
        let oldest = {
            let mut pages = self.pages.lock();
            if pages.order.len() < self.capacity {
                return;
            }
            let oldest = pages.order.pop_front();
            oldest.inspect(|oldest| _ = pages.mapped.remove(oldest))
        };
        if let Some(page) = oldest {
            let fate = self.region.engine.suffer(StorageOperation::WriteBack);
            self.region.region.drop_from_memory(self.page_range(page), fate);
        }
    }

    fn page_range(&self, page: u64) -> HostRange {
        HostRange { addr: self.region.translation().range().addr + page * PAGE_BYTES, len: PAGE_BYTES }
    }
}

impl Drop for FaultPager {
    fn drop(&mut self) {
        self.stop();
    }
}
