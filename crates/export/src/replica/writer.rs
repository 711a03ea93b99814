//! The members of a file that is open for writing: how they are dropped and admitted.

use super::ReplicaConfig;
use super::copying::{self, Filled};
use super::epochs::{Change, Step};
use super::error::ReplicaError;
use super::group::{self, Fault, Outcomes};
use super::record::{MemberName, Record};
use super::site::{Found, Place, Replica, Site};
use crate::error::ExportError;

/// The members of a replicated file that this process writes.
pub struct Writer {
    pub config: ReplicaConfig,
    pub place: Place,
    /// The owner of the locks: no other opening has it.
    pub owner: u64,
    pub set: u64,
    /// The newest epoch of which a record was begun. It is established unless a call that records one is under way.
    pub epoch: u64,
    /// The live members, the nearest first.
    pub copies: Vec<Replica>,
    /// Exports that are no members, by their places in the configuration, and why.
    pub outside: Vec<(usize, String)>,
    /// The length of the file in bytes.
    pub len: u64,
    /// All members have the same bytes.
    pub are_equal: bool,
}

impl Writer {
    /// Ends the connection to a copy that is no member any more.
    pub fn leave_out(&mut self, copy: Replica, reason: &str) {
        let address = copy.site.address;
        tracing::warn!(%address, reason, "an export is no member of a replicated file");
        copy.site.lose(reason);
        self.outside.push((copy.site.index, reason.into()));
    }

    /// Drops the members that have failed where others have not, and records that before anything is acknowledged. If none has
    /// done what it was to do, those that have refused stay.
    ///
    /// # Errors
    /// `Refused`; `NoMember`.
    pub fn conclude<T>(&mut self, outcomes: Outcomes<T>) -> Result<T, ReplicaError> {
        let has_one_done = outcomes.iter().any(Result::is_ok);
        let (mut done, mut refused, mut has_lost) = (None, None, false);
        for (copy, outcome) in std::mem::take(&mut self.copies).into_iter().zip(outcomes) {
            match outcome {
                Ok(value) => {
                    done.get_or_insert(value);
                    self.copies.push(copy);
                }
                Err(Fault::Refused(error)) if !has_one_done => {
                    refused.get_or_insert(error);
                    self.copies.push(copy);
                }
                Err(fault) => {
                    has_lost = true;
                    self.leave_out(copy, &fault.error().to_string());
                }
            }
        }
        if has_lost {
            self.establish(Vec::new(), false)?;
        }
        match (done, refused) {
            (Some(value), _) => Ok(value),
            (None, Some(error)) => Err(ReplicaError::Refused(error)),
            (None, None) => Err(ReplicaError::NoMember),
        }
    }

    /// Records a new epoch whose members are the present ones and those that are admitted.
    ///
    /// # Errors
    /// `NoMember` if all are lost meanwhile.
    pub fn establish(&mut self, admitted: Vec<Replica>, is_closed: bool) -> Result<(), ReplicaError> {
        let ids = |copies: &[Replica]| copies.iter().map(|copy| copy.id).collect();
        if self.copies.is_empty() {
            return Err(ReplicaError::NoMember);
        }
        let mut change = Change::new(self.epoch, ids(&self.copies), ids(&admitted));
        self.copies.extend(admitted);
        self.copies.sort_by_key(|copy| copy.site.distance);
        loop {
            self.epoch = change.number();
            let failed = self.record(&change, is_closed);
            let ids: Vec<_> = failed.iter().map(|(id, _)| *id).collect();
            for (id, error) in failed {
                if let Some(place) = self.copies.iter().position(|copy| copy.id == id) {
                    let copy = self.copies.remove(place);
                    self.leave_out(copy, &error.to_string());
                }
            }
            match change.recorded(&ids) {
                Step::Record(next) => change = next,
                Step::Established => return Ok(()),
                Step::NoneLeft => {
                    // Exports that were to be admitted have not recorded it.
                    for copy in std::mem::take(&mut self.copies) {
                        self.leave_out(copy, "the members that had the data are lost");
                    }
                    return Err(ReplicaError::NoMember);
                }
            }
        }
    }

    /// Records a change at its targets. Returns those that have failed.
    fn record(&self, change: &Change, is_closed: bool) -> Vec<(u64, ExportError)> {
        let copy_of = |id: u64| self.copies.iter().find(|copy| copy.id == id);
        let members = names(change.members().filter_map(copy_of));
        let deadline = self.config.deadline();
        let targets = change.targets().iter().filter_map(|id| copy_of(*id)).collect();
        let recorded = group::in_parallel(targets, |copy: &Replica| {
            let record = Record {
                set: self.set,
                own: copy.id,
                epoch: change.number(),
                is_closed,
                members: members.clone(),
            };
            (copy.id, copy.site.write_record(&record, deadline))
        });
        recorded.into_iter().filter_map(|(id, recorded)| Some((id, recorded.err()?))).collect()
    }

    /// Admits exports: copies the file to them and makes them members. The reasons why some are not admitted are kept.
    ///
    /// # Errors
    /// `NoMember` if the members are lost meanwhile.
    pub fn admit(&mut self, found: Vec<Found>) -> Result<(), ReplicaError> {
        if self.copies.is_empty() {
            // An export that comes back may be the one that has the data: nothing of it is changed.
            return Err(ReplicaError::NoMember);
        }
        let mut targets = Vec::new();
        for found in found {
            let index = found.site().index;
            match self.prepare(found, &targets) {
                Ok(copy) => targets.push(copy),
                Err(error) => self.outside.push((index, error.to_string())),
            }
        }
        while !targets.is_empty() {
            let Some(source) = self.copies.first() else { return Err(ReplicaError::NoMember) };
            let Filled { alive, failed, source: copied } =
                copying::fill(source, targets, self.len, self.config.timeout);
            failed.into_iter().for_each(|(copy, error)| self.leave_out(copy, &error.to_string()));
            match copied {
                Ok(()) if alive.is_empty() => return Ok(()),
                Ok(()) => return self.establish(alive, false),
                Err(error) => {
                    targets = alive;
                    let source = self.copies.remove(0);
                    self.leave_out(source, &error.to_string());
                    self.establish(Vec::new(), false)?;
                }
            }
        }
        Ok(())
    }

    /// Makes a copy ready to be filled: its record says that it is no member, so that it counts as incomplete until then. It is
    /// not admitted with the id of a member, or of a copy that is prepared already.
    fn prepare(&self, found: Found, prepared: &[Replica]) -> Result<Replica, ReplicaError> {
        let deadline = self.config.deadline();
        let has_its_id = |copy: &&Replica| found.record().is_some_and(|record| record.own == copy.id);
        if let Some(known) = self.copies.iter().chain(prepared).find(has_its_id) {
            return Err(ReplicaError::Duplicate(known.site.address, found.site().address));
        }
        let copy = match found {
            Found::Nothing(site) => {
                let mode = self.copies.first().map_or(0o600, |copy| copy.mode);
                site.create(mode & 0o777, self.owner, self.config.timeout)?
            }
            Found::Replica(copy, Some(record)) if record.set == self.set && record.epoch <= self.epoch => {
                copy
            }
            // Nothing is lost if it is filled.
            Found::Replica(copy, None) if copy.len == 0 => copy,
            Found::Replica(copy, None) => return Err(ReplicaError::Plain(copy.site.address)),
            Found::Replica(copy, Some(_)) => {
                let member = self.copies.first().map_or(copy.site.address, |copy| copy.site.address);
                return Err(ReplicaError::Foreign(member, copy.site.address));
            }
        };
        let record = Record {
            set: self.set,
            own: copy.id,
            epoch: self.epoch,
            is_closed: false,
            members: names(self.copies.iter()),
        };
        copy.site.write_record(&record, deadline).map_err(ReplicaError::of(copy.site.address))?;
        Ok(copy)
    }

    /// Admits the exports that are no members, as far as they answer.
    ///
    /// # Errors
    /// `NoMember`.
    pub fn resynchronize(&mut self) -> Result<(), ReplicaError> {
        if self.copies.is_empty() {
            return Err(ReplicaError::NoMember);
        }
        let deadline = self.config.deadline();
        let indexes: Vec<_> = std::mem::take(&mut self.outside).into_iter().map(|(index, _)| index).collect();
        let (config, place, owner) = (&self.config, &self.place, self.owner);
        let found = group::in_parallel(indexes, |index| {
            let address = config.exports[index].server;
            let site = Site::reach(index, &config.exports[index], place, deadline);
            let site = site.map_err(ReplicaError::of(address));
            let found = site.and_then(|site| site.lock(owner, deadline, config.timeout));
            found.map_err(|error| (index, error.to_string()))
        });
        let mut answering = Vec::new();
        for found in found {
            match found {
                Ok(found) => answering.push(found),
                Err(reason) => self.outside.push(reason),
            }
        }
        self.admit(answering)
    }
}

/// Copies as records name them: every record of an epoch has the same list.
fn names<'a>(copies: impl Iterator<Item = &'a Replica>) -> Vec<MemberName> {
    let name = |copy: &Replica| MemberName { id: copy.id, address: copy.site.address };
    let mut names: Vec<_> = copies.map(name).collect();
    names.sort_unstable_by_key(|name| name.id);
    names
}
