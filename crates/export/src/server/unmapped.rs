//! A region that same-host peers do not map: every access passes through this process.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use terrace_files::FileRegion;
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, LocalCopies, Pager, PeerTables, SharedFile, Transfer, Translation, Waker};

/// A file that its client does not map.
#[derive(Debug)]
pub struct Unmapped {
    pub region: Arc<FileRegion>,
    /// It is open for appending. An APPEND needs a key that permits remote writes, so the pager refuses the others.
    pub is_append_only: bool,
}

impl Translation for Unmapped {
    fn range(&self) -> HostRange {
        self.region.range()
    }

    fn unit_bytes(&self) -> u64 {
        self.region.unit_bytes()
    }

    fn is_present(&self, part: HostRange) -> bool {
        self.region.is_present(part)
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        Translation::read(&*self.region, part, out)
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        if self.is_append_only {
            return Some(Err(AccessError::Permission));
        }
        Translation::write(&*self.region, addr, data)
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        if self.is_append_only {
            return Some(Err(AccessError::Permission));
        }
        Translation::atomic(&*self.region, addr, op)
    }

    fn count(&self, part: HostRange, is_hit: bool) {
        self.region.count(part, is_hit);
    }

    fn bitmap(&self) -> &[AtomicU64] {
        self.region.bitmap()
    }

    fn versions(&self) -> HostRange {
        self.region.versions()
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        None
    }

    fn shared_file(&self, _: bool) -> Option<SharedFile> {
        None
    }

    fn is_open_to_peers(&self) -> bool {
        false
    }

    fn local_copies(&self) -> Option<&dyn LocalCopies> {
        self.region.local_copies()
    }

    fn check(&self, part: HostRange) -> Result<(), AccessError> {
        self.region.check(part)
    }

    fn forget_copies(&self) {
        self.region.forget_copies();
    }
}

impl Pager for Unmapped {
    fn translation(&self) -> &dyn Translation {
        self
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Pager::read(&*self.region, range, waker)
    }

    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if self.is_append_only {
            return Err(AccessError::Permission);
        }
        Pager::write(&*self.region, addr, data, waker)
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if self.is_append_only {
            return Err(AccessError::Permission);
        }
        Pager::atomic(&*self.region, addr, op, waker)
    }

    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.region.flush(range, waker)
    }

    fn append(&self, data: &[u8], commit: bool, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.region.append(data, commit, waker)
    }
}
