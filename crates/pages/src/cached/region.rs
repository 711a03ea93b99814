//! A mapping, its file and its page table.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use rustix::fs::{Advice, FileType, SeekFrom};
use rustix::io::Errno;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::AccessError;
use terrace_shm::{PageState, file_system};

use super::kernel::{self, WINDOW_PAGES};
use super::losses::Losses;
use crate::error::PagesError;
use crate::key::PageKey;
use crate::stats::RegionCounters;
use crate::table::PageTable;

/// A shared mapping of a file.
#[derive(Debug)]
pub struct CachedSource {
    /// The file, by a description that nobody else reads from, and open for writing if the mapping is writable. It is
    /// dropped when the region is.
    pub file: Arc<OwnedFd>,
    /// Where in the file the mapping begins: a multiple of the page size.
    pub file_offset: u64,
    /// The mapping, which begins at a page. It stays until the region is removed.
    pub map: HostRange,
    /// Whether it is writable.
    pub is_writable: bool,
    /// Whether the file is a swap file: of memory that was private before. Nobody makes it shorter. The mapping may go away
    /// without notice, and other memory be mapped in its place, by an allocator whose system calls nobody sees.
    pub is_swap_file: bool,
}

/// What the module knows of a region.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) slot: u8,
    pub(super) map: HostRange,
    pub(super) file: Arc<OwnedFd>,
    pub(super) file_offset: u64,
    pub(super) is_writable: bool,
    /// See [`CachedSource::is_swap_file`].
    pub(super) is_swap_file: bool,
    /// The file is in memory, which its pages do not leave.
    pub(super) is_memory: bool,
    /// A regular file, no device: it can become shorter.
    is_file: bool,
    /// The kernel tells which pages are cached: it does so to who may write to the file.
    pub(super) is_scannable: bool,
    pub(super) table: PageTable,
    /// For each [`WINDOW_PAGES`]: present pages, and those that are leaving. The scan reads these numbers and not the
    /// table, whose entries cost memory when they are read.
    window_counts: Box<[AtomicU32]>,
    pub(super) counters: Arc<RegionCounters>,
    pub(super) losses: Losses,
    /// The region takes no new accesses.
    is_closing: AtomicBool,
    /// Threads that use the mapping, apart from those of accesses.
    users: AtomicUsize,
    /// The region is ordinary memory: all of it counts as present.
    pub(super) is_ordinary: AtomicBool,
}

/// Keeps the mapping of a region that is not being removed.
pub(super) struct Use<'a>(&'a Region);

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Region {
    /// # Errors
    /// `System` when a system call fails.
    pub(super) fn new(slot: u8, source: CachedSource) -> Result<Region, PagesError> {
        let CachedSource { file, file_offset, map, is_writable, is_swap_file } = source;
        let status = rustix::fs::fstat(&file).map_err(PagesError::system("identify a mapping's file"))?;
        let is_file = FileType::from_raw_mode(status.st_mode).is_file();
        let is_memory = is_file
            && file_system(file.as_fd())
                .map_err(PagesError::system("identify a file system"))?
                .is_in_memory();
        let table = PageTable::new(map.len.div_ceil(PAGE_BYTES));
        kernel::expect_random(map).map_err(PagesError::system("advise on a mapping"))?;
        // Advisory. Readahead would read pages that are not asked for.
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        let window_counts = map.len.div_ceil(WINDOW_PAGES * PAGE_BYTES);
        let window_counts = (0..window_counts).map(|_| AtomicU32::new(0)).collect();
        let is_owned = status.st_uid == rustix::process::geteuid().as_raw();
        Ok(Region {
            slot,
            map,
            file,
            file_offset,
            is_writable,
            is_swap_file,
            is_memory,
            is_file,
            is_scannable: !is_memory && (is_writable || is_owned),
            table: table.map_err(PagesError::system("make a page table"))?,
            window_counts,
            counters: Arc::default(),
            losses: Losses::default(),
            is_closing: AtomicBool::new(false),
            users: AtomicUsize::new(0),
            is_ordinary: AtomicBool::new(false),
        })
    }

    pub(super) fn key(&self, page: u64) -> PageKey {
        PageKey { slot: self.slot, page }
    }

    /// The addresses of adjacent pages.
    pub(super) fn range_of(&self, first: u64, count: u64) -> HostRange {
        let offset = first * PAGE_BYTES;
        let len = (count * PAGE_BYTES).min(self.map.len - offset);
        HostRange { addr: self.map.addr + offset, len }
    }

    /// The offset of a page in the file.
    pub(super) fn offset_of(&self, page: u64) -> u64 {
        self.file_offset + page * PAGE_BYTES
    }

    /// Whether the file has any byte of the page.
    pub(super) fn has_page(&self, page: u64) -> bool {
        let end = rustix::fs::fstat(&*self.file).map(|status| status.st_size as u64);
        !self.is_file || end.is_ok_and(|end| end > self.offset_of(page))
    }

    /// Whether the file has nothing at the page, not even in the page cache, and ends after it. False where memory is the
    /// file.
    pub(super) fn is_hole(&self, page: u64) -> bool {
        if !self.is_file || self.is_memory {
            return false;
        }
        let offset = self.offset_of(page);
        match rustix::fs::seek(&*self.file, SeekFrom::Data(offset)) {
            Ok(data) => data >= offset + PAGE_BYTES,
            Err(error) => error == Errno::NXIO && self.has_page(page),
        }
    }

    /// Changes the state of a page; the caller has its shard locked. See [`PageTable::change`].
    pub(super) fn change(&self, page: u64, to: PageState, number: u32) {
        let before = self.table.entry(page).state();
        self.table.change(page, to, number);
        let is_counted = |state| matches!(state, PageState::Clean | PageState::Leaving);
        let count = &self.window_counts[(page / WINDOW_PAGES) as usize];
        match (is_counted(before), is_counted(to)) {
            (false, true) => _ = count.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = count.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }

    /// The number of present and leaving pages.
    pub(super) fn page_count(&self) -> u64 {
        self.count_in(0..self.table.page_count())
    }

    /// The number of present and leaving pages in the windows of these pages, of which the first begins a window.
    pub(super) fn count_in(&self, pages: std::ops::Range<u64>) -> u64 {
        let windows = pages.start / WINDOW_PAGES..pages.end.div_ceil(WINDOW_PAGES);
        let counts = &self.window_counts[windows.start as usize..windows.end as usize];
        counts.iter().map(|count| u64::from(count.load(Ordering::Relaxed))).sum()
    }

    /// What a failed copy from or to a page means.
    pub(super) fn error_of(&self, page: u64, is_write: bool) -> AccessError {
        let is_mapped = !self.is_closing() && !self.is_ordinary.load(Ordering::Acquire);
        match (is_mapped && self.has_page(page), is_write && self.is_writable) {
            // The mapping is gone, the file too short, or the mapping read-only.
            (false, _) => AccessError::Fault,
            (true, true) => AccessError::NoSpace,
            (true, false) if is_write => AccessError::Fault,
            (true, false) => AccessError::Device,
        }
    }

    /// Keeps the mapping while the result lives. `None` if the region is being removed.
    pub(super) fn begin_use(&self) -> Option<Use<'_>> {
        self.users.fetch_add(1, Ordering::SeqCst);
        let used = Use(self);
        (!self.is_closing()).then_some(used)
    }

    pub(super) fn is_used(&self) -> bool {
        self.users.load(Ordering::SeqCst) != 0
    }

    /// Whether the region takes no new accesses.
    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    /// Keeps the region from new accesses. False if it was closing before.
    pub(super) fn close(&self) -> bool {
        !self.is_closing.swap(true, Ordering::SeqCst)
    }

    /// Records that a part of the region could not be written.
    pub(super) fn note_loss(&self, error: &dyn std::fmt::Display) {
        if self.losses.note() {
            tracing::error!(
                %error, addr = format_args!("{:#x}", self.map.addr),
                "a part of a region's file cannot be written: it stays in memory, and no FLUSH succeeds until it is written"
            );
        }
    }

    /// Whether to log another failed access: the first, the second, the fourth and so on, because a peer determines how
    /// many there are.
    pub(super) fn may_complain(&self) -> bool {
        (self.counters.errors.load(Ordering::Relaxed) + 1).is_power_of_two()
    }
}

/// The length of a file or block device.
pub(super) fn file_len(file: &impl AsFd) -> std::io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}
