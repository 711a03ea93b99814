//! One file: its length, its handle, its windows, and the accesses that need not wait for a disk.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES, fault};
use terrace_memory::{AccessError, SharedFile};
use terrace_shm::{GracePeriod, file_system};
use terrace_sync::{Mutex, RwLock};

use crate::append::End;
use crate::budget::{Fate, Owner};
use crate::config::WINDOW_BYTES;
use crate::durable::Durability;
use crate::pending::Pending;
use crate::published::Published;
use crate::shared::Shared;
use crate::sys::{Handle, Mapping, coarse_ms};
use crate::window::Window;
use crate::workers::Job;

/// For how long a length counts that was read from the file. Accesses within a file that somebody has made shorter are
/// refused that soon even where the last page reaches beyond the end.
const LENGTH_MS_MAX: u64 = 10;
/// Least bytes of a window, unless its pages are larger: files that are small now may grow.
const WINDOW_BYTES_MIN: u64 = 64 << 10;
/// Accesses without a window after which a file gets one: for one access a system call is cheaper.
const MAPPED_AFTER: u32 = 2;
/// The same when another window has to leave.
const MAPPED_AFTER_WHEN_FULL: u32 = 16;
/// The longest file, in bytes.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;
/// Least addresses that a same-host peer maps for a file, and most. The file may grow into them.
const PEER_BYTES: [u64; 2] = [1 << 30, 1 << 40];
/// Bytes of an aligned part that a deferred write has read at a time.
const BRING_BYTES: usize = 64 << 10;

/// Device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The device.
    pub dev: u64,
    /// The inode.
    pub ino: u64,
}

/// What the file is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A disk, or something that may be as slow.
    Disk,
    /// Memory: no access waits long. A page fault in a hole would allocate a page for a read, so holes are read by the
    /// file system.
    Memory,
}

/// The direction of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// It changes nothing.
    Read,
    /// It may change bytes.
    Write,
}

/// A file of which there are regions.
#[derive(Debug)]
pub struct OpenFile {
    id: FileId,
    kind: Kind,
    /// Bytes of a page of a mapping.
    page_bytes: u64,
    shared: Arc<Shared>,
    /// Read while a copy runs: then no window leaves, and the layout does not change by our own calls.
    layout: RwLock<Layout>,
    /// Read by deferred accesses while they run, which may take long; written to change the layout.
    changes: RwLock<()>,
    len: AtomicU64,
    len_read_ms: AtomicU64,
    published: Published,
    /// Accesses that found no window, since the last one was made.
    unmapped_count: AtomicU32,
    /// The file system does not know `RWF_NOWAIT`.
    may_wait: AtomicBool,
    /// Deferred accesses. Changed under the lock of `pending`.
    pending_count: AtomicU32,
    pending: Mutex<Pending>,
    end: Mutex<End>,
    pub(crate) durability: Durability,
}

/// The handle, and the windows in the order of their offsets.
#[derive(Debug)]
struct Layout {
    handle: Arc<Handle>,
    windows: Vec<Window>,
}

impl Layout {
    /// The window that has all of a range.
    #[inline]
    fn window(&self, part: HostRange) -> Option<&Window> {
        let after = self.windows.partition_point(|window| window.start() <= part.addr);
        let window = self.windows.get(after.checked_sub(1)?)?;
        window.covers(part).then(|| {
            if !window.is_used.load(Ordering::Relaxed) {
                window.is_used.store(true, Ordering::Relaxed);
            }
            window
        })
    }
}

impl OpenFile {
    /// # Errors
    /// The system's.
    pub fn new(id: FileId, handle: Handle, shared: Arc<Shared>) -> io::Result<OpenFile> {
        let system = file_system(handle.file.as_fd())?;
        let page_bytes = system.page_bytes;
        let is_memory = system.is_in_memory() || page_bytes != PAGE_BYTES;
        Ok(OpenFile {
            id,
            kind: if is_memory { Kind::Memory } else { Kind::Disk },
            page_bytes,
            shared,
            len: AtomicU64::new(handle.len()?),
            len_read_ms: AtomicU64::new(coarse_ms()),
            published: Published::default(),
            layout: RwLock::new(Layout { handle: Arc::new(handle), windows: Vec::new() }),
            changes: RwLock::new(()),
            unmapped_count: AtomicU32::new(0),
            may_wait: AtomicBool::new(false),
            pending_count: AtomicU32::new(0),
            pending: Mutex::default(),
            end: Mutex::default(),
            durability: Durability::default(),
        })
    }

    /// What all files of the process share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The descriptor.
    pub fn handle(&self) -> Arc<Handle> {
        self.layout.read().handle.clone()
    }

    /// Replaces a descriptor for reading by one for writing, and the windows with it.
    pub fn make_writable(&self, handle: Handle) {
        let mut layout = self.layout.write();
        if !layout.handle.is_writable {
            layout.windows.clear();
            layout.handle = Arc::new(handle);
        }
    }

    /// Changes the layout by `change` while no access runs, not even of a same-host peer to what lies beyond `end_after`,
    /// where the file will end. Windows beyond the new end leave, and what is known of pages is forgotten.
    ///
    /// # Errors
    /// Those of `change`; `ResourceBusy` if a peer does not end its access.
    pub fn change_layout(
        &self,
        end_after: u64,
        change: impl FnOnce(&Handle) -> io::Result<()>,
    ) -> io::Result<()> {
        let len = self.len.load(Ordering::Relaxed);
        if end_after < len && self.published.limit(Some(end_after), len) {
            let lost = HostRange { addr: end_after, len: len - end_after };
            let over = GracePeriod::of_pages(lost).wait_long();
            over.map_err(|timeout| {
                self.published.limit(None, len);
                io::Error::new(io::ErrorKind::ResourceBusy, timeout)
            })?;
        }
        let changed = self.change_alone(change);
        self.published.limit(None, self.len.load(Ordering::Relaxed));
        changed
    }

    fn change_alone(&self, change: impl FnOnce(&Handle) -> io::Result<()>) -> io::Result<()> {
        let mut end = self.end.lock();
        end.forget();
        let _changes = self.changes.write();
        let mut layout = self.layout.write();
        let changed = change(&layout.handle);
        let now_ms = coarse_ms();
        let len = self.read_len(&layout.handle, now_ms);
        layout.windows.retain(|window| window.start() < len);
        layout.windows.iter().for_each(|window| window.forget_all(now_ms));
        changed
    }

    /// Reads the file's length. If the system does not tell, the last one counts.
    pub fn read_len(&self, handle: &Handle, now_ms: u64) -> u64 {
        let Ok(len) = handle.len() else { return self.len.load(Ordering::Relaxed) };
        self.len.store(len, Ordering::Relaxed);
        self.published.set(len);
        self.len_read_ms.store(now_ms, Ordering::Relaxed);
        len
    }

    /// Checks that a range does not reach beyond the file's end.
    #[inline]
    fn check_end(&self, layout: &Layout, part: HostRange, now_ms: u64) -> Result<(), AccessError> {
        let is_fresh = now_ms.wrapping_sub(self.len_read_ms.load(Ordering::Relaxed)) < LENGTH_MS_MAX;
        let end = part.addr.saturating_add(part.len);
        if (is_fresh && end <= self.len.load(Ordering::Relaxed)) || end <= self.read_len(&layout.handle, now_ms) {
            return Ok(());
        }
        Err(AccessError::OutOfRange)
    }

    /// The same for callers that have no lock.
    ///
    /// # Errors
    /// `OutOfRange`.
    pub fn check(&self, part: HostRange) -> Result<(), AccessError> {
        self.check_end(&self.layout.read(), part, coarse_ms())
    }

    /// Whether an access has to wait for a deferred one.
    #[inline]
    fn is_blocked(&self, part: HostRange, direction: Direction) -> bool {
        self.pending_count.load(Ordering::Acquire) != 0
            && self.pending.lock().conflicts(part, direction == Direction::Read)
    }

    /// Whether an access can be made now.
    pub fn is_present(&self, part: HostRange) -> bool {
        let (layout, now_ms) = (self.layout.read(), coarse_ms());
        if self.check_end(&layout, part, now_ms).is_err() || self.is_blocked(part, Direction::Write) {
            return false;
        }
        match layout.window(part) {
            _ if self.kind == Kind::Memory => true,
            Some(window) => self.needs_no_disk(&layout, window, part, Direction::Read, now_ms),
            // The access itself finds out.
            None => !self.may_wait.load(Ordering::Relaxed),
        }
    }

    /// Whether no page of a range within a window has to be read from the disk.
    #[inline]
    fn needs_no_disk(
        &self,
        layout: &Layout,
        window: &Window,
        part: HostRange,
        direction: Direction,
        now_ms: u64,
    ) -> bool {
        window.is_known(part, now_ms)
            || window.ask(part, |page| match self.kind {
                Kind::Memory => direction == Direction::Write,
                Kind::Disk => {
                    let end = (page.addr + page.len).min(self.len.load(Ordering::Relaxed));
                    layout.handle.is_hole(page.addr, end)
                }
            })
    }

    /// Reads a range if that takes no disk.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end.
    pub fn read(self: &Arc<OpenFile>, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        let now_ms = coarse_ms();
        {
            let layout = self.layout.read();
            if let Err(error) = self.check_end(&layout, part, now_ms) {
                return Some(Err(error));
            }
            if self.is_blocked(part, Direction::Read) {
                return None;
            }
            if let Some(window) = layout.window(part).filter(|window| window.is_known(part, now_ms)) {
                return copy_out(window, part, out).then_some(Ok(()));
            }
        }
        self.read_pieces(part, out, now_ms)
    }

    /// Reads a range of which part has no window, or is not known to be in memory.
    #[cold]
    fn read_pieces(
        self: &Arc<OpenFile>,
        part: HostRange,
        mut out: &mut [u8],
        now_ms: u64,
    ) -> Option<Result<(), AccessError>> {
        for piece in self.pieces(part) {
            self.make_window(piece, Direction::Read, now_ms);
            let layout = self.layout.read();
            let (here, rest) = out.split_at_mut(piece.len as usize);
            if let Some(window) = layout.window(piece) {
                if self.needs_no_disk(&layout, window, piece, Direction::Read, now_ms) {
                    if !copy_out(window, piece, here) {
                        return None;
                    }
                    out = rest;
                    continue;
                }
                if self.kind == Kind::Disk {
                    return None;
                }
            }
            if let Err(error) = self.read_by_call(&layout.handle, piece, here)? {
                return Some(Err(error));
            }
            out = rest;
        }
        Some(Ok(()))
    }

    /// Reads by a system call if that takes no disk.
    fn read_by_call(
        &self,
        handle: &Handle,
        part: HostRange,
        out: &mut [u8],
    ) -> Option<Result<(), AccessError>> {
        let read = match self.kind {
            Kind::Memory => handle.read_exact(part.addr, out),
            Kind::Disk if self.may_wait.load(Ordering::Relaxed) => return None,
            Kind::Disk => handle.read_cached(part.addr, out),
        };
        match read {
            Ok(()) => Some(Ok(())),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Some(Err(AccessError::OutOfRange)),
            Err(error) => {
                if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) {
                    self.may_wait.store(true, Ordering::Relaxed);
                }
                // A deferred read finds out what is wrong.
                None
            }
        }
    }

    /// Writes to a range if that takes no disk.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Permission` if the file is not open for writing.
    pub fn write(self: &Arc<OpenFile>, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        self.change(HostRange { addr, len: data.len() as u64 }, |addr, offset, len| {
            let data = &data[offset..offset + len];
            // SAFETY: a range of a window, which the lock keeps, and to which no Rust reference exists.
            unsafe { fault::copy_to(addr, data) }.is_ok()
        })
    }

    /// Performs an atomic operation on 8 aligned bytes if that takes no disk.
    ///
    /// # Errors
    /// As for [`OpenFile::write`].
    pub fn atomic(self: &Arc<OpenFile>, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        let mut before = 0;
        let changed = self.change(HostRange { addr, len: 8 }, |addr, _, _| {
            // SAFETY: as for a write; windows begin at pages, so the address is as aligned as the offset.
            match unsafe { fault::atomic(addr, op) } {
                Ok(value) => {
                    before = value;
                    true
                }
                Err(fault::Fault) => false,
            }
        });
        changed.map(|result| result.map(|()| before))
    }

    /// Changes a range by `act` if that takes no disk. `act` gets the address of each part that lies in one window, where in
    /// the range it begins, and its length. It returns false if the memory is not accessible.
    #[inline]
    fn change(
        self: &Arc<OpenFile>,
        part: HostRange,
        mut act: impl FnMut(u64, usize, usize) -> bool,
    ) -> Option<Result<(), AccessError>> {
        let now_ms = coarse_ms();
        {
            let layout = self.layout.read();
            if !layout.handle.is_writable {
                return Some(Err(AccessError::Permission));
            }
            if let Err(error) = self.check_end(&layout, part, now_ms) {
                return Some(Err(error));
            }
            if self.is_blocked(part, Direction::Write) {
                return None;
            }
            if let Some(window) = layout.window(part).filter(|window| window.is_known(part, now_ms)) {
                let is_done = act(window.place(part.addr), 0, part.len as usize);
                return is_done.then_some(Ok(()));
            }
        }
        self.change_pieces(part, &mut act, now_ms)
    }

    /// The same for a range of which part has no window, or is not known to be in memory.
    #[cold]
    fn change_pieces(
        self: &Arc<OpenFile>,
        part: HostRange,
        act: &mut dyn FnMut(u64, usize, usize) -> bool,
        now_ms: u64,
    ) -> Option<Result<(), AccessError>> {
        for piece in self.pieces(part) {
            self.make_window(piece, Direction::Write, now_ms);
        }
        let layout = self.layout.read();
        for piece in self.pieces(part) {
            let window = layout.window(piece)?;
            if !self.needs_no_disk(&layout, window, piece, Direction::Write, now_ms) {
                return None;
            }
        }
        for piece in self.pieces(part) {
            let addr = layout.window(piece)?.place(piece.addr);
            if !act(addr, (piece.addr - part.addr) as usize, piece.len as usize) {
                return None;
            }
        }
        Some(Ok(()))
    }

    /// Bytes of a whole window.
    fn window_bytes(&self) -> u64 {
        WINDOW_BYTES.max(self.page_bytes)
    }

    /// The parts of a range that lie in one window each.
    fn pieces(&self, part: HostRange) -> impl Iterator<Item = HostRange> + use<> {
        let window_bytes = self.window_bytes();
        let mut rest = part;
        std::iter::from_fn(move || {
            let len = rest.len.min(window_bytes - rest.addr % window_bytes);
            let piece = HostRange { addr: rest.addr, len };
            rest = HostRange { addr: rest.addr + len, len: rest.len - len };
            (len > 0).then_some(piece)
        })
    }

    /// Makes a window for a range, if there is none and the file is accessed often enough.
    fn make_window(self: &Arc<OpenFile>, part: HostRange, direction: Direction, now_ms: u64) {
        {
            let layout = self.layout.read();
            if layout.window(part).is_some() || !layout.handle.is_tellable {
                return;
            }
        }
        let uses_needed = match direction {
            Direction::Write => 1,
            Direction::Read if self.shared.budget.is_full() => MAPPED_AFTER_WHEN_FULL,
            Direction::Read => MAPPED_AFTER,
        };
        if self.unmapped_count.fetch_add(1, Ordering::Relaxed) + 1 < uses_needed {
            return;
        }
        self.unmapped_count.store(0, Ordering::Relaxed);
        let mut layout = self.layout.write();
        let len = self.read_len(&layout.handle, now_ms);
        let start = part.addr - part.addr % self.window_bytes();
        if len <= part.addr || layout.window(part).is_some() {
            return;
        }
        // A shorter window of a file that was shorter leaves.
        layout.windows.retain(|window| window.start() != start);
        let owner: Arc<dyn Owner> = self.clone();
        let Some(share) = self.shared.budget.take(&owner, start) else { return };
        match Mapping::new(&layout.handle, start, self.window_len(len - start)) {
            Ok(mapping) => {
                let at = layout.windows.partition_point(|window| window.start() < start);
                layout.windows.insert(at, Window::new(start, mapping, share, now_ms));
            }
            Err(error) => tracing::debug!(%error, "a part of a file is not mapped"),
        }
    }

    /// The length of a window for a file that ends `rest` bytes after the window's start.
    fn window_len(&self, rest: u64) -> u64 {
        let whole = self.window_bytes();
        if self.page_bytes != PAGE_BYTES {
            // A mapping beyond the end of a file of huge pages would make it longer.
            return rest.min(whole).next_multiple_of(self.page_bytes);
        }
        rest.min(whole).next_power_of_two().clamp(WINDOW_BYTES_MIN, whole)
    }

    /// Adds a deferred access. Returns its job if it need not wait.
    pub fn begin_access(
        &self,
        range: HostRange,
        direction: Direction,
        make: impl FnOnce(u64) -> Job,
    ) -> Option<Job> {
        let mut pending = self.pending.lock();
        self.pending_count.fetch_add(1, Ordering::Release);
        pending.add(range, direction == Direction::Read, make)
    }

    /// Ends a deferred access. Returns the jobs that need not wait any more.
    pub fn end_access(&self, number: u64) -> Vec<Job> {
        let mut pending = self.pending.lock();
        self.pending_count.fetch_sub(1, Ordering::Release);
        pending.remove(number)
    }

    /// Reads a range, and waits for the disk.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Device`.
    pub fn read_waiting(&self, part: HostRange, out: &mut [u8]) -> Result<(), AccessError> {
        let _changes = self.changes.read();
        self.handle().read_exact(part.addr, out).map_err(|error| self.error_of(&error))
    }

    /// Writes to a range, and waits for the disk.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Permission` if the file is not open for writing; `NoSpace`; `Device`.
    pub fn write_waiting(&self, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        let part = HostRange { addr, len: data.len() as u64 };
        // SAFETY: the mapping lives while `act` runs, and no Rust reference to it exists.
        let written = self.change_waiting(part, |addr| unsafe { fault::copy_to(addr, data) });
        match written {
            // A file system without shared mappings. If somebody makes the file shorter at this moment, the write makes
            // it longer again, as any program's write would.
            Err(Unmapped::NotMappable(handle)) => {
                handle.write_all(addr, data).map_err(|error| self.error_of(&error))
            }
            Err(Unmapped::Failed(error)) => Err(error),
            Ok(()) => Ok(()),
        }
    }

    /// Performs an atomic operation on 8 aligned bytes, and waits for the disk.
    ///
    /// # Errors
    /// As for [`OpenFile::write_waiting`]; `Device`, too, if the file cannot be mapped.
    pub fn atomic_waiting(&self, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        // SAFETY: as for a write; the mapping begins at a page.
        let changed = self.change_waiting(HostRange { addr, len: 8 }, |addr| unsafe { fault::atomic(addr, op) });
        changed.map_err(|error| match error {
            Unmapped::NotMappable(_) => AccessError::Device,
            Unmapped::Failed(error) => error,
        })
    }

    /// What same-host peers need to map a part of the file. `None` if they cannot.
    pub fn shared_file(&self, extent: HostRange, is_writable: bool) -> Option<SharedFile> {
        let handle = self.handle();
        let len = self.read_len(&handle, coarse_ms());
        let file = handle.open_anew(is_writable).ok()?;
        let (lengths, number) = self.published.publish(&self.shared.lengths, len)?;
        let room = if self.page_bytes == PAGE_BYTES {
            len.saturating_mul(4).clamp(PEER_BYTES[0], PEER_BYTES[1]).max(len.min(PEER_BYTES[1]))
        } else {
            // A mapping beyond the end of a file of huge pages would make it longer.
            len
        };
        let range = HostRange { addr: extent.addr, len: extent.len.min(room.checked_sub(extent.addr)?) };
        (range.len > 0).then_some(SharedFile { file, range, lengths, number })
    }

    /// Changes a range in a mapping of its own: unlike a system call, that never makes the file longer.
    fn change_waiting<R>(
        &self,
        part: HostRange,
        act: impl FnOnce(u64) -> Result<R, fault::Fault>,
    ) -> Result<R, Unmapped> {
        let _changes = self.changes.read();
        let handle = self.handle();
        if !handle.is_writable {
            return Err(Unmapped::Failed(AccessError::Permission));
        }
        let end = part.addr.saturating_add(part.len);
        if self.read_len(&handle, coarse_ms()) < end {
            return Err(Unmapped::Failed(AccessError::OutOfRange));
        }
        self.bring(&handle, part).map_err(Unmapped::Failed)?;
        let start = part.addr - part.addr % self.page_bytes;
        let Ok(mapping) = Mapping::new(&handle, start, (end - start).next_multiple_of(self.page_bytes)) else {
            return Err(Unmapped::NotMappable(handle));
        };
        act(mapping.addr() + (part.addr - start)).map_err(|fault::Fault| {
            let is_there = self.read_len(&handle, coarse_ms()) >= end;
            Unmapped::Failed(if is_there { AccessError::NoSpace } else { AccessError::OutOfRange })
        })
    }

    /// Reads the pages of a range into the page cache, so that a copy finds them there.
    fn bring(&self, handle: &Handle, part: HostRange) -> Result<(), AccessError> {
        if self.kind == Kind::Memory || handle.is_hole(part.addr, part.addr + part.len) {
            return Ok(());
        }
        let mut buffer = vec![0; BRING_BYTES.min(part.len as usize)];
        let mut rest = part;
        while rest.len > 0 {
            let here = &mut buffer[..rest.len.min(BRING_BYTES as u64) as usize];
            handle.read_exact(rest.addr, here).map_err(|error| self.error_of(&error))?;
            rest = HostRange { addr: rest.addr + here.len() as u64, len: rest.len - here.len() as u64 };
        }
        Ok(())
    }

    /// Adds a record at the end of the file, after those of all other threads, and returns its offset.
    ///
    /// # Errors
    /// `Permission` if the file is not open for writing; `NoSpace`; `OutOfRange` beyond the longest file; `Device`. No part of
    /// the record is in the file then.
    pub fn append(&self, data: &[u8]) -> Result<u64, AccessError> {
        let mut end = self.end.lock();
        let handle = self.handle();
        if !handle.is_writable {
            return Err(AccessError::Permission);
        }
        let appended = end.append(&handle, data);
        self.read_len(&handle, coarse_ms());
        appended.map_err(|error| self.error_of(&error))
    }

    /// What a failed system call means for an access.
    pub fn error_of(&self, error: &io::Error) -> AccessError {
        if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::FileTooLarge) {
            return AccessError::OutOfRange;
        }
        match Errno::from_io_error(error) {
            Some(Errno::NOSPC | Errno::DQUOT) => AccessError::NoSpace,
            Some(Errno::PERM | Errno::ACCESS | Errno::ROFS) => AccessError::Permission,
            _ => {
                tracing::warn!(%error, file = ?self.id, "an access to a region's file failed");
                AccessError::Device
            }
        }
    }
}

impl Owner for OpenFile {
    fn try_drop_window(&self, start: u64) -> Fate {
        let Some(mut layout) = self.layout.try_write() else { return Fate::Stays };
        let Some(at) = layout.windows.iter().position(|window| window.start() == start) else {
            return Fate::Gone;
        };
        if layout.windows[at].is_used.swap(false, Ordering::Relaxed) {
            return Fate::Stays;
        }
        let window = layout.windows.remove(at);
        drop(layout);
        drop(window);
        Fate::Gone
    }
}

/// Why a range was not changed in a mapping.
enum Unmapped {
    /// The file cannot be mapped.
    NotMappable(Arc<Handle>),
    /// The access fails.
    Failed(AccessError),
}

/// Copies from a window. False after a fault: the file has become shorter, or a page cannot be read.
#[inline]
fn copy_out(window: &Window, part: HostRange, out: &mut [u8]) -> bool {
    // SAFETY: a range of the window, which the caller's lock keeps, and to which no exclusive Rust reference exists.
    unsafe { fault::copy_from(window.place(part.addr), out) }.is_ok()
}
