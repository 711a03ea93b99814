//! Truncating, punching, and writing beyond the end. When a call returns, no access to the old layout runs: it has ended, or finds the new one.

use std::io;

use crate::region::FileRegion;
use crate::sys::Handle;

/// Why a file's layout was not changed.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// The region's descriptor was not open for writing.
    #[error("the file is not open for writing")]
    NotWritable,
    /// The system refused it.
    #[error("the file system refused it: {0}")]
    System(#[from] io::Error),
}

impl FileRegion {
    /// Makes the file this many bytes long. Accesses beyond a new end are refused from now on.
    ///
    /// # Errors
    /// See [`LayoutError`]; `ResourceBusy` if a same-host peer does not end an access.
    pub fn truncate(&self, len: u64) -> Result<(), LayoutError> {
        self.change_layout(len, |handle| handle.set_len(len))
    }

    /// Makes the file at least this many bytes long. A record that is appended meanwhile stays.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn grow(&self, len: u64) -> Result<(), LayoutError> {
        self.change_layout(u64::MAX, |handle| if handle.len()? < len { handle.set_len(len) } else { Ok(()) })
    }

    /// Gives the blocks of a range back. It reads as zeros then, and the file keeps its length.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn punch_hole(&self, offset: u64, len: u64) -> Result<(), LayoutError> {
        // No byte of the file moves: every mapping shows the hole once it is there.
        self.change_layout(u64::MAX, |handle| handle.punch_hole(offset, len))
    }

    /// Writes bytes, also beyond the file's end, while no record is appended: a record comes to lie before or behind them.
    ///
    /// # Errors
    /// See [`LayoutError`]. A part of the bytes may be written then.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), LayoutError> {
        self.change_layout(u64::MAX, |handle| handle.write_all(offset, data).map_err(|(_, error)| error))
    }

    fn change_layout(
        &self,
        end_after: u64,
        change: impl FnOnce(&Handle) -> io::Result<()>,
    ) -> Result<(), LayoutError> {
        if !self.is_writable() {
            return Err(LayoutError::NotWritable);
        }
        Ok(self.file().change_layout(end_after, change)?)
    }
}
