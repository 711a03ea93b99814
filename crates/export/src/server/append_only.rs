//! A region to which records can be appended, and that cannot be written by offset.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use terrace_files::FileRegion;
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, LocalCopies, Pager, PeerTables, SharedFile, Transfer, Translation, Waker};

/// A file that is open for appending. An APPEND needs a key that permits remote writes, so the pager refuses the others.
#[derive(Debug)]
pub struct AppendOnly(pub Arc<FileRegion>);

impl Translation for AppendOnly {
    fn range(&self) -> HostRange {
        self.0.range()
    }

    fn unit_bytes(&self) -> u64 {
        self.0.unit_bytes()
    }

    fn is_present(&self, part: HostRange) -> bool {
        self.0.is_present(part)
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        Translation::read(&*self.0, part, out)
    }

    fn write(&self, _: u64, _: &[u8]) -> Option<Result<(), AccessError>> {
        Some(Err(AccessError::Permission))
    }

    fn atomic(&self, _: u64, _: AtomicOp) -> Option<Result<u64, AccessError>> {
        Some(Err(AccessError::Permission))
    }

    fn count(&self, part: HostRange, is_hit: bool) {
        self.0.count(part, is_hit);
    }

    fn bitmap(&self) -> &[AtomicU64] {
        self.0.bitmap()
    }

    fn versions(&self) -> HostRange {
        self.0.versions()
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        None
    }

    /// Same-host peers that map the file for writing could write anywhere.
    fn shared_file(&self, is_writable: bool) -> Option<SharedFile> {
        if is_writable { None } else { self.0.shared_file(false) }
    }

    fn local_copies(&self) -> Option<&dyn LocalCopies> {
        self.0.local_copies()
    }

    fn check(&self, part: HostRange) -> Result<(), AccessError> {
        self.0.check(part)
    }

    fn forget_copies(&self) {
        self.0.forget_copies();
    }
}

impl Pager for AppendOnly {
    fn translation(&self) -> &dyn Translation {
        self
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Pager::read(&*self.0, range, waker)
    }

    fn write(&self, _: u64, _: &[u8], _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Permission)
    }

    fn atomic(&self, _: u64, _: AtomicOp, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Permission)
    }

    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.0.flush(range, waker)
    }

    fn append(&self, data: &[u8], commit: bool, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.0.append(data, commit, waker)
    }
}
