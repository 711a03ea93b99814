//! Accesses that may wait for a disk: those of workers, and of local work requests.

use std::sync::Arc;

use terrace_hostmem::{AtomicOp, HostRange, fault};
use terrace_memory::AccessError;

use super::{Kind, OpenFile};
use crate::job::Cancellation;
use crate::sys::{Handle, Mapping, coarse_ms};

/// Bytes of an aligned part that a deferred write has read at a time.
const BRING_BYTES: usize = 64 << 10;

/// Why a range was not changed in a mapping.
enum Unmapped {
    /// The file cannot be mapped.
    NotMappable(Arc<Handle>),
    /// The access fails.
    Failed(AccessError),
}

impl OpenFile {
    /// Reads a range, and waits for the disk.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Device`.
    pub fn read_waiting(self: &Arc<OpenFile>, part: HostRange, out: &mut [u8]) -> Result<(), AccessError> {
        let _changes = self.rest().changes.read();
        self.handle()?.read_exact(part.addr, out).map_err(|error| self.error_of(&error))
    }

    /// Writes to a range, and waits for the disk.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end; `Permission` if the file is not open for writing; `NoSpace`; `Device`; `Fault` if it is
    /// cancelled.
    pub fn write_waiting(
        self: &Arc<OpenFile>,
        addr: u64,
        data: &[u8],
        cancellation: &Cancellation,
    ) -> Result<(), AccessError> {
        let part = HostRange { addr, len: data.len() as u64 };
        // SAFETY: the mapping lives while `act` runs, and no Rust reference to it exists.
        let written = self.change_waiting(part, cancellation, |addr| unsafe { fault::copy_to(addr, data) });
        match written {
            // A file system without shared mappings. If somebody makes the file shorter at this moment, the write makes
            // it longer again, as any program's write would.
            Err(Unmapped::NotMappable(handle)) => {
                let written = cancellation.unless_cancelled(|| handle.write_all(addr, data));
                written.ok_or(AccessError::Fault)?.map_err(|(_, error)| self.error_of(&error))
            }
            Err(Unmapped::Failed(error)) => Err(error),
            Ok(()) => Ok(()),
        }
    }

    /// Performs an atomic operation on 8 aligned bytes, and waits for the disk.
    ///
    /// # Errors
    /// As for [`OpenFile::write_waiting`]; `Device`, too, if the file cannot be mapped.
    pub fn atomic_waiting(
        self: &Arc<OpenFile>,
        addr: u64,
        op: AtomicOp,
        cancellation: &Cancellation,
    ) -> Result<u64, AccessError> {
        let part = HostRange { addr, len: 8 };
        // SAFETY: as for a write; the mapping begins at a page.
        let changed = self.change_waiting(part, cancellation, |addr| unsafe { fault::atomic(addr, op) });
        changed.map_err(|error| match error {
            Unmapped::NotMappable(_) => AccessError::Device,
            Unmapped::Failed(error) => error,
        })
    }

    /// Changes a range in a mapping of its own: unlike a system call, that never makes the file longer.
    fn change_waiting<R>(
        self: &Arc<OpenFile>,
        part: HostRange,
        cancellation: &Cancellation,
        act: impl FnOnce(u64) -> Result<R, fault::Fault>,
    ) -> Result<R, Unmapped> {
        let _changes = self.rest().changes.read();
        let handle = self.handle().map_err(Unmapped::Failed)?;
        if !handle.traits.is_writable {
            return Err(Unmapped::Failed(AccessError::Permission));
        }
        let end = part.addr.saturating_add(part.len);
        if self.read_len(&handle, coarse_ms()) < end {
            return Err(Unmapped::Failed(AccessError::OutOfRange));
        }
        self.bring(&handle, part).map_err(Unmapped::Failed)?;
        let start = part.addr - part.addr % self.page_bytes();
        let Ok(mapping) = Mapping::new(&handle, start, (end - start).next_multiple_of(self.page_bytes()))
        else {
            return Err(Unmapped::NotMappable(handle));
        };
        let changed = cancellation.unless_cancelled(|| act(mapping.addr() + (part.addr - start)));
        changed.ok_or(Unmapped::Failed(AccessError::Fault))?.map_err(|fault::Fault| {
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
}
