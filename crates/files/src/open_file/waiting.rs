//! Accesses that may wait for a disk: those of workers, and of local work requests.

use std::sync::Arc;

use terrace_hostmem::{AtomicOp, HostRange, fault};
use terrace_memory::AccessError;

use super::{Kind, OpenFile};
use crate::job::Cancellation;
use crate::sys::{Handle, Mapping, coarse_ms};

/// Bytes of an aligned part that a deferred write has read at a time.
const BRING_BYTES: usize = 64 << 10;

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
        // SAFETY: the mapping lives while the copy runs, and no Rust reference to it exists.
        let in_mapping = |addr| unsafe { fault::copy_to(addr, data) };
        self.change_waiting(part, cancellation, in_mapping, |handle| {
            // A file system without shared mappings. If another program makes the file shorter at this moment, the write
            // makes it longer again, as any program's write would.
            handle.write_all(addr, data).map_err(|(_, error)| self.error_of(&error))
        })
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
        let in_mapping = |addr| unsafe { fault::atomic(addr, op) };
        self.change_waiting(part, cancellation, in_mapping, |_| Err(AccessError::Device))
    }

    /// Changes a range in a mapping of its own: unlike a system call, that never makes the file longer. Calls `unmapped`
    /// instead if the file cannot be mapped. The layout does not change by our own calls until either has returned.
    fn change_waiting<R>(
        self: &Arc<OpenFile>,
        part: HostRange,
        cancellation: &Cancellation,
        in_mapping: impl FnOnce(u64) -> Result<R, fault::Fault>,
        unmapped: impl FnOnce(&Handle) -> Result<R, AccessError>,
    ) -> Result<R, AccessError> {
        let _changes = self.rest().changes.read();
        let handle = self.handle()?;
        if !handle.traits.is_writable {
            return Err(AccessError::Permission);
        }
        let end = part.addr.saturating_add(part.len);
        if self.read_len(&handle, coarse_ms()) < end {
            return Err(AccessError::OutOfRange);
        }
        self.bring(&handle, part)?;
        let start = part.addr - part.addr % self.page_bytes();
        let Ok(mapping) = Mapping::new(&handle, start, (end - start).next_multiple_of(self.page_bytes()))
        else {
            return cancellation.unless_cancelled(|| unmapped(&handle)).ok_or(AccessError::Fault)?;
        };
        let changed = cancellation.unless_cancelled(|| in_mapping(mapping.addr() + (part.addr - start)));
        changed.ok_or(AccessError::Fault)?.map_err(|fault::Fault| {
            let is_there = self.read_len(&handle, coarse_ms()) >= end;
            if is_there { AccessError::NoSpace } else { AccessError::OutOfRange }
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use crate::{FileExtent, Files, FilesConfig};

    use super::*;

    /// More bytes than a process has addresses: such a range cannot be mapped.
    const LEN: u64 = 1 << 50;

    #[test]
    fn a_change_of_the_layout_waits_for_a_write_to_a_file_that_cannot_be_mapped() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(LEN).unwrap();
        let files = Files::new(&FilesConfig::default());
        let region = files.open(file.as_fd(), true, FileExtent::WHOLE).unwrap();
        let written = region.file().clone();
        let (changed, has_changed) = channel();
        let range = HostRange { addr: 0, len: LEN };
        let in_mapping = |_| panic!("a mapping of {LEN} bytes");
        let outcome = written.change_waiting(range, &Cancellation::default(), in_mapping, |_| {
            std::thread::spawn(move || changed.send(region.truncate(0)));
            let ended = has_changed.recv_timeout(Duration::from_millis(200));
            assert!(ended.is_err(), "the file is shorter, and the write would make it longer again");
            Ok(())
        });
        assert_eq!(outcome, Ok(()));
        has_changed.recv().unwrap().unwrap();
        assert_eq!(file.metadata().unwrap().len(), 0);
    }
}
