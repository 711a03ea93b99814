//! What the NIC sees of a file.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, LocalCopies, Pager, PeerTables, Transfer, Translation, Waker};
use terrace_sync::{Condvar, Mutex};

use crate::job::{FileTransfer, Job, Task};
use crate::open_file::{Direction, OpenFile};

/// The longest file, in bytes.
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// The part of a file that is a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Where in the file it begins.
    pub offset: u64,
    /// Its length in bytes, which may reach beyond the end of the file; `None` for all of the file from the offset on, as
    /// far as the file reaches at the time of an access.
    pub len: Option<u64>,
}

impl FileExtent {
    /// The whole file, however long it becomes.
    pub const WHOLE: FileExtent = FileExtent { offset: 0, len: None };

    /// The offsets in the file. `None` if it ends beyond any file.
    pub fn range(self) -> Option<HostRange> {
        let rest = FILE_BYTES_MAX.checked_sub(self.offset)?;
        let len = self.len.unwrap_or(rest);
        (len <= rest).then_some(HostRange { addr: self.offset, len })
    }
}

/// A memory region that is a file, or a part of it. Its addresses are offsets in the file.
pub struct FileRegion {
    this: Weak<FileRegion>,
    file: Arc<OpenFile>,
    extent: FileExtent,
    is_writable: bool,
    /// Deferred accesses that have not ended.
    jobs: Mutex<u32>,
    /// There are none.
    is_idle: Condvar,
}

impl fmt::Debug for FileRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileRegion").field("extent", &self.extent).field("jobs", &*self.jobs.lock()).finish_non_exhaustive()
    }
}

/// The room for a deferred access. It is given back when the access has ended, or was not begun.
pub(crate) struct Ticket<'a> {
    region: &'a FileRegion,
    bytes: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.region.file.shared().workers.release(self.bytes);
    }
}

impl FileRegion {
    pub(crate) fn new(file: Arc<OpenFile>, is_writable: bool, extent: FileExtent) -> Arc<FileRegion> {
        Arc::new_cyclic(|this| FileRegion {
            this: this.clone(),
            file,
            extent,
            is_writable,
            jobs: Mutex::new(0),
            is_idle: Condvar::new(),
        })
    }

    pub(crate) fn file(&self) -> &Arc<OpenFile> {
        &self.file
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Whether it is all of the file, however long that is.
    pub(crate) fn is_whole(&self) -> bool {
        self.extent == FileExtent::WHOLE
    }

    /// The part of the file.
    pub fn extent(&self) -> FileExtent {
        self.extent
    }

    /// The length of the file now, in bytes.
    pub fn file_len(&self) -> u64 {
        self.file.read_len(&self.file.handle(), crate::sys::coarse_ms())
    }

    /// Waits until no deferred access runs. The caller has taken the region from the NIC, so that none begins.
    pub fn wait_idle(&self) {
        let mut jobs = self.jobs.lock();
        while *jobs > 0 {
            self.is_idle.wait(&mut jobs);
        }
    }

    pub(crate) fn end_job(&self) {
        let mut jobs = self.jobs.lock();
        *jobs -= 1;
        if *jobs == 0 {
            self.is_idle.notify_all();
        }
    }

    /// Makes room for a deferred access that holds this many bytes.
    pub(crate) fn admit(&self, bytes: u64, waker: &Waker) -> Result<Ticket<'_>, AccessError> {
        self.file.shared().workers.admit(bytes, waker)?;
        Ok(Ticket { region: self, bytes })
    }

    /// Has a worker make an access that there is room for.
    pub(crate) fn defer(
        &self,
        ticket: Ticket<'_>,
        range: HostRange,
        direction: Direction,
        task: Task,
        waker: &Waker,
    ) -> Arc<dyn Transfer> {
        let transfer = Arc::new(FileTransfer::default());
        let Some(region) = self.this.upgrade() else { unreachable!("borrowed from its own reference") };
        let (bytes, waker, ended) = (ticket.bytes, waker.clone(), transfer.clone());
        // The job gives the room back.
        std::mem::forget(ticket);
        *self.jobs.lock() += 1;
        let make = |number| Job { region, number, range, task, bytes, transfer: ended, waker };
        if let Some(job) = self.file.begin_access(range, direction, make) {
            self.file.shared().workers.run(job);
        }
        transfer
    }
}

impl Translation for FileRegion {
    fn range(&self) -> HostRange {
        HostRange { addr: 0, len: FILE_BYTES_MAX }
    }

    fn unit_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn is_present(&self, part: HostRange) -> bool {
        self.file.is_present(part)
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        self.file.read(part, out)
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        self.file.write(addr, data)
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        self.file.atomic(addr, op)
    }

    /// The kernel has counters of its own for the pages of files.
    fn count(&self, _: HostRange, _: bool) {}

    fn bitmap(&self) -> &[AtomicU64] {
        &[]
    }

    fn versions(&self) -> HostRange {
        HostRange { addr: 0, len: 0 }
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        None
    }

    fn local_copies(&self) -> Option<&dyn LocalCopies> {
        Some(self)
    }

    fn check(&self, part: HostRange) -> Result<(), AccessError> {
        self.file.check(part)
    }

    /// The child has no regions that are files.
    fn forget_copies(&self) {}
}

impl LocalCopies for FileRegion {
    fn read_now(&self, part: HostRange, out: &mut [u8]) -> Result<(), AccessError> {
        self.file.read(part, out).unwrap_or_else(|| self.file.read_waiting(part, out))
    }

    fn write_now(&self, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        self.file.write(addr, data).unwrap_or_else(|| self.file.write_waiting(addr, data))
    }
}

impl Pager for FileRegion {
    fn translation(&self) -> &dyn Translation {
        self
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.file.check(range)?;
        let ticket = self.admit(range.len, waker)?;
        Ok(self.defer(ticket, range, Direction::Read, Task::Read, waker))
    }

    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        let range = HostRange { addr, len: data.len() as u64 };
        self.file.check(range)?;
        let ticket = self.admit(range.len, waker)?;
        Ok(self.defer(ticket, range, Direction::Write, Task::Write(data.to_vec()), waker))
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        let range = HostRange { addr, len: 8 };
        self.file.check(range)?;
        let ticket = self.admit(range.len, waker)?;
        Ok(self.defer(ticket, range, Direction::Write, Task::Atomic(op), waker))
    }

    fn flush(&self, _: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        let ticket = self.admit(0, waker)?;
        let range = Translation::range(self);
        Ok(self.defer(ticket, range, Direction::Read, Task::Flush, waker))
    }

    fn append(&self, data: &[u8], commit: bool, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.append_record(data, commit, waker)
    }
}
