//! Opening a replicated file for writing: finding its newest epoch, and making its members equal.

use std::net::SocketAddr;

use super::ReplicaConfig;
use super::copying::{self, Filled};
use super::epochs::{self, Conflict};
use super::error::ReplicaError;
use super::group;
use super::record::{MemberName, Record};
use super::site::{Found, Place, Replica, Site};
use super::writer::Writer;

/// Exports that are not asked any more, and why.
pub type Silent = Vec<(SocketAddr, ReplicaError)>;

impl Writer {
    /// Locks the file at all exports that answer, and takes it over from its last writer. The exports that are no members are
    /// admitted, as far as possible.
    pub fn open(config: &ReplicaConfig) -> Result<Writer, ReplicaError> {
        let place = Place::new(&config.path)?;
        let owner = rand::random();
        let (found, silent) = lock_all(config, &place, owner)?;
        let newest = newest(&found, &silent)?;
        check_ids(found.iter().filter_map(|found| Some((found.record()?, found.site()))))?;
        let (copies, others) = split(found, &newest);
        for member in &newest.members {
            if !copies.iter().any(|copy| copy.id == member.id) {
                return Err(missing(member, newest.epoch, &silent));
            }
        }
        let place_of = |address| config.exports.iter().position(|export| export.server == address);
        let outside =
            silent.into_iter().filter_map(|(address, error)| Some((place_of(address)?, error.to_string())));
        let mut writer = Writer {
            config: config.clone(),
            place,
            owner,
            set: newest.set,
            epoch: newest.epoch,
            copies,
            outside: outside.collect(),
            len: 0,
            are_equal: newest.is_closed,
        };
        writer.make_equal()?;
        writer.establish(Vec::new(), false)?;
        writer.admit(others)?;
        Ok(writer)
    }

    /// Makes all members equal to one of them, unless the last writer has closed the file. Any of them has all that was
    /// acknowledged.
    fn make_equal(&mut self) -> Result<(), ReplicaError> {
        loop {
            self.len = self.copies.first().ok_or(ReplicaError::NoMember)?.len;
            if self.are_equal && self.copies.iter().all(|copy| copy.len == self.len) {
                return Ok(());
            }
            let source = self.copies.remove(0);
            let targets = std::mem::take(&mut self.copies);
            let Filled { alive, failed, source: copied } =
                copying::fill(&source, targets, self.len, self.config.timeout);
            self.copies = alive;
            failed.into_iter().for_each(|(copy, error)| self.leave_out(copy, &error.to_string()));
            match copied {
                Ok(()) => {
                    self.copies.insert(0, source);
                    self.copies.iter_mut().for_each(|copy| copy.len = self.len);
                    self.are_equal = true;
                }
                // Others may have a part of it, and are made equal to the next one.
                Err(error) => {
                    self.leave_out(source, &error.to_string());
                    self.are_equal = false;
                }
            }
        }
    }
}

/// Locks the file at all exports that answer in time. In the order of their addresses, so that of two writers at once one has
/// all locks. All locks together are waited for no longer than the timeout; after a busy one, which may be at an export that is
/// no member, the others are still tried.
///
/// # Errors
/// Of exports that may have data that no other one has, and cannot say so: `Damaged`, `FileMissing`.
fn lock_all(config: &ReplicaConfig, place: &Place, owner: u64) -> Result<(Vec<Found>, Silent), ReplicaError> {
    let deadline = config.deadline();
    let mut indexes: Vec<_> = (0..config.exports.len()).collect();
    indexes.sort_by_key(|&index| config.exports[index].server);
    let sites = group::in_parallel(indexes, |index| {
        let address = config.exports[index].server;
        (address, Site::reach(index, &config.exports[index], place, deadline))
    });
    let (mut found, mut silent) = (Vec::new(), Vec::new());
    let wait_until = config.deadline();
    for (address, site) in sites {
        let site = site.map_err(ReplicaError::of(address));
        match site.and_then(|site| site.lock(owner, wait_until, config.timeout)) {
            Ok(site) => found.push(site),
            Err(error @ (ReplicaError::Damaged { .. } | ReplicaError::FileMissing(_))) => return Err(error),
            Err(error) => silent.push((address, error)),
        }
    }
    Ok((found, silent))
}

/// The newest record.
fn newest(found: &[Found], silent: &Silent) -> Result<Record, ReplicaError> {
    let with_records: Vec<_> =
        found.iter().filter_map(|found| Some((found.record()?, found.site().address))).collect();
    let records: Vec<_> = with_records.iter().map(|(record, _)| *record).collect();
    let newest = epochs::newest(&records)
        .map_err(|Conflict(one, other)| ReplicaError::Foreign(with_records[one].1, with_records[other].1))?;
    if let Some(place) = newest {
        return Ok(records[place].clone());
    }
    let in_use = silent.iter().find_map(|(_, error)| match error {
        ReplicaError::InUse(address) => Some(ReplicaError::InUse(*address)),
        _ => None,
    });
    let plain = found.iter().find_map(|found| match found {
        Found::Replica(copy, _) => Some(ReplicaError::Plain(copy.site.address)),
        Found::Nothing(_) => None,
    });
    let reasons = || silent.iter().map(|(_, error)| error.to_string()).collect();
    Err(in_use.or(plain).unwrap_or_else(|| ReplicaError::NotFound(reasons())))
}

/// Checks that no copy was made from another one by other means.
pub fn check_ids<'a>(records: impl Iterator<Item = (&'a Record, &'a Site)>) -> Result<(), ReplicaError> {
    let ids: Vec<_> = records.map(|(record, site)| (record.own, site.address)).collect();
    for (place, (id, address)) in ids.iter().enumerate() {
        if let Some((_, other)) = ids[..place].iter().find(|(other, _)| other == id) {
            return Err(ReplicaError::Duplicate(*other, *address));
        }
    }
    Ok(())
}

/// Splits what was found into the members of an epoch, the nearest first, and the rest.
fn split(found: Vec<Found>, epoch: &Record) -> (Vec<Replica>, Vec<Found>) {
    let (mut members, mut others) = (Vec::new(), Vec::new());
    for found in found {
        match found {
            Found::Replica(copy, Some(_)) if epoch.members.iter().any(|member| member.id == copy.id) => {
                members.push(copy);
            }
            other => others.push(other),
        }
    }
    members.sort_by_key(|copy| copy.site.distance);
    (members, others)
}

/// The error of a member that cannot be asked.
pub fn missing(member: &MemberName, epoch: u64, silent: &Silent) -> ReplicaError {
    let address = member.address;
    let known = silent.iter().find(|(silent, _)| *silent == address);
    if let Some((_, ReplicaError::InUse(address))) = known {
        return ReplicaError::InUse(*address);
    }
    let reason = match known {
        Some((_, error)) => error.to_string(),
        None => "no export that was named has its copy".into(),
    };
    ReplicaError::MemberMissing { address, epoch, reason }
}
