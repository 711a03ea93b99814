//! Which epoch counts, and in which order a new one is recorded (`docs/replicated-files.md`). Nothing here waits or sends.

use super::record::Record;

/// Two records that exclude each other, by their places in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict(pub usize, pub usize);

/// The place of the record with the newest epoch; `None` if there are no records.
///
/// # Errors
/// Records of different replica sets, or of one epoch with different members.
pub fn newest(records: &[&Record]) -> Result<Option<usize>, Conflict> {
    let mut newest: Option<usize> = None;
    for (place, record) in records.iter().enumerate() {
        let Some(known) = newest else {
            newest = Some(place);
            continue;
        };
        let other = records[known];
        let is_same_epoch = record.epoch == other.epoch;
        if record.set != other.set || is_same_epoch && record.members != other.members {
            return Err(Conflict(known, place));
        }
        if record.epoch > other.epoch {
            newest = Some(place);
        }
    }
    Ok(newest)
}

/// A new epoch that is being recorded: at the survivors of the epoch before first, then at copies that are admitted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Change {
    number: u64,
    survivors: Vec<u64>,
    admitted: Vec<u64>,
    have_survivors_it: bool,
}

/// What follows when all targets of a [`Change`] have recorded it, or failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// This change is to be recorded at its targets.
    Record(Change),
    /// All members have it.
    Established,
    /// No member is left.
    NoneLeft,
}

impl Change {
    /// The change from the epoch `last` to one with these members, by their ids.
    pub fn new(last: u64, survivors: Vec<u64>, admitted: Vec<u64>) -> Change {
        Change { number: last + 1, survivors, admitted, have_survivors_it: false }
    }

    /// The number of the new epoch.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The members of the new epoch.
    pub fn members(&self) -> impl Iterator<Item = u64> + '_ {
        self.survivors.iter().chain(&self.admitted).copied()
    }

    /// Where it is to be recorded now.
    pub fn targets(&self) -> &[u64] {
        if self.have_survivors_it { &self.admitted } else { &self.survivors }
    }

    /// The targets have recorded it, except those that failed: an epoch without them is recorded instead, under a number of
    /// its own, because some may have recorded this one.
    pub fn recorded(mut self, failed: &[u64]) -> Step {
        if failed.is_empty() {
            if self.have_survivors_it || self.admitted.is_empty() {
                return Step::Established;
            }
            self.have_survivors_it = true;
            return Step::Record(self);
        }
        let has_failed = |id: &u64| failed.contains(id);
        self.survivors.retain(|id| !has_failed(id));
        self.admitted.retain(|id| !has_failed(id));
        if self.survivors.is_empty() {
            return Step::NoneLeft;
        }
        self.number += 1;
        self.have_survivors_it = false;
        Step::Record(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::MemberName;
    use super::*;

    fn record(set: u64, epoch: u64, ids: &[u64]) -> Record {
        let address = "192.0.2.1:7447".parse().unwrap();
        let members = ids.iter().map(|&id| MemberName { id, address }).collect();
        Record { set, own: 1, epoch, is_closed: false, members }
    }

    #[test]
    fn the_newest_epoch_counts_and_others_that_exclude_it_are_named() {
        let (old, new) = (record(1, 4, &[1, 2, 3]), record(1, 5, &[1, 3]));
        assert_eq!(newest(&[]), Ok(None));
        assert_eq!(newest(&[&old, &new, &old]), Ok(Some(1)));
        assert_eq!(newest(&[&old, &record(2, 9, &[1])]), Err(Conflict(0, 1)));
        assert_eq!(newest(&[&old, &new, &record(1, 5, &[2])]), Err(Conflict(1, 2)));
    }

    #[test]
    fn survivors_record_first_and_each_attempt_has_a_number_of_its_own() {
        let change = Change::new(7, vec![1, 2], vec![3]);
        assert_eq!((change.number(), change.targets()), (8, &[1, 2][..]));
        let Step::Record(change) = change.recorded(&[]) else { panic!() };
        assert_eq!((change.number(), change.targets()), (8, &[3][..]));
        assert_eq!(change.clone().recorded(&[]), Step::Established);
        let Step::Record(change) = change.recorded(&[3]) else { panic!() };
        assert_eq!((change.number(), change.targets()), (9, &[1, 2][..]));
        let Step::Record(change) = change.recorded(&[2]) else { panic!() };
        assert_eq!((change.number(), change.members().collect::<Vec<_>>()), (10, vec![1]));
        assert_eq!(change.recorded(&[1]), Step::NoneLeft);
    }
}
