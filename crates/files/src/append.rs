//! The end of a file, where records are added.

use std::io;

use crate::sys::Handle;

/// Blocks are allocated this far ahead of the end, so that few appends allocate. They stay with the file.
const AHEAD_BYTES: u64 = 1 << 20;

/// The end of a file, locked while a record is added.
#[derive(Debug, Default)]
pub struct End {
    /// Blocks are allocated up to here, as far as we know.
    allocated: u64,
}

impl End {
    /// Writes a record at the end of the file and returns its offset. A record that is not written as a whole is taken
    /// back.
    ///
    /// # Errors
    /// The system's; `FileTooLarge` for a record that would end beyond any file.
    pub fn append(&mut self, handle: &Handle, data: &[u8]) -> io::Result<u64> {
        // Not a length that is known: another program may have appended.
        let start = handle.len()?;
        let end = start.checked_add(data.len() as u64).filter(|&end| i64::try_from(end).is_ok());
        let end = end.ok_or(io::ErrorKind::FileTooLarge)?;
        self.allocate(handle, start, end);
        handle.write_all(start, data).inspect_err(|_| {
            self.forget();
            if let Err(error) = handle.set_len(start) {
                tracing::error!(%error, "a part of a record stays at the end of a file");
            }
        })?;
        Ok(start)
    }

    /// Allocates blocks for a record from `start` to `end`, and for some after it. Without them the record is written all
    /// the same, or fails then.
    fn allocate(&mut self, handle: &Handle, start: u64, end: u64) {
        if end > self.allocated {
            let bytes = (end - start).max(AHEAD_BYTES);
            let is_done = handle.allocate(start, bytes).is_ok();
            // Where it is not possible, it is not tried for each record.
            self.allocated =
                if is_done { start.saturating_add(bytes) } else { end.saturating_add(AHEAD_BYTES) };
        }
    }

    /// Forgets what is allocated: the layout changes.
    pub fn forget(&mut self) {
        self.allocated = 0;
    }
}
