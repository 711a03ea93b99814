//! A random load whose results are known.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use terrace_export::{ReplicaAppended, ReplicaError, ReplicatedFile};

/// The most bytes of a write or record.
const BYTES_MAX: usize = 40_000;
/// The records in flight of a writer that only appends.
pub const IN_FLIGHT: usize = 16;
/// Beyond this length the file is cut.
const LEN_MAX: usize = 400_000;

/// A change of a file.
pub enum Change {
    Write { offset: usize, data: Vec<u8> },
    Append(Vec<u8>),
    Truncate(usize),
}

/// A random load, and what the file has after the changes so far. The same seed makes the same load.
#[derive(Clone)]
pub struct Load {
    random: StdRng,
    pub bytes: Vec<u8>,
}

impl Load {
    pub fn new(seed: u64) -> Load {
        Load { random: StdRng::seed_from_u64(seed), bytes: Vec::new() }
    }

    /// The next change of the file.
    pub fn next(&mut self) -> Change {
        if self.bytes.len() > LEN_MAX {
            return Change::Truncate(self.random.random_range(0..self.bytes.len()));
        }
        let mut data = vec![0; self.random.random_range(1..BYTES_MAX)];
        self.random.fill_bytes(&mut data);
        if self.bytes.is_empty() || self.random.random_bool(0.3) {
            return Change::Append(data);
        }
        let offset = self.random.random_range(0..self.bytes.len());
        data.truncate(self.bytes.len() - offset);
        Change::Write { offset, data }
    }

    /// The file has the change now.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Write { offset, data } => self.bytes[*offset..][..data.len()].copy_from_slice(data),
            Change::Append(data) => self.bytes.extend(data),
            Change::Truncate(len) => self.bytes.truncate(*len),
        }
    }

    /// Whether a file may have these bytes after the changes so far, and a part of the next one.
    pub fn permits(&self, found: &[u8]) -> bool {
        let mut after = self.clone();
        let change = after.next();
        after.apply(&change);
        let (before, after) = (&self.bytes, &after.bytes);
        let is_len = found.len() == before.len() || found.len() == after.len();
        let is_byte = |(at, byte): (usize, &u8)| before.get(at) == Some(byte) || after.get(at) == Some(byte);
        is_len && found.iter().enumerate().all(is_byte)
    }
}

/// The records of a writer that only appends.
pub fn record(seed: u64, number: u64) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed.wrapping_add(number));
    let mut data = vec![0; random.random_range(1..BYTES_MAX)];
    random.fill_bytes(&mut data);
    data
}

/// Appends records with several in flight until that fails, and says of each that was acknowledged.
pub fn append_in_flight(file: &mut ReplicatedFile, seed: u64) -> ReplicaError {
    let mut appender = file.appender(IN_FLIGHT, BYTES_MAX).unwrap();
    let (mut ended, mut next) = (Vec::new(), 0);
    loop {
        match appender.append(&record(seed, next), next % 4 == 0, next) {
            Ok(()) => next += 1,
            Err(ReplicaError::Full) => drop(appender.wait(&mut ended, Duration::from_secs(60))),
            Err(error) => return error,
        }
        for ReplicaAppended { tag, result } in ended.drain(..) {
            match result {
                Ok(_) => println!("done {tag}"),
                Err(error) => return error,
            }
        }
    }
}

/// Makes a change, persistently.
pub fn make(file: &mut ReplicatedFile, change: &Change) -> Result<(), ReplicaError> {
    match change {
        Change::Write { offset, data } => file.write_at(*offset as u64, data)?,
        Change::Append(data) => return file.append_commit(data).map(|_| ()),
        Change::Truncate(len) => file.truncate(*len as u64)?,
    }
    file.commit()
}
