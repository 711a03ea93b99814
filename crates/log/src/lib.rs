//! A log in a file of another host (FileMR, NSDI'20, section 5.2), over [`terrace_export`]. Records are appended by one
//! one-sided request each, by any number of clients; the server's program takes no part.
//!
//! ```no_run
//! use terrace_export::{Client, ClientConfig};
//! use terrace_log::RemoteLog;
//!
//! let client = Client::connect(&ClientConfig::new("192.0.2.1:7475".parse()?))?;
//! let log = RemoteLog::open_or_create(&client, client.root(), "events".as_ref())?;
//! let position = log.append_commit(b"begun")?;
//! assert_eq!(log.read(position)?, b"begun");
//! for entry in log.entries(log.start()?) {
//!     println!("{} bytes at {:?}", entry?.data.len(), position);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `format` | the bytes of the file |
//! | `file` | what a log needs of a file, and the kinds of files that have it |
//! | `replicated` | logs on several exports |
//! | `entries` | records in order, and what to do behind a torn one |
//! | `appender` | several appends in flight |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod appender;
mod entries;
mod file;
mod format;
mod replicated;

use std::ffi::{OsStr, OsString};

use rustix::io::Errno;
use terrace_export::{Client, ExportError, FileId, OpenAccess, RemoteFile, RenameMode, ReplicaError};

pub use appender::{Appended, Appender, RemoteAppends};
pub use entries::{Entries, Entry};
use file::{ReadLog, WriteLog};
pub use format::DATA_BYTES_MAX;
use format::{Found, HEAD_BYTES, IDENTITY_BYTES, LogId, RECORDS_OFFSET, START_BYTES, START_SLOTS, Start};
pub use replicated::{ReplicatedLog, ReplicatedLogReader};

/// The rights of a new log.
const MODE: u32 = 0o644;

/// The place of a record in its log. Later records have higher positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub u64);

/// Why an operation on a log failed.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The export refuses, or cannot be reached.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The replicated file of the log cannot be accessed.
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    /// The file is no log.
    #[error("the file is no log")]
    NotALog,
    /// No record begins there.
    #[error("no record begins at {}", .0.0)]
    NoRecord(Position),
    /// The log begins behind that.
    #[error("the log begins at {}", .0.0)]
    Trimmed(Position),
    /// The record that begins there was read before, and is not there any more: the end of the file was cut, and perhaps written anew.
    #[error("the record at {} was replaced since it was read", .0.0)]
    Changed(Position),
    /// The record, or records that are appended together, have more than [`DATA_BYTES_MAX`] bytes, heads between them included.
    #[error("a record has at most {DATA_BYTES_MAX} bytes, and so have records that are appended together")]
    TooLong,
}

impl LogError {
    fn is_errno(&self, errno: Errno) -> bool {
        matches!(self, LogError::Export(ExportError::Os(found)) if *found == errno.raw_os_error())
    }
}

/// An open log in a file of the type `F`. It may be used by several threads.
pub struct Log<F> {
    file: F,
    id: LogId,
}

/// A log on one export. Several clients may have it open.
pub type RemoteLog = Log<RemoteFile>;

impl Log<RemoteFile> {
    /// Creates a log. It has its name when it is complete, so no client ever opens a part of one.
    ///
    /// # Errors
    /// `Export` with `EEXIST` if the name is taken; others of the export.
    pub fn create(client: &Client, parent: FileId, name: &OsStr) -> Result<RemoteLog, LogError> {
        let id = LogId(rand::random());
        let mut draft = OsString::from(".");
        draft.push(name);
        draft.push(format!(".{:016x}", id.0));
        let access = OpenAccess::READ | OpenAccess::WRITE;
        let file = client.create(parent, &draft, MODE, access, true)?;
        let made = file
            .write_at(0, &id.emit())
            .and_then(|()| file.grow(RECORDS_OFFSET))
            .and_then(|()| file.commit())
            .and_then(|()| client.rename(parent, &draft, parent, name, RenameMode::NoReplace));
        if let Err(error) = made {
            // What is left is a file that nobody opens.
            let _ = client.unlink(parent, &draft);
            return Err(error.into());
        }
        client.sync(parent)?;
        Ok(RemoteLog { file, id })
    }

    /// Opens a log to read and to append.
    ///
    /// # Errors
    /// `NotALog`; those of the export.
    pub fn open(client: &Client, parent: FileId, name: &OsStr) -> Result<RemoteLog, LogError> {
        let found = client.lookup(parent, name)?;
        let file = client.open(found.id, OpenAccess::READ | OpenAccess::WRITE)?;
        let mut head = [0; IDENTITY_BYTES];
        let len = file.read_at(0, &mut head)?;
        let id = LogId::parse(&head).filter(|_| len == IDENTITY_BYTES).ok_or(LogError::NotALog)?;
        Ok(RemoteLog { file, id })
    }

    /// Opens a log, or creates it if there is none.
    ///
    /// # Errors
    /// As for [`RemoteLog::open`] and [`RemoteLog::create`].
    pub fn open_or_create(client: &Client, parent: FileId, name: &OsStr) -> Result<RemoteLog, LogError> {
        match RemoteLog::open(client, parent, name) {
            Err(error) if error.is_errno(Errno::NOENT) => {}
            opened => return opened,
        }
        match RemoteLog::create(client, parent, name) {
            // Another client was first.
            Err(error) if error.is_errno(Errno::EXIST) => RemoteLog::open(client, parent, name),
            created => created,
        }
    }

    /// Several appends in flight, for one thread.
    ///
    /// # Errors
    /// Those of the export.
    pub fn appender(
        &self,
        client: &Client,
        depth: usize,
        data_bytes_max: usize,
    ) -> Result<Appender, LogError> {
        let data_bytes_max = data_bytes_max.min(DATA_BYTES_MAX);
        let pipeline = client.pipeline(depth, data_bytes_max + HEAD_BYTES)?;
        Ok(Appender::new(RemoteAppends::new(self.file.clone(), pipeline), self.id, data_bytes_max))
    }
}

impl<F: ReadLog> Log<F> {
    /// Reads a record.
    ///
    /// # Errors
    /// `NoRecord`, `Trimmed`; those of the file.
    pub fn read(&self, position: Position) -> Result<Vec<u8>, LogError> {
        let mut bytes = vec![0; HEAD_BYTES + 4096];
        let mut len = self.file.read_at(position.0, &mut bytes)?;
        if let Found::Incomplete(needed) = self.id.parse_record(&bytes[..len])
            && needed > bytes.len()
        {
            bytes.resize(needed, 0);
            len = self.file.read_at(position.0, &mut bytes)?;
        }
        match self.id.parse_record(&bytes[..len]) {
            Found::Record(data) => Ok(data.to_vec()),
            _ => Err(self.none_at(position)?),
        }
    }

    /// Why no record begins there.
    fn none_at(&self, position: Position) -> Result<LogError, LogError> {
        let start = self.start()?;
        Ok(if position < start { LogError::Trimmed(start) } else { LogError::NoRecord(position) })
    }

    /// The records from a position on, in order, to the end of the log. More may follow: the iterator goes on when it is asked
    /// again.
    pub fn entries(&self, from: Position) -> Entries<'_, F> {
        Entries::new(self, from)
    }

    /// Where the log begins.
    ///
    /// # Errors
    /// Those of the file.
    pub fn start(&self) -> Result<Position, LogError> {
        Ok(Position(self.read_start()?.offset))
    }

    fn read_start(&self) -> Result<Start, LogError> {
        let mut latest = Start { offset: RECORDS_OFFSET, number: 0 };
        for slot in START_SLOTS {
            let mut bytes = [0; START_BYTES];
            self.file.read_at(slot, &mut bytes)?;
            let found = self.id.parse_start(&bytes);
            latest = found.filter(|found| found.number > latest.number).unwrap_or(latest);
        }
        Ok(latest)
    }
}

impl<F: WriteLog> Log<F> {
    /// Appends a record, whole and once, and returns its position. Other clients see it from now on. It is persistent
    /// after [`RemoteLog::commit`].
    ///
    /// # Errors
    /// `TooLong`; those of the file, of which `Unanswered` says that the record may be there or not.
    pub fn append(&self, data: &[u8]) -> Result<Position, LogError> {
        Ok(Position(self.file.append(&self.record(data)?, false)?))
    }

    /// Appends records by one request, one behind the other, and returns their positions. With `commit` they and all before them are
    /// persistent when this returns. If the server is killed meanwhile, the first ones of them may be there alone.
    ///
    /// # Errors
    /// As for [`RemoteLog::append`]. `TooLong` also if the records with their heads have more than 1 MiB.
    pub fn append_all<D: AsRef<[u8]>>(&self, records: &[D], commit: bool) -> Result<Vec<Position>, LogError> {
        let (mut bytes, mut starts) = (Vec::new(), Vec::with_capacity(records.len()));
        for data in records.iter().map(AsRef::as_ref) {
            if data.len() > DATA_BYTES_MAX || bytes.len() > DATA_BYTES_MAX - data.len() {
                return Err(LogError::TooLong);
            }
            starts.push(bytes.len() as u64);
            self.id.emit_record(data, &mut bytes);
        }
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let offset = self.file.append(&bytes, commit)?;
        Ok(starts.into_iter().map(|start| Position(offset + start)).collect())
    }

    /// Appends a record. It and all before it are persistent when this returns.
    ///
    /// # Errors
    /// As for [`RemoteLog::append`].
    pub fn append_commit(&self, data: &[u8]) -> Result<Position, LogError> {
        Ok(Position(self.file.append(&self.record(data)?, true)?))
    }

    fn record(&self, data: &[u8]) -> Result<Vec<u8>, LogError> {
        if data.len() > DATA_BYTES_MAX {
            return Err(LogError::TooLong);
        }
        let mut record = Vec::with_capacity(HEAD_BYTES + data.len());
        self.id.emit_record(data, &mut record);
        Ok(record)
    }

    /// Makes all records persistent that were acknowledged before.
    ///
    /// # Errors
    /// Those of the file.
    pub fn commit(&self) -> Result<(), LogError> {
        self.file.commit()
    }

    /// Frees the records before a position, at which a record begins or the log ends. One client of a log trims it at a time.
    /// The log does not begin earlier than before, and after a failure it begins at either place.
    ///
    /// # Errors
    /// Those of the file.
    pub fn trim(&self, before: Position) -> Result<(), LogError> {
        let old = self.read_start()?;
        let end = self.file.len_bytes()?.max(RECORDS_OFFSET);
        if before.0 > end {
            return Err(LogError::NoRecord(before));
        }
        if before.0 <= old.offset {
            return Ok(());
        }
        let start = Start { offset: before.0, number: old.number + 1 };
        let slot = START_SLOTS[(start.number % 2) as usize];
        self.file.write_at(slot, &self.id.emit_start(start))?;
        // A record must not be gone while the log is said to begin before it.
        self.file.commit()?;
        self.file.punch(RECORDS_OFFSET, before.0 - RECORDS_OFFSET)
    }

    /// Bytes of the file, which has all records and holes where records were trimmed.
    ///
    /// # Errors
    /// Those of the file.
    pub fn len_bytes(&self) -> Result<u64, LogError> {
        self.file.len_bytes()
    }
}
