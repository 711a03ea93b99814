//! Memory that a pager and the thread in a paged process share: which pages are to leave, and the bytes of those that left.
//!
//! Either process may be hostile to the other as far as this memory goes: each reads every value once, checks it, and copies
//! pages before it uses them. The file is sealed, so that it cannot shrink below a mapping.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::backing_store::PageBytes;
use crate::sys;

/// Pages of one request.
pub const BATCH_PAGES: usize = 64;

/// How far a request is.
///
/// ```text
///   IDLE ──publish──> PUBLISHED ──take──> TAKEN ──respond──> IDLE
///                         └──withdraw──> WITHDRAWN ──take──^
/// ```
mod state {
    pub const IDLE: u32 = 0;
    pub const PUBLISHED: u32 = 1;
    /// The thread has begun it.
    pub const TAKEN: u32 = 2;
    /// The pager has taken it back before the thread has begun it.
    pub const WITHDRAWN: u32 = 3;
}

/// What the thread in the process does.
mod thread {
    pub const STARTING: u32 = 0;
    /// It carries out requests.
    pub const READY: u32 = 1;
    /// The system has refused it.
    pub const REFUSED: u32 = 2;
}

/// A page of a request.
#[repr(C)]
struct Entry {
    page: AtomicU64,
    is_wanted: AtomicU32,
    /// 0, or the number of the system's error.
    error: AtomicI32,
}

#[repr(C)]
struct Header {
    /// What the thread is to do ([`Task`]).
    task: AtomicU32,
    /// The number of entries.
    count: AtomicU32,
    /// How far the request is (`state`).
    state: AtomicU32,
    /// What the thread does (`thread`).
    thread: AtomicU32,
    entries: [Entry; BATCH_PAGES],
}

const HEADER_BYTES: u64 = PAGE_BYTES;
const AREA_BYTES: u64 = HEADER_BYTES + BATCH_PAGES as u64 * PAGE_BYTES;
const _: () = assert!(size_of::<Header>() as u64 <= HEADER_BYTES);

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// The pages leave the process, and become absent. Those that are wanted are copied to the area.
    Evict = 1,
    /// The pages are made this process's own, if they are shared with other processes since a fork.
    Unshare = 2,
}

/// A mapping of the area.
#[derive(Debug)]
pub struct EvictionArea {
    range: HostRange,
}

impl EvictionArea {
    /// Creates an area, and the file by which another process opens it.
    ///
    /// # Errors
    /// The system's.
    pub fn create() -> io::Result<(EvictionArea, OwnedFd)> {
        let file =
            rustix::fs::memfd_create(c"terrace-eviction", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, AREA_BYTES)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((EvictionArea::map(&file)?, file))
    }

    /// An area of a process that has no thread.
    ///
    /// # Errors
    /// The system's.
    pub fn without_thread() -> io::Result<EvictionArea> {
        let (area, _) = EvictionArea::create()?;
        area.set_refused();
        Ok(area)
    }

    /// Opens an area that another process has created.
    ///
    /// # Errors
    /// `InvalidData` if it is no such file, or can shrink; the system's.
    pub fn open(file: OwnedFd) -> io::Result<EvictionArea> {
        let file = File::from(file);
        let is_sealed = rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        if !is_sealed || file.metadata()?.len() < AREA_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        EvictionArea::map(&file)
    }

    fn map(file: &impl AsFd) -> io::Result<EvictionArea> {
        let addr = sys::map_shared(file.as_fd(), AREA_BYTES)?;
        Ok(EvictionArea { range: HostRange { addr, len: AREA_BYTES } })
    }

    fn header(&self) -> &Header {
        // SAFETY: a page of the mapping, which consists of atomics, and lives as long as this object.
        unsafe { &*(self.range.addr as *const Header) }
    }

    fn entry(&self, index: usize) -> &Entry {
        &self.header().entries[index]
    }

    /// The address of the bytes of an entry's page.
    fn page_addr(&self, index: usize) -> u64 {
        assert!(index < BATCH_PAGES, "the area has so many pages");
        self.range.addr + HEADER_BYTES + index as u64 * PAGE_BYTES
    }

    /// Publishes a request: pages by address, and whether their bytes are wanted. The pager's.
    pub fn publish(&self, task: Task, pages: &[(u64, bool)]) {
        let header = self.header();
        for (entry, &(page, is_wanted)) in header.entries.iter().zip(pages) {
            entry.page.store(page, Ordering::Relaxed);
            entry.is_wanted.store(is_wanted.into(), Ordering::Relaxed);
        }
        header.task.store(task as u32, Ordering::Relaxed);
        header.count.store(pages.len().min(BATCH_PAGES) as u32, Ordering::Relaxed);
        header.state.store(state::PUBLISHED, Ordering::Release);
    }

    /// Takes the request back, unless the thread has begun it. Returns whether it was taken back. The pager's, which publishes the
    /// next one when the area is idle.
    pub fn withdraw(&self) -> bool {
        let (from, to) = (state::PUBLISHED, state::WITHDRAWN);
        self.header().state.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Whether the thread carries out requests. Until then, other threads of the process may have faults that come first.
    pub fn is_ready(&self) -> bool {
        self.header().thread.load(Ordering::Relaxed) == thread::READY
    }

    /// Whether the process may still start the thread.
    pub fn is_starting(&self) -> bool {
        self.header().thread.load(Ordering::Relaxed) == thread::STARTING
    }

    /// Says that the thread carries out requests. The paged process's.
    pub fn set_ready(&self) {
        self.header().thread.store(thread::READY, Ordering::Relaxed);
    }

    /// Says that there will be no thread. The paged process's, which keeps its connection.
    pub fn set_refused(&self) {
        self.header().thread.store(thread::REFUSED, Ordering::Relaxed);
    }

    /// Whether the last request has been carried out. After one that was taken back, whether the thread has seen that.
    pub fn is_idle(&self) -> bool {
        self.header().state.load(Ordering::Acquire) == state::IDLE
    }

    /// The system's error for an entry; 0 if there was none.
    pub fn error(&self, index: usize) -> i32 {
        self.entry(index).error.load(Ordering::Relaxed)
    }

    /// Copies the bytes of an entry's page.
    pub fn copy_page(&self, index: usize, into: &mut PageBytes) {
        let from = self.page_addr(index) as *const u8;
        // SAFETY: a page of the mapping. The other process may store to it meanwhile: any bytes are valid.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Begins the request that is to be carried out, if there is one: its task and the number of its pages. One that was taken back
    /// has neither. The paged process's, which responds to each.
    pub fn take(&self) -> Option<(Option<Task>, usize)> {
        let header = self.header();
        let begin = |from| {
            header.state.compare_exchange(from, state::TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        if !begin(state::PUBLISHED) {
            return begin(state::WITHDRAWN).then_some((None, 0));
        }
        let task = match header.task.load(Ordering::Relaxed) {
            1 => Some(Task::Evict),
            2 => Some(Task::Unshare),
            _ => None,
        };
        Some((task, (header.count.load(Ordering::Relaxed) as usize).min(BATCH_PAGES)))
    }

    /// The address of an entry's page in the paged process, and whether its bytes are wanted.
    pub fn wanted(&self, index: usize) -> (u64, bool) {
        let entry = self.entry(index);
        (entry.page.load(Ordering::Relaxed), entry.is_wanted.load(Ordering::Relaxed) != 0)
    }

    /// Sets an entry's error; 0 if there was none.
    pub fn set_error(&self, index: usize, error: i32) {
        self.entry(index).error.store(error, Ordering::Relaxed);
    }

    /// Sets the bytes of an entry's page.
    ///
    /// # Safety
    /// `from` is the address of a readable page, to which nobody stores.
    pub unsafe fn set_page(&self, index: usize, from: u64) {
        let into = self.page_addr(index) as *mut u8;
        // SAFETY: the caller's, and a page of the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, into, PAGE_BYTES as usize) };
    }

    /// Says that the request has been carried out.
    pub fn respond(&self) {
        self.header().state.store(state::IDLE, Ordering::Release);
    }
}

impl Drop for EvictionArea {
    fn drop(&mut self) {
        // SAFETY: this object's mapping, to which nobody has a reference any more.
        unsafe { sys::unmap(self.range) };
    }
}
