//! Logs on several exports.

use terrace_export::{
    ReplicaAppender, ReplicaConfig, ReplicaError, ReplicaReader, ReplicaStatus, ReplicatedFile,
};
use terrace_sync::Mutex;

use crate::format::{DATA_BYTES_MAX, HEAD_BYTES, IDENTITY_BYTES, LogId, RECORDS_OFFSET, is_unfinished_head};
use crate::{Appender, Log, LogError, MODE};

/// A log on several exports, in a replicated file ([`ReplicatedFile`]). One process has it open to append at a time, with any
/// number of threads.
///
/// A record is acknowledged when all live members have it. An append fails with `NoMember` when all are lost: the record may be
/// there or not, and the log is open no more.
pub type ReplicatedLog = Log<Mutex<ReplicatedFile>>;

/// A log on several exports that is open for reading. It may be open to append in another process.
pub type ReplicatedLogReader = Log<Mutex<ReplicaReader>>;

impl Log<Mutex<ReplicatedFile>> {
    /// Opens a log on several exports to read and to append, or creates it, for which all of them are needed.
    ///
    /// # Errors
    /// `NotALog` if the replicated file is something else; as for [`ReplicatedFile::open`] and [`ReplicatedFile::create`].
    pub fn open_or_create(config: &ReplicaConfig) -> Result<ReplicatedLog, LogError> {
        let mut file = match ReplicatedFile::open(config) {
            Err(ReplicaError::NotFound(_)) => ReplicatedFile::create(config, MODE)?,
            opened => opened?,
        };
        let mut bytes = [0; RECORDS_OFFSET as usize];
        let len = file.read_at(0, &mut bytes)?;
        let id = match id_of(&bytes, file.len()) {
            Some(id) => id,
            // Its creator has ended before the head was there: no record was ever acknowledged.
            None if file.len() <= RECORDS_OFFSET && is_unfinished_head(&bytes[..len]) => {
                write_head(&mut file)?
            }
            None => return Err(LogError::NotALog),
        };
        Ok(Log { file: Mutex::new(file), id })
    }

    /// Several appends in flight, for one thread: each is acknowledged when all live members have it. The other calls of the log come
    /// after it.
    ///
    /// # Errors
    /// As for [`ReplicatedFile::appender`].
    pub fn appender(
        &mut self,
        depth: usize,
        data_bytes_max: usize,
    ) -> Result<Appender<ReplicaAppender<'_>>, LogError> {
        let data_bytes_max = data_bytes_max.min(DATA_BYTES_MAX);
        let appends = self.file.get_mut().appender(depth, data_bytes_max + HEAD_BYTES)?;
        Ok(Appender::new(appends, self.id, data_bytes_max))
    }

    /// The members of the replicated file, and why other exports are none.
    pub fn status(&self) -> ReplicaStatus {
        self.file.lock().status()
    }

    /// Copies the log to the exports that are no members, and admits them. Appends wait meanwhile.
    ///
    /// # Errors
    /// As for [`ReplicatedFile::resynchronize`].
    pub fn resynchronize(&self) -> Result<(), LogError> {
        Ok(self.file.lock().resynchronize()?)
    }

    /// Makes everything persistent and releases the log. It is opened fast then.
    ///
    /// # Errors
    /// As for [`ReplicatedFile::close`].
    pub fn close(self) -> Result<(), LogError> {
        Ok(self.file.into_inner().close()?)
    }
}

/// The id of a log whose file begins so and has so many bytes. `None` if its head is not whole.
fn id_of(bytes: &[u8], file_len: u64) -> Option<LogId> {
    LogId::parse(bytes.first_chunk()?).filter(|_| file_len >= RECORDS_OFFSET)
}

/// Makes an empty log of a file without records.
fn write_head(file: &mut ReplicatedFile) -> Result<LogId, LogError> {
    let id = LogId(rand::random());
    let mut head = id.emit().to_vec();
    head.resize(RECORDS_OFFSET as usize, 0);
    file.truncate(0)?;
    file.append_commit(&head)?;
    Ok(id)
}

impl Log<Mutex<ReplicaReader>> {
    /// Opens a log on several exports for reading. With `permits_stale` members that do not answer may have newer records.
    ///
    /// # Errors
    /// `NotALog`; as for [`ReplicatedFile::open_read`].
    pub fn open_read(config: &ReplicaConfig, permits_stale: bool) -> Result<ReplicatedLogReader, LogError> {
        let mut file = ReplicatedFile::open_read(config, permits_stale)?;
        let mut head = [0; IDENTITY_BYTES];
        file.read_at(0, &mut head)?;
        let id = id_of(&head, file.len()).ok_or(LogError::NotALog)?;
        Ok(Log { file: Mutex::new(file), id })
    }

    /// Finds the newest epoch and its members again: later reads see all that was acknowledged before.
    ///
    /// # Errors
    /// As for [`ReplicaReader::refresh`].
    pub fn refresh(&self) -> Result<(), LogError> {
        Ok(self.file.lock().refresh()?)
    }
}
