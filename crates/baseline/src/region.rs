//! A region: its file, its mapping and its counters.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::Advice;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, Presence};
use terrace_pages::RegionStats;

use crate::config::IoMethod;
use crate::file::Ways;
use crate::pending::{Pending, Task};
use crate::regions::RegionId;
use crate::stats::RegionCounters;
use crate::sys;

/// The constants and counters of a region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) id: RegionId,
    pub(crate) presence: Presence,
    pub(crate) ways: Ways,
    pub(crate) file_offset: u64,
    pub(crate) writable: bool,
    pub(crate) method: IoMethod,
    /// Direct access was tried and refused.
    direct_refused: AtomicBool,
    /// A write-back has failed. The kernel reports that once per open file description, and marks the pages clean: it may
    /// drop them, and the next sync succeeds. Since then each FLUSH fails.
    has_lost: AtomicBool,
    pub(crate) counters: RegionCounters,
}

impl Region {
    pub(crate) fn new(
        id: RegionId,
        map: HostRange,
        ways: Ways,
        (file_offset, writable): (u64, bool),
        method: IoMethod,
    ) -> Region {
        Region {
            id,
            presence: Presence::new(map),
            ways,
            file_offset,
            writable,
            method,
            direct_refused: AtomicBool::new(false),
            has_lost: AtomicBool::new(false),
            counters: RegionCounters::default(),
        }
    }

    pub(crate) fn direct_works(&self) -> bool {
        self.ways.direct.is_some() && !self.direct_refused.load(Ordering::Relaxed)
    }

    pub(crate) fn give_up_direct(&self) {
        self.direct_refused.store(true, Ordering::Relaxed);
    }

    /// Whether pages could not be written back.
    pub(crate) fn has_lost(&self) -> bool {
        self.has_lost.load(Ordering::Acquire)
    }

    /// Records that a part of the region could not be written back.
    pub(crate) fn note_loss(&self, error: &dyn std::fmt::Display) {
        self.counters.write_backs_failed.fetch_add(1, Ordering::Relaxed);
        if !self.has_lost.swap(true, Ordering::AcqRel) {
            tracing::error!(%error, "a part of a region's file could not be written: no FLUSH succeeds any more");
        }
    }

    /// Whether to log another failed access: the first, the second, the fourth and so on, because a peer determines how
    /// many there are.
    pub(crate) fn may_complain(&self) -> bool {
        (self.counters.errors.load(Ordering::Relaxed) + 1).is_power_of_two()
    }

    /// Locks all of it into memory. From then on, the NIC accesses it by itself.
    ///
    /// # Errors
    /// When it cannot be read or locked.
    pub(crate) fn pin(&self) -> io::Result<()> {
        sys::lock(self.presence.range())?;
        (0..self.presence.unit_count()).for_each(|unit| self.presence.admit(unit));
        Ok(())
    }

    /// Unlocks it, after its last access. Other processes have lost access to it before.
    pub(crate) fn unpin(&self) {
        let present = (0..self.presence.unit_count()).filter(|&unit| self.presence.is_present(unit));
        present.for_each(|unit| drop(self.presence.expel(unit)));
        // Fails if the program has unmapped it: nothing is locked then.
        let _ = sys::unlock(self.presence.range());
        let _ = sys::expect_nothing(self.presence.range());
    }

    /// Removes pages from the process's page table and, once written back, from the page cache.
    pub(crate) fn drop_from_memory(&self, range: HostRange, written_back: io::Result<()>) {
        // Fails if the mapping is gone; then its pages are unmapped, too.
        let _ = sys::unmap_pages(range);
        let offset = self.file_offset + (range.addr - self.presence.range().addr);
        let file = self.ways.buffered.as_fd();
        if let Err(error) = written_back.and_then(|()| sys::write_back(file, offset, range.len)) {
            return self.note_loss(&error);
        }
        if !self.ways.is_memory {
            // Advisory: pages in use stay.
            let len = std::num::NonZero::new(range.len.next_multiple_of(PAGE_BYTES));
            let _ = rustix::fs::fadvise(file, offset, len, Advice::DontNeed);
        }
    }

    /// Counts an ended access.
    pub(crate) fn count(&self, access: &Pending, result: Result<(), AccessError>) {
        let counters = &self.counters;
        let add = |counter: &std::sync::atomic::AtomicU64, count: usize| {
            counter.fetch_add(count as u64, Ordering::Relaxed);
        };
        if result.is_err() {
            add(&counters.errors, 1);
        }
        match access.task {
            Task::Flush { .. } => return add(&counters.flushes, 1),
            Task::Read => add(&counters.bytes_read, access.len),
            Task::Write | Task::Atomic(_) => add(&counters.bytes_written, access.len),
        }
        if self.method == IoMethod::Pinned {
            return add(&counters.hits, 1);
        }
        add(&counters.misses, 1);
        counters.latency.add(access.caller.since.elapsed());
    }

    /// Statistics so far.
    pub(crate) fn stats(&self) -> RegionStats {
        let units = 0..self.presence.unit_count();
        // What the NIC has accessed by itself since the last call.
        let hits: u64 = units.map(|unit| u64::from(self.presence.take_counts(unit).hits)).sum();
        self.counters.hits.fetch_add(hits, Ordering::Relaxed);
        let range = self.presence.range();
        let resident_bytes = if self.method == IoMethod::Pinned { range.len } else { 0 };
        RegionStats { addr: range.addr, len_bytes: range.len, resident_bytes, ..self.counters.read() }
    }
}
