//! The bytes of a log's file.
//!
//! ```text
//!   0        magic 8 | id 8 | CRC-32 4            written before the file gets its name
//!   64, 96   start 8 | number 8 | CRC-32 4        where the log begins: the slot with the higher number counts
//!   4096     records: id 8 | length 4 | CRC-32 4 | data
//! ```
//!
//! Numbers are little-endian. A CRC covers what is before it, and a record's its data, too; all begin with the log's id.

use crc32fast::Hasher;
use terrace_export::RECORD_BYTES_MAX;

/// Magic number and version.
const MAGIC: [u8; 8] = *b"TerLog\0\x01";
/// Bytes of the head of a file that are written before it gets its name.
pub(crate) const IDENTITY_BYTES: usize = 20;
/// Where the slots are that say where the log begins.
pub(crate) const START_SLOTS: [u64; 2] = [64, 96];
/// Bytes of a slot.
pub(crate) const START_BYTES: usize = 20;
/// Where the first record is.
pub(crate) const RECORDS_OFFSET: u64 = 4096;
/// Bytes of a record's head.
pub(crate) const HEAD_BYTES: usize = 16;
/// Bytes of a record's data at most.
pub const DATA_BYTES_MAX: usize = RECORD_BYTES_MAX - HEAD_BYTES;

/// The id of a log, random: the bytes by which its records are found behind a torn one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogId(pub u64);

/// Where a log begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Start {
    pub offset: u64,
    /// How often it was changed.
    pub number: u64,
}

/// A record in a buffer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found<'a> {
    /// A record with this data.
    Record(&'a [u8]),
    /// It may be a record, of so many bytes at least.
    Incomplete(usize),
    /// It is none.
    None,
}

impl LogId {
    fn crc(self, parts: &[&[u8]]) -> [u8; 4] {
        let mut hasher = Hasher::new();
        hasher.update(&self.0.to_le_bytes());
        parts.iter().for_each(|part| hasher.update(part));
        hasher.finalize().to_le_bytes()
    }

    /// The head of the file.
    pub fn emit(self) -> [u8; IDENTITY_BYTES] {
        let mut bytes = [0; IDENTITY_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&self.0.to_le_bytes());
        let crc = self.crc(&[&bytes[..16]]);
        bytes[16..].copy_from_slice(&crc);
        bytes
    }

    /// The id in the head of a file. `None` if it is no log's.
    pub fn parse(bytes: &[u8; IDENTITY_BYTES]) -> Option<LogId> {
        let id = LogId(number(&bytes[8..16]));
        (bytes[..8] == MAGIC && bytes[16..] == id.crc(&[&bytes[..16]])).then_some(id)
    }

    /// A slot that says where the log begins.
    pub fn emit_start(self, start: Start) -> [u8; START_BYTES] {
        let mut bytes = [0; START_BYTES];
        bytes[..8].copy_from_slice(&start.offset.to_le_bytes());
        bytes[8..16].copy_from_slice(&start.number.to_le_bytes());
        let crc = self.crc(&[&bytes[..16]]);
        bytes[16..].copy_from_slice(&crc);
        bytes
    }

    /// What a slot says. `None` if it was never written, or not as a whole.
    pub fn parse_start(self, bytes: &[u8; START_BYTES]) -> Option<Start> {
        let start = Start { offset: number(&bytes[..8]), number: number(&bytes[8..16]) };
        (bytes[16..] == self.crc(&[&bytes[..16]])).then_some(start)
    }

    /// Adds a record to `bytes`.
    pub fn emit_record(self, data: &[u8], bytes: &mut Vec<u8>) {
        let len = (data.len() as u32).to_le_bytes();
        bytes.extend_from_slice(&self.0.to_le_bytes());
        bytes.extend_from_slice(&len);
        bytes.extend_from_slice(&self.crc(&[&len, data]));
        bytes.extend_from_slice(data);
    }

    /// What the beginning of `bytes` is.
    pub fn parse_record(self, bytes: &[u8]) -> Found<'_> {
        let id = self.0.to_le_bytes();
        let known = bytes.len().min(id.len());
        if bytes[..known] != id[..known] {
            return Found::None;
        }
        let Some((head, rest)) = bytes.split_at_checked(HEAD_BYTES) else {
            return Found::Incomplete(HEAD_BYTES);
        };
        let len = number(&head[8..12]) as usize;
        if len > DATA_BYTES_MAX {
            return Found::None;
        }
        let Some(data) = rest.get(..len) else { return Found::Incomplete(HEAD_BYTES + len) };
        if head[12..] == self.crc(&[&head[8..12], data]) { Found::Record(data) } else { Found::None }
    }

    /// The first place in `bytes`, from `from` on, at which a record may begin. If there is none, the last bytes of `bytes`
    /// are the place that may have the beginning of an id.
    pub fn next_candidate(self, bytes: &[u8], from: usize) -> usize {
        let id = self.0.to_le_bytes();
        let rest = bytes.get(from..).unwrap_or_default();
        let found = rest.windows(id.len()).position(|window| window == id);
        from + found.unwrap_or(rest.len().saturating_sub(id.len() - 1))
    }
}

/// Whether a file of these bytes may have a head that was not written as a whole, and nothing else.
pub(crate) fn is_unfinished_head(bytes: &[u8]) -> bool {
    let (magic, rest) = bytes.split_at(bytes.len().min(MAGIC.len()));
    // The other bytes of the identity are random. They are written behind the first ones.
    let known = if magic == MAGIC { IDENTITY_BYTES - MAGIC.len() } else { 0 };
    magic.iter().zip(MAGIC).all(|(byte, expected)| [0, expected].contains(byte))
        && rest.iter().skip(known).all(|byte| *byte == 0)
}

/// A little-endian number of up to 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: LogId = LogId(0x0123_4567_89ab_cdef);

    #[test]
    fn records_are_found_as_they_were_written_and_no_others() {
        let mut record = Vec::new();
        ID.emit_record(b"some data", &mut record);
        assert_eq!(ID.parse_record(&record), Found::Record(b"some data"));
        assert_eq!(LogId(7).parse_record(&record), Found::None);
        for len in 0..record.len() {
            let needed = if len < HEAD_BYTES { HEAD_BYTES } else { record.len() };
            assert_eq!(ID.parse_record(&record[..len]), Found::Incomplete(needed), "{len} bytes");
        }
        for bit in 0..record.len() * 8 {
            let mut wrong = record.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!matches!(ID.parse_record(&wrong), Found::Record(_)), "bit {bit}");
        }
    }

    #[test]
    fn heads_and_starts_are_verified() {
        let head = ID.emit();
        assert_eq!(LogId::parse(&head), Some(ID));
        let start = Start { offset: 1 << 40, number: 3 };
        let slot = ID.emit_start(start);
        assert_eq!(ID.parse_start(&slot), Some(start));
        assert_eq!(ID.parse_start(&[0; START_BYTES]), None);
        for bit in 0..IDENTITY_BYTES * 8 {
            let (mut head, mut slot) = (head, slot);
            head[bit / 8] ^= 1 << (bit % 8);
            slot[bit / 8] ^= 1 << (bit % 8);
            assert_eq!((LogId::parse(&head), ID.parse_start(&slot)), (None, None), "bit {bit}");
        }
    }

    #[test]
    fn candidates_are_where_the_id_is_or_may_begin() {
        let mut bytes = vec![0; 100];
        bytes[40..48].copy_from_slice(&ID.0.to_le_bytes());
        assert_eq!(ID.next_candidate(&bytes, 0), 40);
        assert_eq!(ID.next_candidate(&bytes, 40), 40);
        assert_eq!(ID.next_candidate(&bytes, 41), 93);
        assert_eq!(ID.next_candidate(&bytes, 98), 98);
    }
}
