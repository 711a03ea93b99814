//! Reading a replicated file.

use std::time::Instant;

use super::error::ReplicaError;
use super::group;
use super::site::{Place, Replica, Site};
use super::{ReplicaConfig, epochs};
use crate::proto::Request;

/// A replicated file that is open for reading.
///
/// It reads from members of the newest epoch at the time of [`ReplicatedFile::open_read`](super::ReplicatedFile::open_read)
/// or of the last [`ReplicaReader::refresh`], and sees all that was acknowledged before.
pub struct ReplicaReader {
    config: ReplicaConfig,
    permits_stale: bool,
    /// The nearest first.
    copies: Vec<Replica>,
    epoch: u64,
    len: u64,
}

impl ReplicaReader {
    pub(super) fn open(config: &ReplicaConfig, permits_stale: bool) -> Result<ReplicaReader, ReplicaError> {
        let (copies, epoch) = find(config, permits_stale)?;
        let mut reader = ReplicaReader { config: config.clone(), permits_stale, copies, epoch, len: 0 };
        reader.find_len()?;
        Ok(reader)
    }

    /// Finds the newest epoch and its members again. After an error the reader has those of before.
    ///
    /// # Errors
    /// As for [`ReplicatedFile::open_read`](super::ReplicatedFile::open_read).
    pub fn refresh(&mut self) -> Result<(), ReplicaError> {
        *self = ReplicaReader::open(&self.config, self.permits_stale)?;
        Ok(())
    }

    /// The epoch whose members are read.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The length in bytes as far as it is known.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file has no bytes, as far as is known.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads bytes from an offset on, fewer if the file ends before. Returns how many. The nearest member is asked, and all others
    /// if it fails or has not answered at half of the timeout.
    ///
    /// # Errors
    /// `NoMember` if all are lost; `Refused`.
    pub fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, ReplicaError> {
        if offset.saturating_add(into.len() as u64) > self.len {
            self.find_len()?;
        }
        match self.read_known(offset, into) {
            Err(ReplicaError::Refused(_)) => {
                // The file may have become shorter.
                self.find_len()?;
                self.read_known(offset, into)
            }
            read => read,
        }
    }

    /// Reads what is within the length that is known.
    fn read_known(&mut self, offset: u64, into: &mut [u8]) -> Result<usize, ReplicaError> {
        let count = self.len.saturating_sub(offset).min(into.len() as u64) as usize;
        let read = group::read(&self.copies, offset, &mut into[..count], self.config.timeout);
        self.copies.retain(|copy| !copy.opening.session.is_lost());
        match read {
            Ok(()) => Ok(count),
            Err(_) if self.copies.is_empty() => Err(ReplicaError::NoMember),
            Err(error) => Err(ReplicaError::Refused(error)),
        }
    }

    /// Asks all members for the length, and takes that of the nearest one that answers.
    fn find_len(&mut self) -> Result<(), ReplicaError> {
        let request = |open| Request::GetOpenAttributes { open };
        let answers = group::change(&self.copies, self.config.timeout, request);
        let mut lens = answers.into_iter().map(|answer| answer.map(|attributes| attributes.len).ok());
        let mut found = Vec::new();
        self.copies.retain(|_| {
            let len = lens.next().flatten();
            found.extend(len);
            len.is_some()
        });
        self.len = *found.first().ok_or(ReplicaError::NoMember)?;
        Ok(())
    }
}

/// Opens the members of the newest epoch.
fn find(config: &ReplicaConfig, permits_stale: bool) -> Result<(Vec<Replica>, u64), ReplicaError> {
    let place = Place::new(&config.path)?;
    let deadline = Instant::now() + config.timeout;
    let sites = group::in_parallel((0..config.exports.len()).collect(), |index| {
        let address = config.exports[index].server;
        let site = Site::reach(index, &config.exports[index], &place, deadline);
        let site = site.map_err(ReplicaError::of(address));
        (address, site.and_then(|site| Ok((site.read_record(deadline)?, site))))
    });
    let (mut shown, mut silent) = (Vec::new(), Vec::new());
    for (address, site) in sites {
        match site {
            Ok((Some(record), site)) => shown.push((record, site)),
            Ok((None, _)) => {}
            Err(error @ ReplicaError::Damaged { .. }) if !permits_stale => return Err(error),
            Err(error) => silent.push((address, error)),
        }
    }
    super::opening::check_ids(shown.iter().map(|(record, site)| (record, site)))?;
    let records: Vec<_> = shown.iter().map(|(record, _)| record).collect();
    let newest = epochs::newest(&records).map_err(|epochs::Conflict(one, other)| {
        ReplicaError::Foreign(shown[one].1.address, shown[other].1.address)
    })?;
    let newest = shown[newest.ok_or_else(|| {
        ReplicaError::NotFound(
            silent.iter().map(|(_, error): &(_, ReplicaError)| error.to_string()).collect(),
        )
    })?]
    .0
    .clone();
    for member in newest.members.iter().filter(|_| !permits_stale) {
        if !shown.iter().any(|(record, _)| record.own == member.id) {
            return Err(super::opening::missing(member, newest.epoch, &silent));
        }
    }
    let is_member = |id| newest.members.iter().any(|member| member.id == id);
    let members = shown.into_iter().filter(|(record, _)| is_member(record.own));
    let mut copies = Vec::new();
    for (record, site) in members {
        let address = site.address;
        match site.open_to_read(record.own, deadline) {
            Ok(Some(copy)) => copies.push(copy),
            _ if permits_stale => {}
            Ok(None) => return Err(ReplicaError::FileMissing(address)),
            Err(error) => return Err(ReplicaError::of(address)(error)),
        }
    }
    copies.sort_by_key(|copy| copy.site.distance);
    if copies.is_empty() { Err(ReplicaError::NoMember) } else { Ok((copies, newest.epoch)) }
}
