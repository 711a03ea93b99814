//! Making copies equal to one that has everything.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::group::{self, Fault, Outcomes};
use super::site::Replica;
use crate::error::ExportError;
use crate::proto::Request;

/// Bytes that are copied at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Bytes that are copied before they are made persistent, so that a disk needs no more than the timeout for what it has to
/// write.
const COMMIT_BYTES: u64 = 64 << 20;

/// Copies that are being filled, and what became of them.
struct Targets {
    alive: Vec<Replica>,
    failed: Vec<(Replica, ExportError)>,
}

impl Targets {
    /// Sorts out the copies that have failed.
    fn note<T>(&mut self, outcomes: Outcomes<T>) {
        for (copy, outcome) in std::mem::take(&mut self.alive).into_iter().zip(outcomes) {
            match outcome.map_err(Fault::error) {
                Ok(_) => self.alive.push(copy),
                Err(error) => self.failed.push((copy, error)),
            }
        }
    }

    fn punch(&mut self, offset: u64, end: u64, timeout: Duration) {
        if offset < end {
            let punch = |open| Request::Punch { open, offset, len: end - offset };
            let punched = group::change(&self.alive, timeout, punch);
            self.note(punched);
        }
    }
}

/// What became of the targets of [`fill`].
pub struct Filled {
    /// They have all that the source has, persistently, if it could be read to the end.
    pub alive: Vec<Replica>,
    /// They do not, for these reasons.
    pub failed: Vec<(Replica, ExportError)>,
    /// Why the source could not be read to the end.
    pub source: Result<(), ExportError>,
}

/// Makes files equal to the first `len` bytes of the source, which nobody changes meanwhile. Only what is not a hole is copied.
/// Each step has the timeout.
pub fn fill(source: &Replica, targets: Vec<Replica>, len: u64, timeout: Duration) -> Filled {
    let mut targets = Targets { alive: targets, failed: Vec::new() };
    let copied = copy(source, &mut targets, len, timeout);
    if copied.is_ok() {
        let synced =
            targets.alive.iter().map(|copy| copy.sync(Instant::now() + timeout).map_err(Fault::Lost));
        let synced = synced.collect();
        targets.note(synced);
    }
    Filled { alive: targets.alive, failed: targets.failed, source: copied }
}

fn copy(source: &Replica, targets: &mut Targets, len: u64, timeout: Duration) -> Result<(), ExportError> {
    let cut = group::change(&targets.alive, timeout, |open| Request::Truncate { open, len });
    targets.note(cut);
    let mut chunk = vec![0; CHUNK_BYTES];
    let (mut done, mut uncommitted) = (0, 0);
    while done < len && !targets.alive.is_empty() {
        let data = source.find_data(done, Instant::now() + timeout)?;
        let Range { start, end } = next_copied(data, done, len)?;
        targets.punch(done, start, timeout);
        done = start;
        while done < end {
            let part = &mut chunk[..CHUNK_BYTES.min((end - done) as usize)];
            group::read(std::slice::from_ref(source), done, part, timeout)?;
            let written = group::write(&targets.alive, done, part, timeout);
            targets.note(written);
            done += part.len() as u64;
            uncommitted += part.len() as u64;
            if uncommitted >= COMMIT_BYTES {
                uncommitted = 0;
                let committed = group::commit(&targets.alive, timeout);
                targets.note(committed);
            }
        }
    }
    let committed = group::commit(&targets.alive, timeout);
    targets.note(committed);
    Ok(())
}

/// The range that is copied next: that of the data which a server reports from `done` on, within the first `len` bytes.
///
/// # Errors
/// `Protocol` if the server reports data before `done`, again and again.
fn next_copied(data: Range<u64>, done: u64, len: u64) -> Result<Range<u64>, ExportError> {
    // A file that has become shorter meanwhile was changed by another program.
    let start = if data.is_empty() { len } else { data.start.clamp(done, len) };
    let end = data.end.clamp(start, len);
    if start < len && start == end { Err(ExportError::Protocol) } else { Ok(start..end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_copied_goes_on_or_ends() {
        let next = |data, done| next_copied(data, done, 100).ok();
        assert_eq!(next(10..20, 0), Some(10..20));
        assert_eq!(next(10..20, 15), Some(15..20));
        assert_eq!(next(90..120, 20), Some(90..100));
        assert_eq!(next(120..130, 20), Some(100..100));
        assert_eq!(next(0..0, 20), Some(100..100));
        // A server that does not keep to the protocol.
        assert_eq!(next(10..20, 20), None);
        assert_eq!(next(0..u64::MAX, 20), Some(20..100));
    }
}
