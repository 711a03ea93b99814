//! The same file on several exports, with one writer (FileMR, NSDI'20, section 5.1). `docs/replicated-files.md` has the protocol
//! and says why it holds.
//!
//! | module | what it knows |
//! |---|---|
//! | `record` | the bytes of the record beside each copy |
//! | `epochs` | which epoch counts, and in which order a new one is recorded; `model` explores that |
//! | `site` | one export: its connection, its lock, its record, its copy |
//! | `group` | one access of several copies at once |
//! | `opening` | finding the newest epoch, and taking the file over from its last writer |
//! | `appending` | several appends in flight |
//! | `writer` | dropping and admitting members |
//! | `copying` | making copies equal |
//! | `reader` | reading without the lock |

mod appending;
mod copying;
mod epochs;
mod error;
mod group;
#[cfg(test)]
mod model;
mod opening;
mod reader;
mod record;
mod site;
mod writer;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

pub use appending::{ReplicaAppended, ReplicaAppender};
pub use error::ReplicaError;
pub use reader::ReplicaReader;
pub use record::MEMBERS_MAX;

use crate::client::data::IN_FLIGHT_MAX;
use crate::client::{ClientConfig, RECORD_BYTES_MAX};
use crate::error::ExportError;
use crate::proto::Request;
use group::Fault;
use record::{MemberName, Record};
use site::{Found, Place, Site};
use writer::Writer;

/// Where a replicated file is.
#[derive(Clone, Debug)]
pub struct ReplicaConfig {
    /// The exports, each with another address: up to [`MEMBERS_MAX`]. Their timeouts do not matter.
    pub exports: Vec<ClientConfig>,
    /// The path of the file, relative to each exported directory.
    pub path: PathBuf,
    /// The time in which an export answers a request. One that does not is no member any more.
    pub timeout: Duration,
}

impl ReplicaConfig {
    /// A file of these exports, which answer within 5 seconds.
    pub fn new(exports: impl IntoIterator<Item = ClientConfig>, path: impl Into<PathBuf>) -> ReplicaConfig {
        ReplicaConfig {
            exports: exports.into_iter().collect(),
            path: path.into(),
            timeout: Duration::from_secs(5),
        }
    }

    /// The end of a call of an export that begins now.
    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    fn check(&self) -> Result<(), ReplicaError> {
        let mut addresses: Vec<_> = self.exports.iter().map(|export| export.server).collect();
        addresses.sort_unstable();
        addresses.dedup();
        if addresses.len() != self.exports.len() || !(1..=MEMBERS_MAX).contains(&addresses.len()) {
            return Err(ReplicaError::Invalid("a replicated file has 1 to 8 exports of different addresses"));
        }
        Ok(())
    }
}

/// The members of a replicated file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// The epoch.
    pub epoch: u64,
    /// Its members, the nearest first. Each has all that was acknowledged.
    pub members: Vec<SocketAddr>,
    /// The exports that are no members, and why.
    pub outside: Vec<(SocketAddr, String)>,
}

/// A replicated file that is open for writing. No other process has it open for writing meanwhile.
///
/// A call that changes the file returns when all live members have done it. A member that fails is dropped, which a warning and
/// [`ReplicatedFile::status`] say. After `NoMember` the file is open no more: open it again. Dropping it without
/// [`ReplicatedFile::close`] is as a crash: the next open makes the members equal by copying the file.
pub struct ReplicatedFile {
    writer: Writer,
}

impl ReplicatedFile {
    /// Creates an empty file with these permission bits at all exports, and opens it.
    ///
    /// # Errors
    /// `Exists`; `Export` if one of them does not answer; as for [`ReplicatedFile::open`].
    pub fn create(config: &ReplicaConfig, mode: u32) -> Result<ReplicatedFile, ReplicaError> {
        config.check()?;
        let place = Place::new(&config.path)?;
        let deadline = Instant::now() + config.timeout;
        let sites = group::in_parallel((0..config.exports.len()).collect(), |index| {
            let failed = ReplicaError::of(config.exports[index].server);
            let site = Site::reach(index, &config.exports[index], &place, deadline).map_err(failed)?;
            match site.has_file_or_record(deadline).map_err(ReplicaError::of(site.address))? {
                true => Err(ReplicaError::Exists(site.address)),
                false => Ok(site),
            }
        });
        // Of two that create the file at once, in whatever order they name the exports, one finds the other's.
        let mut sites = sites.into_iter().collect::<Result<Vec<_>, _>>()?;
        sites.sort_by_key(|site| site.address);
        let owner = rand::random();
        let copy = sites.swap_remove(0).create(mode, owner, config.timeout)?;
        found_set(&copy, config.deadline())?;
        copy.release(owner, config.deadline());
        ReplicatedFile::open(config)
    }

    /// Makes the file of one export a replicated file with one member: a plain file, or a copy whose other members are given
    /// up. What only they have is lost. Copies of the earlier replica set are refused from then on.
    ///
    /// # Errors
    /// `Incomplete`; `InUse`; `NotFound`; `Damaged` if it has a record that cannot be read; `Export`.
    pub fn found(config: &ReplicaConfig) -> Result<(), ReplicaError> {
        config.check()?;
        let [export] = &config.exports[..] else {
            return Err(ReplicaError::Invalid("a replicated file is founded at one export"));
        };
        let owner = rand::random();
        let site = Site::reach(0, export, &Place::new(&config.path)?, config.deadline());
        let site = site.map_err(ReplicaError::of(export.server))?;
        let copy = match site.lock(owner, config.deadline(), config.timeout)? {
            Found::Nothing(_) => return Err(ReplicaError::NotFound(Vec::new())),
            Found::Replica(copy, Some(record)) if !record.is_member() => {
                return Err(ReplicaError::Incomplete(copy.site.address));
            }
            Found::Replica(copy, _) => copy,
        };
        found_set(&copy, config.deadline())?;
        copy.release(owner, config.deadline());
        Ok(())
    }

    /// Opens the file for writing. Exports that are no members of the newest epoch are admitted, if they can be
    /// ([`ReplicatedFile::resynchronize`]).
    ///
    /// # Errors
    /// `MemberMissing`; `InUse` after the timeout; `Damaged`, `Foreign`, `Duplicate`, `FileMissing`; `NotFound`, `Plain`;
    /// `NoMember` if the members are lost meanwhile.
    pub fn open(config: &ReplicaConfig) -> Result<ReplicatedFile, ReplicaError> {
        config.check()?;
        Ok(ReplicatedFile { writer: Writer::open(config)? })
    }

    /// Opens the file for reading. It may be open for writing. With `permits_stale` members that do not answer may have newer data.
    ///
    /// # Errors
    /// `MemberMissing`; others as for [`ReplicatedFile::open`].
    pub fn open_read(config: &ReplicaConfig, permits_stale: bool) -> Result<ReplicaReader, ReplicaError> {
        config.check()?;
        ReplicaReader::open(config, permits_stale)
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.writer.len
    }

    /// Whether the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.writer.len == 0
    }

    /// The epoch and its members.
    pub fn status(&self) -> ReplicaStatus {
        let address = |index: usize| self.writer.config.exports[index].server;
        let outside = &self.writer.outside;
        ReplicaStatus {
            epoch: self.writer.epoch,
            members: self.writer.copies.iter().map(|copy| copy.site.address).collect(),
            outside: outside.iter().map(|(index, reason)| (address(*index), reason.clone())).collect(),
        }
    }

    /// Reads bytes from an offset on, fewer if the file ends before. Returns how many. The nearest member is asked, and all others
    /// if it fails or has not answered at half of the timeout.
    ///
    /// # Errors
    /// `Refused` if none has them. `NoMember`.
    pub fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, ReplicaError> {
        let count = self.len().saturating_sub(offset).min(into.len() as u64) as usize;
        let Writer { copies, config, .. } = &self.writer;
        if copies.is_empty() {
            return Err(ReplicaError::NoMember);
        }
        let read = group::read(copies, offset, &mut into[..count], config.timeout);
        read.map(|()| count).map_err(ReplicaError::Refused)
    }

    /// Writes bytes from an offset on. A file that ends before becomes longer first.
    ///
    /// # Errors
    /// `Refused` if all members refuse it: the range has undefined bytes then, until it is written again. `NoMember`.
    pub fn write_at(&mut self, offset: u64, data: &[u8]) -> Result<(), ReplicaError> {
        let end = offset.checked_add(data.len() as u64).ok_or(ReplicaError::Invalid("beyond any file"))?;
        if data.is_empty() {
            return Ok(());
        }
        if end > self.writer.len {
            self.change(|open| Request::Grow { open, len: end })?;
            self.writer.len = end;
        }
        for (part, at) in data.chunks(IN_FLIGHT_MAX).zip((offset..).step_by(IN_FLIGHT_MAX)) {
            let written = group::write(&self.writer.copies, at, part, self.writer.config.timeout);
            self.conclude_write(written)?;
        }
        Ok(())
    }

    /// Appends a record of up to 1 MiB, and returns its offset.
    ///
    /// # Errors
    /// `Refused` if all members refuse it: the file ends where it did before. `NoMember`.
    pub fn append(&mut self, record: &[u8]) -> Result<u64, ReplicaError> {
        self.append_with(record, false)
    }

    /// Appends a record. It and all before it in the file are persistent on all members when this returns.
    ///
    /// # Errors
    /// As for [`ReplicatedFile::append`].
    pub fn append_commit(&mut self, record: &[u8]) -> Result<u64, ReplicaError> {
        self.append_with(record, true)
    }

    fn append_with(&mut self, record: &[u8], commit: bool) -> Result<u64, ReplicaError> {
        if record.len() > RECORD_BYTES_MAX {
            return Err(ReplicaError::Invalid("a record longer than 1 MiB"));
        }
        let appended = group::append(&self.writer.copies, record, commit, self.writer.config.timeout);
        self.conclude_append(appended, record.len() as u64)
    }

    /// Ends an append of so many bytes at the end of the file, and returns the record's offset.
    fn conclude_append(&mut self, mut appended: group::Outcomes<u64>, len: u64) -> Result<u64, ReplicaError> {
        let (end, were_equal) = (self.writer.len, self.writer.are_equal);
        for outcome in &mut appended {
            if outcome.as_ref().is_ok_and(|offset| *offset != end) {
                *outcome = Err(Fault::Lost(ExportError::Invalid("another program has changed its length")));
            }
        }
        let result = self.conclude_write(appended);
        match &result {
            Ok(_) => self.writer.len = end + len,
            // Some may have the record, if only its commit was refused.
            Err(ReplicaError::Refused(_)) => {
                self.change(|open| Request::Truncate { open, len: end })?;
                self.writer.are_equal = were_equal;
            }
            Err(_) => {}
        }
        result
    }

    /// Makes all acknowledged writes persistent on all members.
    ///
    /// # Errors
    /// `Refused` if all members refuse it. `NoMember`.
    pub fn commit(&mut self) -> Result<(), ReplicaError> {
        let committed = group::commit(&self.writer.copies, self.writer.config.timeout);
        self.writer.conclude(committed)
    }

    /// Makes the file this many bytes long.
    ///
    /// # Errors
    /// `Refused` if all members refuse it. `NoMember`.
    pub fn truncate(&mut self, len: u64) -> Result<(), ReplicaError> {
        self.change(|open| Request::Truncate { open, len })?;
        self.writer.len = len;
        Ok(())
    }

    /// Gives the blocks of a range back, which reads as zeros then.
    ///
    /// # Errors
    /// As for [`ReplicatedFile::truncate`].
    pub fn punch(&mut self, offset: u64, len: u64) -> Result<(), ReplicaError> {
        self.change(|open| Request::Punch { open, offset, len })
    }

    /// Admits the exports that are no members, as far as they answer and have no other file of that name: copies the file to
    /// them. [`ReplicatedFile::status`] says why others are not admitted.
    ///
    /// # Errors
    /// `NoMember` if the members are lost meanwhile.
    pub fn resynchronize(&mut self) -> Result<(), ReplicaError> {
        self.writer.resynchronize()
    }

    /// Makes everything persistent, records that all members are equal, and releases the file.
    ///
    /// # Errors
    /// As for [`ReplicatedFile::commit`].
    pub fn close(mut self) -> Result<(), ReplicaError> {
        self.commit()?;
        if self.writer.are_equal {
            self.writer.establish(Vec::new(), true)?;
        }
        let Writer { copies, owner, config, .. } = self.writer;
        let deadline = config.deadline();
        group::in_parallel(copies, |copy| copy.release(owner, deadline));
        Ok(())
    }

    fn change(&mut self, request: impl Fn(u64) -> Request) -> Result<(), ReplicaError> {
        let changed = group::change(&self.writer.copies, self.writer.config.timeout, request);
        self.conclude_write(changed).map(|_| ())
    }

    /// As [`Writer::conclude`]. Some members may have done a part of what all have refused.
    fn conclude_write<T>(&mut self, outcomes: group::Outcomes<T>) -> Result<T, ReplicaError> {
        let result = self.writer.conclude(outcomes);
        self.writer.are_equal &= !matches!(result, Err(ReplicaError::Refused(_)));
        result
    }
}

/// Makes a copy the only member of a new replica set.
fn found_set(copy: &site::Replica, deadline: Instant) -> Result<(), ReplicaError> {
    let address = copy.site.address;
    let members = vec![MemberName { id: copy.id, address }];
    let record = Record { set: rand::random(), own: copy.id, epoch: 1, is_closed: true, members };
    let made = copy.sync(deadline).and_then(|()| copy.site.write_record(&record, deadline));
    made.map_err(ReplicaError::of(address))
}
