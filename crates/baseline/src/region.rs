//! A region: its file, its mapping and its counters.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::Advice;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, Translation, WholeRange};
use terrace_pages::RegionStats;

use crate::config::IoMethod;
use crate::file::FileHandles;
use crate::pending::{Pending, Task};
use crate::regions::RegionId;
use crate::stats::RegionCounters;
use crate::sys;

/// The constants and counters of a region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) id: RegionId,
    pub(crate) translation: WholeRange,
    pub(crate) files: FileHandles,
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
        files: FileHandles,
        (file_offset, writable): (u64, bool),
        method: IoMethod,
    ) -> Region {
        Region {
            id,
            translation: WholeRange::absent(map),
            files,
            file_offset,
            writable,
            method,
            direct_refused: AtomicBool::new(false),
            has_lost: AtomicBool::new(false),
            counters: RegionCounters::default(),
        }
    }

    /// The addresses of its bytes.
    pub(crate) fn range(&self) -> HostRange {
        self.translation.range()
    }

    pub(crate) fn direct_works(&self) -> bool {
        self.files.direct.is_some() && !self.direct_refused.load(Ordering::Relaxed)
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
        sys::lock(self.range())?;
        self.translation.make_present();
        Ok(())
    }

    /// Unlocks it, after its last access. Other processes have lost access to it before.
    pub(crate) fn unpin(&self) {
        // Fails if the program has unmapped it: nothing is locked then.
        let _ = sys::unlock(self.range());
        let _ = sys::expect_nothing(self.range());
    }

    /// Removes pages from the process's page table and, once written back, from the page cache.
    pub(crate) fn drop_from_memory(&self, range: HostRange, written_back: io::Result<()>) {
        // Fails if the mapping is gone; then its pages are unmapped, too.
        let _ = sys::unmap_pages(range);
        let offset = self.file_offset + (range.addr - self.range().addr);
        let file = self.files.buffered.as_fd();
        if let Err(error) = written_back.and_then(|()| sys::write_back(file, offset, range.len)) {
            return self.note_loss(&error);
        }
        if !self.files.is_memory {
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
        let range = self.range();
        let resident_bytes = if self.method == IoMethod::Pinned { range.len } else { 0 };
        RegionStats { addr: range.addr, len_bytes: range.len, resident_bytes, ..self.counters.read() }
    }
}
