//! What the NIC sees of a file.

use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, LocalCopies, Pager, PeerTables, SharedFile, Transfer, Translation, Waker};

use crate::job::{Cancellation, DeferredAccess, FileTransfer, InFlight, Task};
use crate::open_file::{Direction, FILE_BYTES_MAX, OpenFile};
use crate::workers::Job;

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
#[derive(Debug)]
pub struct FileRegion {
    file: Arc<OpenFile>,
    extent: FileExtent,
    is_writable: bool,
    /// Made for the first deferred access: there may be many regions.
    in_flight: OnceLock<Arc<InFlight>>,
}

/// The room for a deferred access. It is given back when the access has ended, or was not begun.
struct Ticket<'a> {
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
        Arc::new(FileRegion { file, extent, is_writable, in_flight: OnceLock::new() })
    }

    pub(crate) fn file(&self) -> &Arc<OpenFile> {
        &self.file
    }

    /// Whether it was opened for writing.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// The part of the file.
    pub fn extent(&self) -> FileExtent {
        self.extent
    }

    /// The length of the file now, in bytes.
    pub fn file_len(&self) -> u64 {
        self.file.current_len()
    }

    /// The first range with data from an offset on, which may have zeros in it; empty and at the end of the file if only a hole is
    /// left.
    ///
    /// # Errors
    /// The system's.
    pub fn next_data(&self, offset: u64) -> io::Result<Range<u64>> {
        self.file.open()?.next_data(offset)
    }

    /// Waits until no deferred access runs, for as long as the disk takes. The caller has taken the region from the NIC, so that
    /// none begins.
    pub fn wait_idle(&self) {
        if let Some(in_flight) = self.in_flight.get() {
            in_flight.wait_idle();
        }
    }

    /// The same, until the deadline at most. Returns whether no deferred access runs.
    pub fn wait_idle_until(&self, deadline: Instant) -> bool {
        self.in_flight.get().is_none_or(|in_flight| in_flight.wait_idle_until(deadline))
    }

    /// Makes room for a deferred access that holds this many bytes.
    fn admit(&self, bytes: u64, waker: &Waker) -> Result<Ticket<'_>, AccessError> {
        self.file.shared().workers.admit(bytes, waker)?;
        Ok(Ticket { region: self, bytes })
    }

    /// Has a worker make an access that there is room for.
    fn defer(
        &self,
        ticket: Ticket<'_>,
        range: HostRange,
        direction: Direction,
        task: Task,
        waker: &Waker,
    ) -> Arc<dyn Transfer> {
        let transfer = Arc::new(FileTransfer::default());
        let (bytes, waker, ended) = (ticket.bytes, waker.clone(), transfer.clone());
        let (file, in_flight) = (self.file.clone(), self.in_flight.get_or_init(Arc::default).clone());
        // The job gives the room back.
        std::mem::forget(ticket);
        in_flight.begin();
        let make = |number| -> Job {
            let access =
                DeferredAccess { file, in_flight, number, range, task, bytes, transfer: ended, waker };
            Box::new(move || access.run())
        };
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

    fn prefetch(&self, addr: u64) {
        self.file.prefetch(addr);
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

    fn shared_file(&self, is_writable: bool) -> Option<SharedFile> {
        self.file.shared_file(self.extent.range()?, is_writable)
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
        self.file
            .write(addr, data)
            .unwrap_or_else(|| self.file.write_waiting(addr, data, &Cancellation::default()))
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
        if self.extent != FileExtent::WHOLE || !self.is_writable {
            return Err(AccessError::Permission);
        }
        if !commit {
            let offset = self.file.append(data, waker)?;
            return Ok(Arc::new(FileTransfer::ended(offset.to_ne_bytes().into())));
        }
        // A record that is refused for lack of room must not have been written.
        let ticket = self.admit(0, waker)?;
        let offset = self.file.append(data, waker)?;
        let range = HostRange { addr: offset, len: 0 };
        Ok(self.defer(ticket, range, Direction::Read, Task::Commit(offset), waker))
    }
}
