//! A model of the possible contents of a region, after a kill and on the device.

use std::ops::Range;

/// A write that a client has begun.
struct Write {
    range: Range<usize>,
    data: Vec<u8>,
    /// The time of the acknowledgement; `None` while the write is in flight.
    acknowledged_at: Option<u32>,
}

impl Write {
    fn overlaps(&self, range: &Range<usize>) -> bool {
        self.range.start < range.end && range.start < self.range.end
    }
}

/// A commit that a client has begun.
pub struct Commit {
    range: Range<usize>,
    at: u32,
    /// The acknowledged content at the start.
    bytes: Vec<u8>,
}

/// The possible contents of a region. Time is counted in acknowledgements and commits.
pub struct Model {
    /// The content after all acknowledged writes.
    acknowledged: Vec<u8>,
    /// Each byte's content at its last commit, and the time at which that commit started.
    durable: Vec<u8>,
    durable_at: Vec<u32>,
    /// The writes, in the order in which they were begun.
    writes: Vec<Write>,
    commit_count: usize,
    now: u32,
}

impl Model {
    /// A region of durable zeros.
    pub fn new(len: usize) -> Model {
        Model {
            acknowledged: vec![0; len],
            durable: vec![0; len],
            durable_at: vec![0; len],
            writes: Vec::new(),
            commit_count: 0,
            now: 0,
        }
    }

    /// Begins a write and returns its number.
    pub fn begin(&mut self, range: Range<usize>, data: Vec<u8>) -> usize {
        self.writes.push(Write { range, data, acknowledged_at: None });
        self.writes.len() - 1
    }

    /// Acknowledges a write. Overlapping writes are acknowledged in the order in which they take effect.
    pub fn acknowledge(&mut self, number: usize) {
        self.now += 1;
        let write = &mut self.writes[number];
        write.acknowledged_at = Some(self.now);
        self.acknowledged[write.range.clone()].copy_from_slice(&write.data);
    }

    /// Begins a commit.
    pub fn begin_commit(&mut self, range: Range<usize>) -> Commit {
        self.now += 1;
        Commit { bytes: self.acknowledged[range.clone()].to_vec(), range, at: self.now }
    }

    /// Acknowledges a commit.
    pub fn acknowledge_commit(&mut self, commit: &Commit) {
        self.commit_count += 1;
        for (at, byte) in commit.range.clone().zip(&commit.bytes) {
            if self.durable_at[at] < commit.at {
                (self.durable[at], self.durable_at[at]) = (*byte, commit.at);
            }
        }
    }

    pub fn acknowledged_count(&self) -> usize {
        self.writes.iter().filter(|write| write.acknowledged_at.is_some()).count()
    }

    pub fn commit_count(&self) -> usize {
        self.commit_count
    }

    pub fn in_flight_count(&self) -> usize {
        self.writes.len() - self.acknowledged_count()
    }

    /// Checks a region's content: each byte is the acknowledged one, or from a write in flight.
    ///
    /// # Errors
    /// Describes the wrong bytes.
    pub fn check(&self, image: &[u8]) -> Result<(), String> {
        let in_flight = self.writes.iter().filter(|write| write.acknowledged_at.is_none());
        self.report(&unexplained(image, &self.acknowledged, in_flight, |_, _| true))
    }

    /// Checks a device's content: each byte is the committed one, or from a write that was not acknowledged before the
    /// commit.
    ///
    /// # Errors
    /// Describes the wrong bytes.
    pub fn check_durable(&self, image: &[u8]) -> Result<(), String> {
        let is_later = |write: &Write, at: usize| {
            write.acknowledged_at.is_none_or(|acknowledged_at| acknowledged_at > self.durable_at[at])
        };
        self.report(&unexplained(image, &self.durable, self.writes.iter(), is_later))
    }

    fn report(&self, wrong: &[usize]) -> Result<(), String> {
        let (Some(first), Some(last)) = (wrong.first(), wrong.last()) else { return Ok(()) };
        let range = *first..last + 1;
        let writes: Vec<_> = self
            .writes
            .iter()
            .enumerate()
            .filter(|(_, write)| write.overlaps(&range))
            .map(|(number, write)| (number, &write.range, write.acknowledged_at))
            .collect();
        let last = &writes[writes.len().saturating_sub(10)..];
        Err(format!("{} wrong bytes in {range:x?}; the last writes there: {last:x?}", wrong.len()))
    }

    /// Makes the content after a kill the acknowledged one.
    pub fn restart(&mut self, image: Vec<u8>) {
        self.acknowledged = image;
        self.commit_count = 0;
    }

    /// Makes all acknowledged writes durable, and removes all writes.
    pub fn make_all_durable(&mut self) {
        self.durable.copy_from_slice(&self.acknowledged);
        self.durable_at.fill(0);
        self.writes.clear();
        self.now = 0;
    }
}

/// The positions whose bytes are neither the wanted ones nor from a write for which `admits` is true.
fn unexplained<'a>(
    image: &[u8],
    wanted: &[u8],
    writes: impl Iterator<Item = &'a Write>,
    admits: impl Fn(&Write, usize) -> bool,
) -> Vec<usize> {
    assert_eq!(image.len(), wanted.len());
    let mut wrong: Vec<bool> = image.iter().zip(wanted).map(|(found, wanted)| found != wanted).collect();
    for write in writes {
        for (at, byte) in write.range.clone().zip(&write.data) {
            if wrong[at] && image[at] == *byte && admits(write, at) {
                wrong[at] = false;
            }
        }
    }
    (0..wrong.len()).filter(|&at| wrong[at]).collect()
}

/// All checks depend on the model, so that it must detect wrong bytes.
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_torn_and_uncommitted_bytes_are_detected() {
        let mut model = Model::new(8);
        let first = model.begin(0..4, vec![1; 4]);
        model.acknowledge(first);
        let commit = model.begin_commit(0..8);
        let second = model.begin(2..6, vec![2; 4]);
        model.acknowledge(second);
        model.acknowledge_commit(&commit);
        model.begin(5..8, vec![3; 3]);
        let is_lost = [1, 1, 1, 2, 2, 2, 0, 0];
        let is_of_no_write = [1, 1, 2, 2, 3, 2, 0, 0];
        assert_eq!(model.check(&[1, 1, 2, 2, 2, 2, 0, 0]), Ok(()));
        assert_eq!(model.check(&[1, 1, 2, 2, 2, 3, 0, 3]), Ok(()));
        assert!(model.check(&is_lost).is_err() && model.check(&is_of_no_write).is_err());
        let committed_is_lost = [0, 1, 1, 1, 0, 0, 0, 0];
        let is_of_another_range = [1, 1, 1, 1, 1, 0, 0, 0];
        assert_eq!(model.check_durable(&[1, 1, 1, 1, 0, 0, 0, 0]), Ok(()));
        assert_eq!(model.check_durable(&[1, 1, 1, 2, 0, 3, 0, 0]), Ok(()));
        assert!(model.check_durable(&committed_is_lost).is_err());
        assert!(model.check_durable(&is_of_another_range).is_err());
    }
}
