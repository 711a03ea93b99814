//! A region: its page table, its files and its counters.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_shm::PageState;

use crate::error::PagesError;
use crate::frames::FileIdentity;
use crate::key::PageKey;
use crate::stats::RegionCounters;
use crate::store::{BackingFile, Files};
use crate::sys::Mapping;
use crate::table::PageTable;

/// What the crate knows of a region.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) slot: u8,
    pub(crate) table: PageTable,
    pub(crate) files: Files,
    pub(crate) identity: FileIdentity,
    /// Addresses that nothing is at: they name the region's bytes.
    addresses: Mapping,
    /// A bit for each page, 1 while it is mapped: for clients that read it over RDMA.
    bitmap: Mapping,
    pub(crate) counters: RegionCounters,
    /// The region takes no new accesses.
    pub(crate) is_closing: AtomicBool,
    /// A sync has failed: the next flush writes all pages that are in memory again.
    pub(crate) must_rewrite: AtomicBool,
    /// Write-backs that failed, since the last one that did not.
    failures: AtomicU64,
}

impl Region {
    /// # Errors
    /// `System` when the system has no addresses or descriptors left.
    pub(crate) fn new(slot: u8, identity: FileIdentity, backing: BackingFile) -> Result<Region, PagesError> {
        let page_count = identity.len / PAGE_BYTES;
        let bitmap_bytes = page_count.div_ceil(64) * 8;
        let bitmap = Mapping::of_zeros(bitmap_bytes).map_err(PagesError::system("map a bitmap"))?;
        let addresses = Mapping::reserve(identity.len).map_err(PagesError::system("reserve addresses"))?;
        Ok(Region {
            slot,
            table: PageTable::new(page_count).map_err(PagesError::system("make a page table"))?,
            files: Files::open(backing).map_err(PagesError::system("open a region's file"))?,
            identity,
            bitmap,
            addresses,
            counters: RegionCounters::default(),
            is_closing: AtomicBool::new(false),
            must_rewrite: AtomicBool::new(false),
            failures: AtomicU64::new(0),
        })
    }

    pub(crate) fn range(&self) -> HostRange {
        self.addresses.range()
    }

    /// A bit for each page, 1 while it is mapped.
    pub(crate) fn bitmap(&self) -> &[AtomicU64] {
        self.bitmap.quads(0, (self.bitmap.range().len / 8) as usize)
    }

    /// Changes the state of a page; the caller has its shard locked. See [`PageTable::change`].
    pub(crate) fn change(&self, page: u64, to: PageState, number: u32) {
        self.table.change(page, to, number);
        let (word, bit) = (&self.bitmap()[(page / 64) as usize], 1 << (page % 64));
        let is_set = word.load(Ordering::Relaxed) & bit != 0;
        match (is_set, to.is_mapped()) {
            (false, true) => _ = word.fetch_or(bit, Ordering::Relaxed),
            (true, false) => _ = word.fetch_and(!bit, Ordering::Relaxed),
            _ => {}
        }
    }

    pub(crate) fn key(&self, page: u64) -> PageKey {
        PageKey { slot: self.slot, page }
    }

    /// The addresses of a page, by which readers in other processes name it.
    pub(crate) fn page_range(&self, page: u64) -> HostRange {
        HostRange { addr: self.range().addr + page * PAGE_BYTES, len: PAGE_BYTES }
    }

    /// The offset of a page in the file.
    pub(crate) fn file_offset(&self, page: u64) -> u64 {
        self.identity.offset + page * PAGE_BYTES
    }

    /// Whether to log another failed access: the first, the second, the fourth and so on, because a peer determines how
    /// many there are.
    pub(crate) fn may_complain(&self) -> bool {
        (self.counters.errors.load(Ordering::Relaxed) + 1).is_power_of_two()
    }

    /// Records that a page could not be written back.
    pub(crate) fn note_write_failure(&self, error: &dyn std::fmt::Display) {
        self.counters.write_backs_failed.fetch_add(1, Ordering::Relaxed);
        if self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::error!(
                %error, path = ?self.files.path,
                "pages of a region cannot be written: they stay in memory, and no FLUSH of them succeeds until they are written"
            );
        }
    }

    /// Records that a page was written back.
    pub(crate) fn note_write_success(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 && self.failures.swap(0, Ordering::Relaxed) != 0 {
            tracing::info!(path = ?self.files.path, "pages of a region can be written again");
        }
    }

    /// Whether the last write-back failed.
    pub(crate) fn is_failing(&self) -> bool {
        self.failures.load(Ordering::Relaxed) != 0
    }
}
