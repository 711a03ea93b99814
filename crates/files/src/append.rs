//! Records at the end of a file.

use std::sync::Arc;

use terrace_hostmem::HostRange;
use terrace_memory::{AccessError, Transfer, Waker};

use crate::job::{FileTransfer, Task};
use crate::open_file::Direction;
use crate::region::FileRegion;
use crate::sys::{Handle, coarse_ms};

/// Blocks are allocated this far ahead of the end, so that few appends allocate. They stay with the file.
const AHEAD_BYTES: u64 = 1 << 20;

/// The end of a file, locked while a record is added.
#[derive(Debug, Default)]
pub struct End {
    /// Blocks are allocated up to here, as far as we know.
    allocated: u64,
}

impl End {
    /// Allocates blocks for a record of `len` bytes at `start`, and for some after it. Without them the record is written
    /// all the same, or fails then.
    fn allocate(&mut self, handle: &Handle, start: u64, len: u64) {
        let end = start.saturating_add(len);
        if end > self.allocated {
            let bytes = len.max(AHEAD_BYTES);
            let is_done = handle.allocate(start, bytes).is_ok();
            // Where it is not possible, it is not tried for each record.
            self.allocated = if is_done { start.saturating_add(bytes) } else { end.saturating_add(AHEAD_BYTES) };
        }
    }

    /// Forgets what is allocated: the layout changes.
    pub fn forget(&mut self) {
        self.allocated = 0;
    }
}

impl FileRegion {
    /// Adds a record to the file: see `Pager::append`. Records of all queue pairs and regions of this process are written
    /// one after the other.
    pub(crate) fn append_record(
        &self,
        data: &[u8],
        commit: bool,
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        if !self.is_whole() {
            return Err(AccessError::Permission);
        }
        if !commit {
            let offset = self.write_at_end(data)?;
            return Ok(Arc::new(FileTransfer::ended(offset.to_ne_bytes().into())));
        }
        // What is refused for lack of room must not have been written.
        let ticket = self.admit(0, waker)?;
        let offset = self.write_at_end(data)?;
        let range = HostRange { addr: offset, len: 0 };
        Ok(self.defer(ticket, range, Direction::Read, Task::Commit(offset), waker))
    }

    /// Writes a record at the end of the file and returns its offset. A record that is not written as a whole is taken
    /// back.
    fn write_at_end(&self, data: &[u8]) -> Result<u64, AccessError> {
        let file = self.file();
        let mut end = file.end.lock();
        let handle = file.handle();
        if !handle.is_writable {
            return Err(AccessError::Permission);
        }
        // Not the length that is known: another program may have appended.
        let start = handle.len().map_err(|error| file.error_of(&error))?;
        let is_possible = start.checked_add(data.len() as u64).is_some_and(|end| i64::try_from(end).is_ok());
        if !is_possible {
            return Err(AccessError::OutOfRange);
        }
        end.allocate(&handle, start, data.len() as u64);
        let written = handle.write_all(start, data);
        if let Err(error) = written {
            end.forget();
            if let Err(error) = handle.set_len(start) {
                tracing::error!(%error, "a part of a record stays at the end of a file");
            }
            file.read_len(&handle, coarse_ms());
            return Err(file.error_of(&error));
        }
        file.read_len(&handle, coarse_ms());
        Ok(start)
    }
}
