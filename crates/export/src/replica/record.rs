//! The record beside a copy of a replicated file.
//!
//! ```text
//!   magic 8 | set 8 | own id 8 | epoch 8 | closed 1 | members: count 2, each: id 8, address (length 2, text) | zeros | CRC-32 4
//! ```
//!
//! Numbers are little-endian. The CRC covers all that is before it. The file has the record twice, each in a block of its own. A
//! new record is written to the first block, synced, and then written to the second one. So one of them is whole at any time,
//! and no block is allocated, which a full disk would refuse.

use std::net::SocketAddr;

use crate::proto::{DecodeError, Reader};
use crate::proto::{Text, Wire};

/// Magic number and version.
const MAGIC: [u8; 8] = *b"TerRepl\x02";
/// The most members of a replica set.
pub const MEMBERS_MAX: usize = 8;
/// The bytes of a record.
const RECORD_BYTES: usize = 1024;
/// The bytes of each of the two blocks of a record's file: no smaller than a file system's, so they fail apart.
pub const SLOT_BYTES: usize = 4096;
/// The largest number of an epoch. No writer comes there, and none can be made to count beyond the last number.
const EPOCH_MAX: u64 = u64::MAX / 2;

/// A member as records name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberName {
    /// The id of its copy.
    pub id: u64,
    /// The address at which the writer reached its export.
    pub address: SocketAddr,
}

/// What an export shows of a replicated file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The id of the replica set.
    pub set: u64,
    /// The id of the copy at this export.
    pub own: u64,
    /// The newest epoch that this export knows.
    pub epoch: u64,
    /// The writer has closed the file in this epoch: all members are equal.
    pub is_closed: bool,
    /// The members of the epoch. A copy that is not among them may be incomplete.
    pub members: Vec<MemberName>,
}

impl Record {
    /// Whether its own copy was a member in its epoch.
    pub fn is_member(&self) -> bool {
        self.members.iter().any(|member| member.id == self.own)
    }

    /// The bytes of a block with the record.
    pub fn slot(&self) -> Vec<u8> {
        let mut bytes = self.emit();
        bytes.resize(SLOT_BYTES, 0);
        bytes
    }

    /// The record of a file.
    ///
    /// # Errors
    /// Why neither block has one.
    pub fn of_file(bytes: &[u8]) -> Result<Record, &'static str> {
        if bytes.len() != 2 * SLOT_BYTES {
            return Err("its file has another length");
        }
        let [first, second] = [0, SLOT_BYTES].map(|at| Record::parse(&bytes[at..][..RECORD_BYTES]));
        // The first one is the newer one, if it is whole.
        first.or_else(|error| second.map_err(|_| error))
    }

    fn emit(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for number in [self.set, self.own, self.epoch] {
            number.put(&mut bytes);
        }
        self.is_closed.put(&mut bytes);
        (self.members.len() as u16).put(&mut bytes);
        for member in &self.members {
            member.id.put(&mut bytes);
            Text::from(member.address.to_string().as_bytes()).put(&mut bytes);
        }
        bytes.resize(RECORD_BYTES - size_of::<u32>(), 0);
        crc32fast::hash(&bytes).put(&mut bytes);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Record, &'static str> {
        let (body, crc) = bytes.split_last_chunk::<4>().ok_or("it is too short")?;
        let rest = body.strip_prefix(&MAGIC).ok_or("it is no record of this version")?;
        if crc32fast::hash(body) != u32::from_le_bytes(*crc) {
            return Err("its checksum is wrong");
        }
        let mut reader = Reader::new(rest);
        let record = Record::take(&mut reader).map_err(|_| "a field is invalid")?;
        while let Ok(byte) = u8::take(&mut reader) {
            if byte != 0 {
                return Err("it is too long");
            }
        }
        let mut ids: Vec<_> = record.members.iter().map(|member| member.id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.len() != record.members.len() || !(1..=MEMBERS_MAX).contains(&ids.len()) {
            return Err("its members are invalid");
        }
        if !(1..=EPOCH_MAX).contains(&record.epoch) {
            return Err("the number of its epoch is invalid");
        }
        Ok(record)
    }

    fn take(reader: &mut Reader<'_>) -> Result<Record, DecodeError> {
        let (set, own, epoch) = (u64::take(reader)?, u64::take(reader)?, u64::take(reader)?);
        let (is_closed, count) = (bool::take(reader)?, u16::take(reader)?);
        let mut members = Vec::new();
        for _ in 0..count {
            let (id, address) = (u64::take(reader)?, Text::take(reader)?);
            let address = std::str::from_utf8(&address.0).ok().and_then(|text| text.parse().ok());
            let invalid = DecodeError::Field { field: "address", value: id };
            members.push(MemberName { id, address: address.ok_or(invalid)? });
        }
        Ok(Record { set, own, epoch, is_closed, members })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_written_and_every_damage_is_found() {
        let member = |id: u64| MemberName { id, address: format!("192.0.2.{id}:7447").parse().unwrap() };
        let members: Vec<_> = (1..=8).map(member).collect();
        let record = Record { set: 1 << 63, own: 2, epoch: 77, is_closed: true, members };
        let bytes = record.emit();
        assert_eq!(bytes.len(), RECORD_BYTES);
        assert_eq!(Record::parse(&bytes), Ok(record.clone()));
        for len in 0..bytes.len() {
            assert!(Record::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(Record::parse(&wrong).is_err(), "bit {bit}");
        }
        // Records with a valid checksum, too.
        let with = |members: Vec<MemberName>| Record { members, ..record.clone() };
        for invalid in
            [with(Vec::new()), with((1..=9).map(member).collect()), with(vec![member(1), member(1)])]
        {
            assert_eq!(Record::parse(&invalid.emit()), Err("its members are invalid"));
        }
        for epoch in [0, EPOCH_MAX + 1, u64::MAX] {
            let invalid = Record { epoch, ..record.clone() };
            assert_eq!(Record::parse(&invalid.emit()), Err("the number of its epoch is invalid"));
        }
        let mut longer = bytes[..bytes.len() - 4].to_vec();
        *longer.last_mut().unwrap() = 1;
        crc32fast::hash(&longer).put(&mut longer);
        assert_eq!(Record::parse(&longer), Err("it is too long"));
    }

    #[test]
    fn a_file_has_the_record_before_or_the_new_one_wherever_its_replacement_ends() {
        let members = vec![MemberName { id: 1, address: "192.0.2.1:7447".parse().unwrap() }];
        let old = Record { set: 1, own: 1, epoch: 7, is_closed: false, members };
        let new = Record { epoch: 8, is_closed: true, ..old.clone() };
        let (before, after) = (old.slot().repeat(2), new.slot().repeat(2));
        for written in 0..before.len() {
            let bytes = [&after[..written], &before[written..]].concat();
            let found = Record::of_file(&bytes);
            let is_first_whole = bytes[..RECORD_BYTES] == after[..RECORD_BYTES];
            assert_eq!(found.as_ref(), Ok(if is_first_whole { &new } else { &old }), "{written}");
        }
        assert!(Record::of_file(&vec![0; 2 * SLOT_BYTES]).is_err());
        assert!(Record::of_file(&old.slot()).is_err());
    }
}
