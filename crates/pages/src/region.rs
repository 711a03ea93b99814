//! A region: its page table, its files and its counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::io::Errno;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::AccessError;
use terrace_shm::{PageState, PeerHits};

use crate::error::PagesError;
use crate::file_syncs::Syncs;
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
    pub(crate) counters: Arc<RegionCounters>,
    /// Hits that are not in `counters`.
    pub(crate) peer_hits: PeerHits,
    /// The most that `peer_hits` has had.
    peer_hits_max: AtomicU64,
    /// The region takes no new accesses.
    pub(crate) is_closing: AtomicBool,
    pub(crate) syncs: Syncs,
    /// Pages whose last write-back failed.
    unwritable: AtomicU64,
    /// The last failure was for lack of space.
    is_full: AtomicBool,
    /// A failure was logged, and not yet its end.
    is_reported: AtomicBool,
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
            counters: Arc::default(),
            peer_hits: PeerHits::new().map_err(PagesError::system("make counters of hits"))?,
            peer_hits_max: AtomicU64::new(0),
            is_closing: AtomicBool::new(false),
            syncs: Syncs::default(),
            unwritable: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            is_reported: AtomicBool::new(false),
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
            (false, true) => {
                word.fetch_or(bit, Ordering::Relaxed);
                self.counters.resident.fetch_add(1, Ordering::Relaxed);
            }
            (true, false) => {
                word.fetch_and(!bit, Ordering::Relaxed);
                self.counters.resident.fetch_sub(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// Hits that same-host peers have counted. Never fewer than before, as it must be with a counter, although a peer may
    /// have written any number.
    pub(crate) fn count_of_peer_hits(&self) -> u64 {
        let now = self.peer_hits.total();
        self.peer_hits_max.fetch_max(now, Ordering::Relaxed).max(now)
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

    /// The error of an access to a page that is beyond the end of the file, which has become shorter.
    pub(crate) fn too_short(&self, offset: u64) -> AccessError {
        if self.may_complain() {
            tracing::warn!(offset, path = ?self.files.path, "a region's file has become too short");
        }
        AccessError::Fault
    }

    /// Logs that a sync has failed, and that pages are lost by that.
    pub(crate) fn note_pages_lost(&self) {
        tracing::error!(
            path = ?self.files.path,
            "a sync failed, and pages that were written before it have left memory: the file may lack their newest bytes. No \
             FLUSH of the region succeeds until the server is started again"
        );
    }

    /// Records that a write or a sync failed. The first failure is logged, until all pages could be written again.
    pub(crate) fn note_write_failure(&self, error: Errno) {
        self.counters.write_backs_failed.fetch_add(1, Ordering::Relaxed);
        self.is_full.store(matches!(error, Errno::NOSPC | Errno::DQUOT), Ordering::Relaxed);
        if !self.is_reported.swap(true, Ordering::Relaxed) {
            tracing::error!(
                %error, path = ?self.files.path,
                "pages of a region cannot be written: they stay in memory, no FLUSH of them succeeds until they are written, \
                 and no other page of the region can be written to"
            );
        }
    }

    /// Counts a page whose write-back has failed, and succeeded when it was last tried before.
    pub(crate) fn count_unwritable(&self) {
        self.unwritable.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts a page whose write-back has succeeded, or that is gone, and failed when it was last tried before.
    pub(crate) fn count_writable(&self) {
        self.unwritable.fetch_sub(1, Ordering::AcqRel);
        self.note_write_success();
    }

    /// Logs that a failure is over, if it is.
    pub(crate) fn note_write_success(&self) {
        if self.is_reported.load(Ordering::Relaxed)
            && !self.is_failing()
            && self.is_reported.swap(false, Ordering::Relaxed)
        {
            tracing::info!(path = ?self.files.path, "all pages of a region can be written again");
        }
    }

    /// Why no clean page of the region can be written to, if so: earlier writes cannot be written back. Otherwise pages
    /// that cannot leave would fill the memory of all regions.
    pub(crate) fn write_refusal(&self) -> Option<AccessError> {
        (self.unwritable.load(Ordering::Acquire) > 0).then(|| self.write_error())
    }

    /// The error of accesses that cannot be carried out because write-backs fail.
    pub(crate) fn write_error(&self) -> AccessError {
        if self.is_full.load(Ordering::Relaxed) { AccessError::NoSpace } else { AccessError::Device }
    }

    /// Whether the last write-back of a page, or the last sync, failed, or pages are lost.
    pub(crate) fn is_failing(&self) -> bool {
        self.unwritable.load(Ordering::Acquire) > 0 || self.syncs.are_failing()
    }
}
