//! Records in order.

use std::time::{Duration, Instant};

use terrace_export::RECORD_BYTES_MAX;

use crate::file::ReadLog;
use crate::format::{Found, HEAD_BYTES};
use crate::{Log, LogError, Position};

/// Bytes that are read at a time.
const CHUNK_BYTES: usize = 256 << 10;
/// Pauses while there is nothing new.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// A record of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where it begins.
    pub position: Position,
    /// What was appended.
    pub data: Vec<u8>,
}

/// The records of a log in order. Ends at the end of the log, and goes on when there is more.
///
/// A server that was killed in the middle of a record may have left its first part behind. No client has a position of such
/// a record. It is passed over once a later record is there; [`Entries::torn_bytes`] counts.
///
/// The end of the file may be cut and written anew, by a crash of its host or by the next writer of a replicated log. If the last
/// record that was returned is not there any more, the iterator ends with [`LogError::Changed`]: whether earlier ones are there,
/// it does not check.
pub struct Entries<'a, F> {
    log: &'a Log<F>,
    /// Where the next record begins.
    position: u64,
    /// Bytes of the file that end behind `position`, all of one read.
    bytes: Vec<u8>,
    /// How many of these are before `position`.
    used: usize,
    last: Option<Last>,
    torn_bytes: u64,
}

/// The record that was returned last.
#[derive(Clone, Copy)]
struct Last {
    position: Position,
    head: [u8; HEAD_BYTES],
    /// Bytes of the record, its head included.
    len: usize,
}

impl<F: ReadLog> Entries<'_, F> {
    pub(crate) fn new(log: &Log<F>, from: Position) -> Entries<'_, F> {
        Entries { log, position: from.0, bytes: Vec::new(), used: 0, last: None, torn_bytes: 0 }
    }

    /// Where the next record begins, or the log ends.
    pub fn position(&self) -> Position {
        Position(self.position)
    }

    /// Bytes that were passed over because they are no whole record.
    pub fn torn_bytes(&self) -> u64 {
        self.torn_bytes
    }

    /// The next record. Waits up to `timeout` for it to be appended.
    ///
    /// # Errors
    /// As for [`Entries::next`].
    pub fn wait_next(&mut self, timeout: Duration) -> Result<Option<Entry>, LogError> {
        let deadline = Instant::now() + timeout;
        let mut pause = PAUSE_MIN;
        loop {
            let found = self.try_next()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if found.is_some() || left.is_zero() {
                return Ok(found);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn try_next(&mut self) -> Result<Option<Entry>, LogError> {
        loop {
            let needed = match self.log.id.parse_record(&self.bytes[self.used..]) {
                Found::Record(data) => {
                    let entry = Entry { position: Position(self.position), data: data.to_vec() };
                    let (mut head, len) = ([0; HEAD_BYTES], HEAD_BYTES + entry.data.len());
                    head.copy_from_slice(&self.bytes[self.used..][..HEAD_BYTES]);
                    self.last = Some(Last { position: entry.position, head, len });
                    self.advance(len);
                    return Ok(Some(entry));
                }
                Found::Incomplete(needed) => Some(needed),
                Found::None => None,
            };
            if let Some(needed) = needed
                && self.fill(needed)?
            {
                continue;
            }
            if self.used == self.bytes.len() || !self.pass_over()? {
                return Ok(None);
            }
        }
    }

    /// Goes on at the first record behind bytes that are none. False if there is none; then these bytes may be the end of the
    /// log, and are looked at again.
    fn pass_over(&mut self) -> Result<bool, LogError> {
        let start = self.log.start()?;
        if self.position < start.0 {
            return Err(LogError::Trimmed(start));
        }
        // What is left of a record is shorter than one, and so is the record behind it.
        let has_more = self.fill(2 * RECORD_BYTES_MAX)?;
        // The file may have been cut in the middle of the last record, whose head is there.
        self.check_last(|last| last.len)?;
        let searched = if has_more { RECORD_BYTES_MAX } else { self.bytes.len() };
        // The bytes were read again: what was no record may be one now.
        let mut at = 0;
        while at < searched {
            at = self.log.id.next_candidate(&self.bytes, at);
            if matches!(self.log.id.parse_record(&self.bytes[at..]), Found::Record(_)) {
                break;
            }
            at += 1;
        }
        if at >= searched && !has_more {
            return Ok(false);
        }
        self.torn_bytes += at as u64;
        self.advance(at);
        Ok(true)
    }

    fn advance(&mut self, count: usize) {
        self.used += count;
        self.position += count as u64;
    }

    /// Reads `needed` bytes from the position on, or more. False if the log ends before.
    fn fill(&mut self, needed: usize) -> Result<bool, LogError> {
        // Bytes of an earlier read may have been replaced since.
        self.used = 0;
        self.bytes.resize(needed.max(CHUNK_BYTES), 0);
        let read = self.log.file.read_at(self.position, &mut self.bytes);
        self.bytes.truncate(read.as_ref().copied().unwrap_or(0));
        let checked = read.and_then(|_| self.check_last(|_| HEAD_BYTES));
        if checked.is_err() {
            self.bytes.clear();
        }
        checked.map(|()| self.bytes.len() >= needed)
    }

    /// Checks that the first `count` bytes of the last record are still there, and the record if these are all.
    fn check_last(&self, count: impl Fn(&Last) -> usize) -> Result<(), LogError> {
        let Some(last) = self.last else { return Ok(()) };
        let mut bytes = vec![0; count(&last)];
        let read = self.log.file.read_at(last.position.0, &mut bytes)?;
        let is_whole = || matches!(self.log.id.parse_record(&bytes), Found::Record(_));
        let is_there =
            read == bytes.len() && bytes[..HEAD_BYTES] == last.head && (bytes.len() < last.len || is_whole());
        // A record that was trimmed is gone, and so it may be.
        if is_there || self.log.start()? > last.position {
            return Ok(());
        }
        Err(LogError::Changed(last.position))
    }
}

impl<F: ReadLog> Iterator for Entries<'_, F> {
    type Item = Result<Entry, LogError>;

    /// The next record; `None` at the end of the log.
    ///
    /// # Errors
    /// `Trimmed` if the log begins behind its position now; `Changed`, from now on, if the record that was returned last is not there
    /// any more; those of the export.
    fn next(&mut self) -> Option<Result<Entry, LogError>> {
        self.try_next().transpose()
    }
}
