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
pub struct Entries<'a, F> {
    log: &'a Log<F>,
    /// Where the next record begins.
    position: u64,
    /// Bytes of the file from `position` on.
    bytes: Vec<u8>,
    /// Bytes of these that belong to records which were returned.
    used: usize,
    torn_bytes: u64,
}

impl<F: ReadLog> Entries<'_, F> {
    pub(crate) fn new(log: &Log<F>, from: Position) -> Entries<'_, F> {
        Entries { log, position: from.0, bytes: Vec::new(), used: 0, torn_bytes: 0 }
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
                    self.advance(HEAD_BYTES + entry.data.len());
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
        let searched = if has_more { RECORD_BYTES_MAX } else { self.bytes.len() };
        let mut at = 1;
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

    /// Reads until `needed` bytes of what is not used are there, or the log ends before: false.
    fn fill(&mut self, needed: usize) -> Result<bool, LogError> {
        self.bytes.drain(..std::mem::take(&mut self.used));
        while self.bytes.len() < needed {
            let have = self.bytes.len();
            self.bytes.resize(needed.max(have + CHUNK_BYTES), 0);
            let read = self.log.file.read_at(self.position + have as u64, &mut self.bytes[have..]);
            self.bytes.truncate(have + read.as_ref().copied().unwrap_or(0));
            if read? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl<F: ReadLog> Iterator for Entries<'_, F> {
    type Item = Result<Entry, LogError>;

    /// The next record; `None` at the end of the log.
    ///
    /// # Errors
    /// `Trimmed` if the log begins behind its position now; those of the export.
    fn next(&mut self) -> Option<Result<Entry, LogError>> {
        self.try_next().transpose()
    }
}
