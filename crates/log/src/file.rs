//! The files that logs are in: of one export, or replicated over several.

use terrace_export::{RemoteFile, ReplicaReader, ReplicatedFile};
use terrace_sync::Mutex;

use crate::LogError;

/// A file from which a log is read.
pub trait ReadLog {
    /// Reads bytes from an offset on, fewer if the file ends before. Returns how many.
    ///
    /// # Errors
    /// Those of the file.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, LogError>;
}

/// A file to which a log is written.
pub trait WriteLog: ReadLog {
    /// Appends a record, whole and once; with `commit` it and all before it are persistent. Returns its offset.
    ///
    /// # Errors
    /// Those of the file.
    fn append(&self, record: &[u8], commit: bool) -> Result<u64, LogError>;

    /// Writes bytes within the file.
    ///
    /// # Errors
    /// Those of the file.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), LogError>;

    /// Makes everything persistent that was acknowledged before.
    ///
    /// # Errors
    /// Those of the file.
    fn commit(&self) -> Result<(), LogError>;

    /// Gives the blocks of a range back.
    ///
    /// # Errors
    /// Those of the file.
    fn punch(&self, offset: u64, len: u64) -> Result<(), LogError>;

    /// The length of the file in bytes.
    ///
    /// # Errors
    /// Those of the file.
    fn len_bytes(&self) -> Result<u64, LogError>;
}

impl ReadLog for RemoteFile {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, LogError> {
        Ok(RemoteFile::read_at(self, offset, into)?)
    }
}

impl WriteLog for RemoteFile {
    fn append(&self, record: &[u8], commit: bool) -> Result<u64, LogError> {
        Ok(if commit { self.append_commit(record)? } else { RemoteFile::append(self, record)? })
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), LogError> {
        Ok(RemoteFile::write_at(self, offset, data)?)
    }

    fn commit(&self) -> Result<(), LogError> {
        Ok(RemoteFile::commit(self)?)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), LogError> {
        Ok(RemoteFile::punch(self, offset, len)?)
    }

    fn len_bytes(&self) -> Result<u64, LogError> {
        Ok(self.attributes()?.len)
    }
}

impl ReadLog for Mutex<ReplicaReader> {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, LogError> {
        Ok(self.lock().read_at(offset, into)?)
    }
}

impl ReadLog for Mutex<ReplicatedFile> {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<usize, LogError> {
        Ok(self.lock().read_at(offset, into)?)
    }
}

impl WriteLog for Mutex<ReplicatedFile> {
    fn append(&self, record: &[u8], commit: bool) -> Result<u64, LogError> {
        let mut file = self.lock();
        Ok(if commit { file.append_commit(record)? } else { file.append(record)? })
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), LogError> {
        Ok(self.lock().write_at(offset, data)?)
    }

    fn commit(&self) -> Result<(), LogError> {
        Ok(self.lock().commit()?)
    }

    fn punch(&self, offset: u64, len: u64) -> Result<(), LogError> {
        Ok(self.lock().punch(offset, len)?)
    }

    fn len_bytes(&self) -> Result<u64, LogError> {
        Ok(self.lock().len())
    }
}
