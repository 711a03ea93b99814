//! One file: its length, its handle, its layout, and its end. Accesses that need not wait for a disk are in `present`, those that may wait in
//! `waiting`; making and dropping windows is in `windows`.

mod present;
mod waiting;
mod windows;

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, SharedFile, Waker};
use terrace_shm::{GracePeriod, file_system};
use terrace_sync::{Mutex, RwLock};

use crate::append::{End, Progress};
use crate::budget::Fate;
use crate::descriptors::{Examined, Holder, Parked, Right, Tables};
use crate::durable::Durability;
use crate::pending::Pending;
use crate::published::Published;
use crate::shared::Shared;
use crate::stats::count;
use crate::sys::{Handle, HandleTraits, coarse_ms, status};
use crate::window::Window;
use crate::workers::Job;

/// For how long a length counts that was read from the file. Accesses within a file that somebody has made shorter are
/// refused that soon even where the last page reaches beyond the end.
const LENGTH_MS_MAX: u64 = 10;
/// The longest file, in bytes.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;
/// Least addresses that a same-host peer maps for a file, and most. The file may grow into them.
const PEER_BYTES: [u64; 2] = [1 << 30, 1 << 40];

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
    kind: Kind,
    /// Bytes of a page of a mapping, as a power of two.
    page_bits: u8,
    shared: Arc<Shared>,
    /// Read while a copy runs: then no window leaves, and the layout does not change by our own calls.
    layout: RwLock<Layout>,
    len: AtomicU64,
    len_read_ms: AtomicU64,
    /// Locked while the length is read from the file and stored.
    len_reading: Mutex<()>,
    /// The descriptor was used since somebody looked for one to park.
    is_handle_used: AtomicBool,
    /// Accesses that found no window, since the last one was made.
    unmapped_count: AtomicU32,
    /// The file system does not know `RWF_NOWAIT`.
    may_wait: AtomicBool,
    /// Deferred accesses. Changed under the lock of `pending`.
    pending_count: AtomicU32,
    rest: OnceLock<Box<Rest>>,
}

/// What most files never need: there may be many.
#[derive(Debug, Default)]
struct Rest {
    /// Read by deferred accesses while they run, which may take long; written to change the layout.
    changes: RwLock<()>,
    pending: Mutex<Pending>,
    published: Published,
    end: Mutex<End>,
    append_progress: Progress,
    durability: Durability,
}

/// The handle, and the windows in the order of their offsets.
#[derive(Debug)]
struct Layout {
    holding: Holding,
    traits: HandleTraits,
    windows: Vec<Window>,
}

/// How a file is held.
#[derive(Debug)]
enum Holding {
    /// By a descriptor. It has no right to that until the file is one of the process's files.
    Open(Arc<Handle>, Option<Right>),
    /// Without one.
    Parked(Parked),
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
    pub fn new(handle: Handle, shared: Arc<Shared>) -> io::Result<OpenFile> {
        let system = file_system(handle.file.as_fd())?;
        let page_bytes = system.page_bytes;
        let is_memory = system.is_in_memory() || page_bytes != PAGE_BYTES;
        let len = handle.len()?;
        count(&shared.counters.open_files, 1);
        Ok(OpenFile {
            kind: if is_memory { Kind::Memory } else { Kind::Disk },
            page_bits: page_bytes.ilog2() as u8,
            shared,
            len: AtomicU64::new(len),
            len_read_ms: AtomicU64::new(coarse_ms()),
            len_reading: Mutex::default(),
            layout: RwLock::new(Layout {
                traits: handle.traits,
                holding: Holding::Open(Arc::new(handle), None),
                windows: Vec::new(),
            }),
            is_handle_used: AtomicBool::new(true),
            unmapped_count: AtomicU32::new(0),
            may_wait: AtomicBool::new(false),
            pending_count: AtomicU32::new(0),
            rest: OnceLock::new(),
        })
    }

    /// Bytes of a page of a mapping.
    fn page_bytes(&self) -> u64 {
        1 << self.page_bits
    }

    fn rest(&self) -> &Rest {
        self.rest.get_or_init(Box::default)
    }

    /// Makes all that was written before durable.
    ///
    /// # Errors
    /// `Flush` once a write-back of the file has failed: also for later regions of the file, as the system forgets that.
    pub fn sync(self: &Arc<OpenFile>) -> Result<(), AccessError> {
        let synced = self.rest().durability.sync(&*self.handle()?);
        match &synced {
            Ok(()) => count(&self.shared.counters.commits, 1),
            Err(_) => self.shared.keep(self),
        }
        synced
    }

    /// Makes all that was written before durable, and the attributes.
    ///
    /// # Errors
    /// The system's; `EIO` once a write-back of the file has failed.
    pub fn sync_all(self: &Arc<OpenFile>) -> io::Result<()> {
        let handle = self.open()?;
        self.rest().durability.sync_all(&handle).inspect_err(|_| self.shared.keep(self))
    }

    /// Whether it has no name any more. False if the system does not tell.
    pub fn is_deleted(&self) -> bool {
        let found = match &self.layout.read().holding {
            Holding::Open(handle, _) => status(handle.file.as_fd()),
            Holding::Parked(parked) => parked.open().and_then(|file| status(file.as_fd())),
        };
        found.is_ok_and(|status| status.st_nlink == 0)
    }

    /// Gives the file the right to its descriptor.
    pub fn keep_open(self: &Arc<OpenFile>) {
        let holder: Arc<dyn Holder> = self.clone();
        // Without the lock, also when they are dropped: another file may be closed, whose server may not answer.
        let (right, _examined) = self.shared.descriptors.take(&holder);
        if let Holding::Open(_, place @ None) = &mut self.layout.write().holding {
            *place = Some(right);
        }
    }

    /// What all files of the process share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Whether it is open for writing.
    pub fn is_writable(&self) -> bool {
        self.layout.read().traits.is_writable
    }

    /// The descriptor. A parked file gets one.
    ///
    /// # Errors
    /// `Device` without a free descriptor.
    pub fn handle(self: &Arc<OpenFile>) -> Result<Arc<Handle>, AccessError> {
        self.open().map_err(|error| self.error_of(&error))
    }

    /// The same, with the system's error.
    ///
    /// # Errors
    /// The system's: `EMFILE` or `ENFILE` without a free descriptor.
    pub fn open(self: &Arc<OpenFile>) -> io::Result<Arc<Handle>> {
        self.is_handle_used.store(true, Ordering::Relaxed);
        if let Holding::Open(handle, _) = &self.layout.read().holding {
            return Ok(handle.clone());
        }
        let opened = self.open_parked(&mut self.layout.write());
        let opened = match opened {
            Err(error) if is_full(&error) && self.shared.descriptors.make_room() => {
                self.open_parked(&mut self.layout.write())
            }
            opened => opened,
        };
        opened.map(|(handle, _examined)| handle)
    }

    /// The descriptor, unless the layout is just being changed, which may take as long as the disk does, or another file would have to be closed first.
    fn try_handle(self: &Arc<OpenFile>) -> Option<Result<Arc<Handle>, AccessError>> {
        self.is_handle_used.store(true, Ordering::Relaxed);
        if let Holding::Open(handle, _) = &self.layout.try_read()?.holding {
            return Some(Ok(handle.clone()));
        }
        let opened = self.open_parked(&mut *self.layout.try_write()?);
        match opened {
            Ok((handle, _examined)) => Some(Ok(handle)),
            Err(error) if is_full(&error) => None,
            Err(error) => Some(Err(self.error_of(&error))),
        }
    }

    /// Opens the file if it is parked. Returns its handle, and files that the caller drops when it has unlocked the layout.
    fn open_parked(self: &Arc<OpenFile>, layout: &mut Layout) -> io::Result<(Arc<Handle>, Vec<Examined>)> {
        let file = match &layout.holding {
            Holding::Open(handle, _) => return Ok((handle.clone(), Vec::new())),
            Holding::Parked(parked) => parked.open()?,
        };
        let holder: Arc<dyn Holder> = self.clone();
        let (right, examined) = self.shared.descriptors.take(&holder);
        let handle = Arc::new(Handle { file, traits: layout.traits });
        layout.holding = Holding::Open(handle.clone(), Some(right));
        Ok((handle, examined))
    }

    /// Replaces a descriptor for reading by one for writing, and the windows with it.
    pub fn make_writable(self: &Arc<OpenFile>, handle: Handle) {
        let mut layout = self.layout.write();
        if layout.traits.is_writable {
            return;
        }
        layout.windows.clear();
        layout.traits = handle.traits;
        // Closed without the lock.
        let _replaced = std::mem::replace(&mut layout.holding, Holding::Open(Arc::new(handle), None));
        drop(layout);
        self.keep_open();
    }

    /// Changes the layout by `change` while no access runs, not even of a same-host peer to what lies beyond `end_after`,
    /// where the file will end. Windows beyond the new end leave, and what is known of pages is forgotten.
    ///
    /// # Errors
    /// Those of `change`; `ResourceBusy` if a peer does not end its access.
    pub fn change_layout(
        self: &Arc<OpenFile>,
        end_after: u64,
        change: impl FnOnce(&Handle) -> io::Result<()>,
    ) -> io::Result<()> {
        let len = self.len.load(Ordering::Relaxed);
        if end_after >= len {
            return self.change_alone(change);
        }
        let published = &self.rest().published;
        let over = match published.begin_limit(end_after, len) {
            true => GracePeriod::of_pages(HostRange { addr: end_after, len: len - end_after }).wait_long(),
            false => Ok(()),
        };
        let changed = match over {
            Ok(()) => self.change_alone(change),
            Err(timeout) => Err(io::Error::new(io::ErrorKind::ResourceBusy, timeout)),
        };
        published.end_limit(end_after, self.len.load(Ordering::Relaxed));
        changed
    }

    fn change_alone(self: &Arc<OpenFile>, change: impl FnOnce(&Handle) -> io::Result<()>) -> io::Result<()> {
        let handle = self.open()?;
        // First, because deferred accesses may take long: an append does not wait for them.
        let _changes = self.rest().changes.write();
        // Not locked while the layout changes: the thread that serves packets does not wait for that.
        self.rest().end.lock().close();
        let mut layout = self.layout.write();
        let changed = change(&handle);
        let now_ms = coarse_ms();
        let len = self.read_len(&handle, now_ms);
        layout.windows.retain(|window| window.start() < len);
        layout.windows.iter().for_each(|window| window.forget_all(now_ms));
        drop(layout);
        let refused = self.rest().end.lock().reopen();
        refused.iter().for_each(|waker| waker());
        changed
    }

    /// Reads the file's length. If the system does not tell, the last one counts.
    pub fn read_len(&self, handle: &Handle, now_ms: u64) -> u64 {
        // A thread that has read an older length does not store it after another one has stored a newer one.
        let _reading = self.len_reading.lock();
        let known = self.len.load(Ordering::Relaxed);
        let read = || handle.len().unwrap_or(known);
        // A record that is being added is not there yet.
        let whole = self.rest.get().map_or_else(|| Some(read()), |rest| rest.append_progress.whole(read));
        let len = whole.unwrap_or(known);
        self.len.store(len, Ordering::Relaxed);
        if let Some(rest) = self.rest.get() {
            rest.published.set(len);
        }
        self.len_read_ms.store(now_ms, Ordering::Relaxed);
        len
    }

    /// The file's length; the last one that is known if it cannot be read.
    pub fn current_len(self: &Arc<OpenFile>) -> u64 {
        let read = self.handle().map(|handle| self.read_len(&handle, coarse_ms()));
        read.unwrap_or_else(|_| self.len.load(Ordering::Relaxed))
    }

    /// Whether a range lies within the file, by a length that was read lately.
    #[inline]
    fn is_within(&self, part: HostRange, now_ms: u64) -> bool {
        now_ms.wrapping_sub(self.len_read_ms.load(Ordering::Relaxed)) < LENGTH_MS_MAX
            && part.addr.saturating_add(part.len) <= self.len.load(Ordering::Relaxed)
    }

    /// Checks that a range does not reach beyond the file's end. Returns the handle. `None` while the layout changes.
    ///
    /// # Errors
    /// `OutOfRange`; `Device` without a descriptor.
    fn check_end(
        self: &Arc<OpenFile>,
        part: HostRange,
        now_ms: u64,
    ) -> Option<Result<Arc<Handle>, AccessError>> {
        Some(self.try_handle()?.and_then(|handle| {
            let is_within = self.is_within(part, now_ms)
                || part.addr.saturating_add(part.len) <= self.read_len(&handle, now_ms);
            if is_within { Ok(handle) } else { Err(AccessError::OutOfRange) }
        }))
    }

    /// Checks that a range does not reach beyond the file's end. While the layout changes, a deferred access finds that out.
    ///
    /// # Errors
    /// `OutOfRange`; `Device` without a descriptor.
    pub fn check(self: &Arc<OpenFile>, part: HostRange) -> Result<(), AccessError> {
        self.check_end(part, coarse_ms()).map_or(Ok(()), |checked| checked.map(drop))
    }

    /// Adds a deferred access. Returns its job if it need not wait.
    pub fn begin_access(
        &self,
        range: HostRange,
        direction: Direction,
        make: impl FnOnce(u64) -> Job,
    ) -> Option<Job> {
        let mut pending = self.rest().pending.lock();
        self.pending_count.fetch_add(1, Ordering::Release);
        pending.add(range, direction == Direction::Read, make)
    }

    /// Ends a deferred access. Returns the jobs that need not wait any more.
    pub fn end_access(&self, number: u64) -> Vec<Job> {
        let mut pending = self.rest().pending.lock();
        self.pending_count.fetch_sub(1, Ordering::Release);
        pending.remove(number)
    }

    /// What same-host peers need to map a part of the file. `None` if they cannot.
    pub fn shared_file(self: &Arc<OpenFile>, extent: HostRange, is_writable: bool) -> Option<SharedFile> {
        let handle = self.handle().ok()?;
        let len = self.read_len(&handle, coarse_ms());
        let file = handle.open_anew(is_writable).ok()?;
        let (lengths, number) = self.rest().published.publish(&self.shared.lengths, len)?;
        let room = if self.page_bytes() == PAGE_BYTES {
            len.saturating_mul(4).clamp(PEER_BYTES[0], PEER_BYTES[1]).max(len.min(PEER_BYTES[1]))
        } else {
            // A mapping beyond the end of a file of huge pages would make it longer.
            len
        };
        let range = HostRange { addr: extent.addr, len: extent.len.min(room.checked_sub(extent.addr)?) };
        (range.len > 0).then_some(SharedFile { file, range, lengths, number })
    }

    /// Adds a record at the end of the file, after those of all other threads, and returns its offset.
    ///
    /// # Errors
    /// `Permission` if the file is not open for writing; `NoSpace`, also beyond the longest file that may be; `NotReady` while the layout
    /// changes, after which the waker is called; `Device`. No part of the record is in the file then.
    pub fn append(self: &Arc<OpenFile>, data: &[u8], waker: &Waker) -> Result<u64, AccessError> {
        let mut end = self.rest().end.lock();
        end.admit(waker)?;
        let handle = self.handle()?;
        if !handle.traits.is_writable {
            return Err(AccessError::Permission);
        }
        let appended = end.append(&handle, data, &self.rest().append_progress);
        self.read_len(&handle, coarse_ms());
        if appended.is_ok() && !data.is_empty() {
            count(&self.shared.counters.appends, 1);
            count(&self.shared.counters.appended_bytes, data.len() as u64);
        }
        appended.map_err(|error| match error.kind() {
            io::ErrorKind::FileTooLarge => AccessError::NoSpace,
            _ => self.error_of(&error),
        })
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
                tracing::warn!(%error, "an access to a region's file failed");
                AccessError::Device
            }
        }
    }
}

/// Whether the process or the system has no descriptor left.
pub fn is_full(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        self.shared.counters.open_files.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Holder for OpenFile {
    fn try_park(&self, tables: &Arc<Tables>) -> (Fate, Option<Arc<Handle>>) {
        let Some(mut layout) = self.layout.try_write() else { return (Fate::Stays, None) };
        let Holding::Open(handle, _) = &layout.holding else { return (Fate::Gone, None) };
        if self.is_handle_used.swap(false, Ordering::Relaxed) {
            return (Fate::Stays, None);
        }
        let Some(parked) = tables.park(&handle.file) else { return (Fate::Stays, None) };
        let handle = handle.clone();
        layout.holding = Holding::Parked(parked);
        (Fate::Gone, Some(handle))
    }
}
