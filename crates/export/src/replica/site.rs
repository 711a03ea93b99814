//! One export: its connection, its record, its copy of the file. All is done on one connection. When it is lost, so are the
//! lock and the copy; nothing is ever repeated on another one.

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::error::ReplicaError;
use super::record::{Record, SLOT_BYTES};
use crate::client::data::{self, Bytes, Failure};
use crate::client::session::{Opening, Session};
use crate::client::{Client, ClientConfig};
use crate::error::ExportError;
use crate::proto::{
    Answer, Attributes, FileId, LockKind, NAME_BYTES_MAX, OpenAccess, Opened, RenameMode, Request, Text,
};

/// What is added to a file's name for that of its record, before and behind.
const PREFIX: &str = ".";
const SUFFIX: &str = ".terrace-replica";
/// And for a record that is being written.
const DRAFT_SUFFIX: &str = ".terrace-replica.new";
/// The rights of a record.
const RECORD_MODE: u32 = 0o644;
/// The pauses between attempts to lock a file.
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// The pauses between attempts to read a record, and for how long one is read that its writer seems to be replacing.
const RECORD_PAUSE: Duration = Duration::from_millis(5);
const RECORD_TIME: Duration = Duration::from_millis(500);
/// How often a round trip is measured.
const ROUND_TRIPS: usize = 3;

/// Where a replicated file is in each export.
#[derive(Clone, Debug)]
pub struct Place {
    directory: PathBuf,
    name: OsString,
}

impl Place {
    /// The place of a path relative to the exported directories.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn new(path: &Path) -> Result<Place, ReplicaError> {
        let name = path.file_name().ok_or(ReplicaError::Invalid("the path names no file"))?;
        if name.len() + PREFIX.len() + DRAFT_SUFFIX.len() > NAME_BYTES_MAX {
            return Err(ReplicaError::Invalid(
                "the name is too long for a replicated file: 234 bytes are the most",
            ));
        }
        let directory = path.parent().unwrap_or(Path::new("")).to_path_buf();
        Ok(Place { directory, name: name.to_os_string() })
    }

    fn beside(&self, suffix: &str) -> Text {
        Text([PREFIX.as_bytes(), self.name.as_bytes(), suffix.as_bytes()].concat())
    }
}

/// An export that answers.
pub struct Site {
    /// Its place in the configuration.
    pub index: usize,
    pub address: SocketAddr,
    /// Whether it is on this host, and how long it takes to answer: less is nearer.
    pub distance: (bool, Duration),
    place: Place,
    directory: FileId,
    session: Arc<Session>,
    client: Client,
}

/// A copy: an open file.
pub struct Replica {
    pub site: Site,
    /// Its id in records.
    pub id: u64,
    pub file: FileId,
    pub mode: u32,
    /// The length in bytes when it was opened.
    pub len: u64,
    pub opening: Opening,
}

/// What a writer finds at an export.
pub enum Found {
    /// Neither a file nor a record.
    Nothing(Site),
    /// A file that it has locked.
    Replica(Replica, Option<Record>),
}

impl Found {
    /// The export.
    pub fn site(&self) -> &Site {
        match self {
            Found::Nothing(site) | Found::Replica(Replica { site, .. }, _) => site,
        }
    }

    /// The record there.
    pub fn record(&self) -> Option<&Record> {
        match self {
            Found::Replica(_, record) => record.as_ref(),
            Found::Nothing(_) => None,
        }
    }
}

impl Site {
    /// Connects to an export.
    ///
    /// # Errors
    /// As for [`Client::connect`]; `Os` if the directory does not exist.
    pub fn reach(
        index: usize,
        config: &ClientConfig,
        place: &Place,
        deadline: Instant,
    ) -> Result<Site, ExportError> {
        let timeout = deadline.saturating_duration_since(Instant::now());
        let client = Client::connect(&ClientConfig { timeout, ..config.clone() })?;
        let session = client.shared.session(deadline)?;
        let directory = match place.directory.as_os_str().is_empty() {
            true => client.root(),
            false => {
                let path = Text::from(place.directory.as_os_str().as_bytes());
                match client.shared.call_on(&session, Request::LookupPath { path }, deadline)? {
                    Answer::Attributes { attributes } => attributes.id,
                    _ => return Err(ExportError::Protocol),
                }
            }
        };
        let mut round_trip = Duration::MAX;
        for _ in 0..ROUND_TRIPS {
            let asked = Instant::now();
            session.call(Request::Renew {}, deadline)?;
            round_trip = round_trip.min(asked.elapsed());
        }
        let distance = (!session.stream.is_local(), round_trip);
        let (address, place) = (config.server, place.clone());
        Ok(Site { index, address, distance, place, directory, session, client })
    }

    fn call(&self, request: Request, deadline: Instant) -> Result<Answer, ExportError> {
        self.client.shared.call_on(&self.session, request, deadline)
    }

    fn done(&self, request: Request, deadline: Instant) -> Result<(), ExportError> {
        match self.call(request, deadline)? {
            Answer::Done {} => Ok(()),
            _ => Err(ExportError::Protocol),
        }
    }

    fn lookup(&self, name: Text, deadline: Instant) -> Result<Option<Attributes>, ExportError> {
        match self.call(Request::Lookup { parent: self.directory, name }, deadline) {
            Ok(Answer::Attributes { attributes }) => Ok(Some(attributes)),
            Ok(_) => Err(ExportError::Protocol),
            Err(ExportError::Os(errno)) if errno == Errno::NOENT.raw_os_error() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn lookup_file(&self, deadline: Instant) -> Result<Option<Attributes>, ExportError> {
        self.lookup(Text::from(self.place.name.as_bytes()), deadline)
    }

    fn opened(&self, request: Request, deadline: Instant) -> Result<(Opening, Attributes), ExportError> {
        match self.call(request, deadline)? {
            Answer::Opened { opened: Opened { open, key, attributes }, .. } => {
                Ok((Opening { session: self.session.clone(), open, rkey: key.rkey }, attributes))
            }
            _ => Err(ExportError::Protocol),
        }
    }

    /// Reads the record of the file; `None` if there is none.
    ///
    /// # Errors
    /// `Damaged`; `Export`.
    pub fn read_record(&self, deadline: Instant) -> Result<Option<Record>, ReplicaError> {
        let damaged = |reason| ReplicaError::Damaged { address: self.address, reason };
        let failed = ReplicaError::of(self.address);
        let begun = Instant::now();
        loop {
            let error = match self.read_record_bytes(deadline) {
                Ok(None) => return Ok(None),
                Ok(Some(bytes)) => match Record::of_file(&bytes) {
                    Ok(record) => return Ok(Some(record)),
                    Err(reason) => damaged(reason),
                },
                // The first record is renamed to its place, and a file that is removed has no key.
                Err(error @ (ExportError::Os(_) | ExportError::Access(..) | ExportError::Revoked)) => {
                    failed(error)
                }
                Err(error) => return Err(failed(error)),
            };
            // Its writer may be just replacing it.
            if Instant::now() + RECORD_PAUSE >= deadline.min(begun + RECORD_TIME) {
                return Err(error);
            }
            std::thread::sleep(RECORD_PAUSE);
        }
    }

    fn read_record_bytes(&self, deadline: Instant) -> Result<Option<Vec<u8>>, ExportError> {
        let Some(found) = self.lookup(self.place.beside(SUFFIX), deadline)? else { return Ok(None) };
        let access = OpenAccess::READ | OpenAccess::UNMAPPED;
        let (opening, attributes) =
            self.opened(Request::Open { id: found.id, access, content_max: 0 }, deadline)?;
        let mut bytes = vec![0; attributes.len.min(2 * SLOT_BYTES as u64 + 1) as usize];
        let read = data::access(&opening, 0, Bytes::Into(&mut bytes), deadline).map_err(reason);
        // It is closed already if it was replaced.
        let _ = self.done(Request::Close { open: opening.open }, deadline);
        read.map(|()| Some(bytes))
    }

    /// Replaces the record of the file, persistently. At any moment the export has the old one or the new one.
    ///
    /// # Errors
    /// `Os` if the export refuses; `Lost`.
    pub fn write_record(&self, record: &Record, deadline: Instant) -> Result<(), ExportError> {
        match self.lookup(self.place.beside(SUFFIX), deadline)? {
            Some(found) if found.len == 2 * SLOT_BYTES as u64 => {
                let access = OpenAccess::WRITE | OpenAccess::UNMAPPED;
                let (opening, _) =
                    self.opened(Request::Open { id: found.id, access, content_max: 0 }, deadline)?;
                self.write_slots(record, opening.open, found.id, deadline)
            }
            _ => self.create_record(record, deadline),
        }
    }

    /// Writes a record to both blocks of its file, which it closes.
    fn write_slots(
        &self,
        record: &Record,
        open: u64,
        id: FileId,
        deadline: Instant,
    ) -> Result<(), ExportError> {
        for offset in [0, SLOT_BYTES as u64] {
            self.call(Request::Write { open, offset, data: Text(record.slot()) }, deadline)?;
            self.done(Request::Sync { id }, deadline)?;
        }
        self.done(Request::Close { open }, deadline)
    }

    fn create_record(&self, record: &Record, deadline: Instant) -> Result<(), ExportError> {
        let (parent, draft) = (self.directory, self.place.beside(DRAFT_SUFFIX));
        let access = OpenAccess::WRITE | OpenAccess::TRUNCATE | OpenAccess::UNMAPPED;
        let create =
            Request::Create { parent, name: draft.clone(), mode: RECORD_MODE, access, exclusive: None };
        let (opening, attributes) = self.opened(create, deadline)?;
        self.write_slots(record, opening.open, attributes.id, deadline)?;
        let (name, new_name) = (draft, self.place.beside(SUFFIX));
        let (new_parent, mode) = (parent, RenameMode::Replace);
        self.done(Request::Rename { parent, name, new_parent, new_name, mode, only: None }, deadline)?;
        self.done(Request::Sync { id: parent }, deadline)
    }

    /// Whether there is a file of that name, or a record of one.
    ///
    /// # Errors
    /// As for [`Client::lookup`].
    pub fn has_file_or_record(&self, deadline: Instant) -> Result<bool, ExportError> {
        let record = self.lookup(self.place.beside(SUFFIX), deadline)?;
        Ok(record.is_some() || self.lookup_file(deadline)?.is_some())
    }

    /// Opens the file to read it; `None` if there is none. It is not mapped: the server would wait for a reader that is stopped in
    /// the middle of a copy before it cuts the file.
    ///
    /// # Errors
    /// As for [`Client::open`].
    pub fn open_to_read(self, id: u64, deadline: Instant) -> Result<Option<Replica>, ExportError> {
        let Some(found) = self.lookup_file(deadline)? else { return Ok(None) };
        let (opening, attributes) = self.opened(
            Request::Open { id: found.id, access: OpenAccess::READ | OpenAccess::UNMAPPED, content_max: 0 },
            deadline,
        )?;
        let (mode, len) = (attributes.mode, attributes.len);
        Ok(Some(Replica { site: self, id, file: found.id, mode, len, opening }))
    }

    /// Opens and locks the file, and reads its record. Each request has the timeout.
    ///
    /// # Errors
    /// `InUse` if the lock is not free at `wait_until`; `Replaced`; `FileMissing`; `Damaged`; `Export`.
    pub fn lock(self, owner: u64, wait_until: Instant, timeout: Duration) -> Result<Found, ReplicaError> {
        let deadline = || Instant::now() + timeout;
        let address = self.address;
        let failed = ReplicaError::of(address);
        let Some(found) = self.lookup_file(deadline()).map_err(&failed)? else {
            return match self.read_record(deadline())? {
                None => Ok(Found::Nothing(self)),
                Some(_) => Err(ReplicaError::FileMissing(address)),
            };
        };
        let access = OpenAccess::READ | OpenAccess::WRITE | OpenAccess::UNMAPPED;
        let (opening, _) = self
            .opened(Request::Open { id: found.id, access, content_max: 0 }, deadline())
            .map_err(&failed)?;
        self.take_lock(found.id, owner, wait_until, timeout)?;
        // Only the file that has the name now keeps others away. The holder of the lock before may have changed its length.
        let now = self.lookup_file(deadline()).map_err(&failed)?;
        let Some(attributes) = now.filter(|now| now.id == found.id) else {
            return Err(ReplicaError::Replaced(address));
        };
        let record = self.read_record(deadline())?;
        let id = record.as_ref().map_or_else(rand::random, |record| record.own);
        let (mode, len) = (attributes.mode, attributes.len);
        let copy = Replica { site: self, id, file: found.id, mode, len, opening };
        Ok(Found::Replica(copy, record))
    }

    fn take_lock(
        &self,
        id: FileId,
        owner: u64,
        wait_until: Instant,
        timeout: Duration,
    ) -> Result<(), ReplicaError> {
        let request = || Request::Lock { id, owner, kind: LockKind::Exclusive };
        loop {
            match self.done(request(), Instant::now() + timeout) {
                Ok(()) => return Ok(()),
                Err(ExportError::Os(errno)) if errno == Errno::WOULDBLOCK.raw_os_error() => {}
                Err(error) => return Err(ReplicaError::of(self.address)(error)),
            }
            if Instant::now() + LOCK_PAUSE >= wait_until {
                return Err(ReplicaError::InUse(self.address));
            }
            std::thread::sleep(LOCK_PAUSE);
        }
    }

    /// Makes the file, empty, and locks it.
    ///
    /// # Errors
    /// `Exists` if there is one now; `Export`.
    pub fn create(self, mode: u32, owner: u64, timeout: Duration) -> Result<Replica, ReplicaError> {
        let deadline = Instant::now() + timeout;
        let request = Request::Create {
            parent: self.directory,
            name: Text::from(OsStr::as_bytes(&self.place.name)),
            mode,
            access: OpenAccess::READ | OpenAccess::WRITE | OpenAccess::UNMAPPED,
            exclusive: Some(rand::random()),
        };
        let (opening, attributes) = self.opened(request, deadline).map_err(|error| match error {
            ExportError::Os(errno) if errno == Errno::EXIST.raw_os_error() => {
                ReplicaError::Exists(self.address)
            }
            error => ReplicaError::of(self.address)(error),
        })?;
        self.take_lock(attributes.id, owner, deadline, timeout)?;
        Ok(Replica {
            site: self,
            id: rand::random(),
            file: attributes.id,
            mode,
            len: attributes.len,
            opening,
        })
    }

    /// Ends the connection. The server releases what the client has.
    pub fn lose(&self, why: &str) {
        self.session.lose(why);
    }
}

impl Replica {
    /// Makes the file with its attributes persistent, and its name.
    ///
    /// # Errors
    /// As for [`Client::sync`].
    pub fn sync(&self, deadline: Instant) -> Result<(), ExportError> {
        self.site.done(Request::Sync { id: self.file }, deadline)?;
        self.site.done(Request::Sync { id: self.site.directory }, deadline)
    }

    /// The first range with data from an offset on; empty if there is none.
    ///
    /// # Errors
    /// As for [`Client::attributes`].
    pub fn find_data(&self, offset: u64, deadline: Instant) -> Result<std::ops::Range<u64>, ExportError> {
        match self.site.call(Request::FindData { open: self.opening.open, offset }, deadline)? {
            Answer::Data { start, end } => Ok(start..end),
            _ => Err(ExportError::Protocol),
        }
    }

    /// Closes the file, and then releases the lock: without an answer the connection ends, and both with it.
    pub fn release(self, owner: u64, deadline: Instant) {
        let (open, id) = (self.opening.open, self.file);
        let released = self
            .site
            .done(Request::Close { open }, deadline)
            .and_then(|()| self.site.done(Request::Lock { id, owner, kind: LockKind::Unlock }, deadline));
        if let Err(error) = released {
            tracing::debug!(%error, address = %self.site.address, "a copy is released with its connection");
        }
    }
}

/// Why an access was not made.
pub fn reason(failure: Failure) -> ExportError {
    match failure {
        Failure::Refused { kind, status, .. } => ExportError::Access(kind, status),
        Failure::Error(error) => error,
    }
}
