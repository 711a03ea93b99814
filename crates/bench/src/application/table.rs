//! The table of the key-value store: sorted keys of 8 bytes with values of 128 bytes, in leaves of 16 keys.
//!
//! A leaf is its keys in ascending order, then their values in the same order, as the leaves of XStore's tree are. Leaves
//! lie one behind the other in the order of their keys, and neither keys nor a value cross a page boundary. Keys are
//! pseudorandom, and a function of their index. A value's content is a function of its key.

use crate::content::{GRANULE_BYTES, Stamp, fill, stamp_of};
use crate::ledger::Verified;
use crate::permutation::mix;

/// The keys of a leaf.
const LEAF_KEYS: usize = 16;
const KEY_BYTES: usize = 8;
/// Bytes of a value.
pub const VALUE_BYTES: usize = 128;
/// Bytes of a leaf's keys.
pub const KEYS_BYTES: usize = LEAF_KEYS * KEY_BYTES;
const LEAF_BYTES: usize = KEYS_BYTES + LEAF_KEYS * VALUE_BYTES;

/// The density of keys changes from group to group, by a factor of up to three. A linear model fits a group at best.
const GROUP_KEYS: u64 = 16 * LEAF_KEYS as u64;

/// An error in the data of a READ from the table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The bytes are not the leaf's keys.
    #[error("the {KEYS_BYTES} bytes at offset {offset} are not the keys of leaf {leaf}")]
    Keys {
        /// The offset in the region.
        offset: u64,
        /// The number of the leaf.
        leaf: u64,
    },
    /// The bytes are not the key's value.
    #[error("the {VALUE_BYTES} bytes at offset {offset} are not the value of key {key:#x}")]
    Value {
        /// The offset in the region.
        offset: u64,
        /// The key.
        key: u64,
    },
    /// The key is neither in the predicted leaf nor in an adjacent one.
    #[error("key {key:#x} is not in leaf {leaf}, where it must be")]
    NotFound {
        /// The key.
        key: u64,
        /// The leaf that was read last.
        leaf: u64,
    },
}

/// The place of a key relative to a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The leaf has the key, with this index within the table.
    Found(u64),
    /// The key is smaller than the leaf's first key.
    Before,
    /// The key is larger than the leaf's last key.
    After,
    /// The key is between two keys of the leaf.
    Absent,
}

/// The table of a region: its size, and the function from an index to the key.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    leaf_count: u64,
    /// The mean distance between the first keys of two groups.
    group_width: u64,
}

impl Table {
    /// The table that fills a region.
    pub fn new(region_bytes: u64) -> Table {
        let leaf_count = region_bytes / LEAF_BYTES as u64;
        let group_count = (leaf_count * LEAF_KEYS as u64).div_ceil(GROUP_KEYS);
        Table { leaf_count, group_width: u64::MAX / (group_count + 1) }
    }

    /// The number of leaves.
    pub fn leaf_count(&self) -> u64 {
        self.leaf_count
    }

    /// The number of keys.
    pub fn key_count(&self) -> u64 {
        self.leaf_count * LEAF_KEYS as u64
    }

    /// The leaf that has the key with this index.
    pub fn leaf_of(index: u64) -> u64 {
        index / LEAF_KEYS as u64
    }

    /// The offset of a leaf's keys in the region.
    pub fn keys_offset(leaf: u64) -> u64 {
        leaf * LEAF_BYTES as u64
    }

    /// The offset of the value of the key with this index.
    pub fn value_offset(index: u64) -> u64 {
        let in_leaf = (index % LEAF_KEYS as u64) as usize;
        Table::keys_offset(Table::leaf_of(index)) + (KEYS_BYTES + in_leaf * VALUE_BYTES) as u64
    }

    /// The first key of a group. Groups are at least half of the mean width apart.
    fn group_start(&self, group: u64) -> u64 {
        group * self.group_width + below(mix(group), self.group_width / 2)
    }

    /// The key with this index. Keys ascend with their index.
    pub fn key(&self, index: u64) -> u64 {
        let group = index / GROUP_KEYS;
        let start = self.group_start(group);
        let step = (self.group_start(group + 1) - start) / GROUP_KEYS;
        start + index % GROUP_KEYS * step + below(mix(!index), step)
    }

    /// The first key of a leaf.
    pub fn first_key(&self, leaf: u64) -> u64 {
        self.key(leaf * LEAF_KEYS as u64)
    }

    fn indices(leaf: u64) -> impl Iterator<Item = u64> {
        let first = leaf * LEAF_KEYS as u64;
        first..first + LEAF_KEYS as u64
    }

    /// Fills `bytes`, at `offset` of the region, with the table. The rest after the last leaf is zero.
    pub fn fill(&self, bytes: &mut [u8], offset: u64) {
        bytes.fill(0);
        let end = offset + bytes.len() as u64;
        let leaf_bytes = LEAF_BYTES as u64;
        for leaf in offset / leaf_bytes..end.div_ceil(leaf_bytes).min(self.leaf_count) {
            let start = leaf * leaf_bytes;
            let (from, to) = (start.max(offset), (start + leaf_bytes).min(end));
            let within = (from - start) as usize..(to - start) as usize;
            bytes[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&self.leaf_content(leaf)[within]);
        }
    }

    fn leaf_content(&self, leaf: u64) -> [u8; LEAF_BYTES] {
        let mut content = [0; LEAF_BYTES];
        let (keys, values) = content.split_at_mut(KEYS_BYTES);
        let places = keys.chunks_exact_mut(KEY_BYTES).zip(values.chunks_exact_mut(VALUE_BYTES));
        for ((place, value), index) in places.zip(Table::indices(leaf)) {
            let key = self.key(index);
            place.copy_from_slice(&key.to_le_bytes());
            fill(value, key, Stamp::INITIAL);
        }
        content
    }

    /// Searches the bytes of a leaf's keys.
    pub fn search(key: u64, leaf: u64, keys: &[u8]) -> Place {
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let mut found = keys.chunks_exact(KEY_BYTES).map(number).zip(Table::indices(leaf));
        match found.find(|(other, _)| *other >= key) {
            Some((other, index)) if other == key => Place::Found(index),
            Some((_, index)) if index == leaf * LEAF_KEYS as u64 => Place::Before,
            Some(_) => Place::Absent,
            None => Place::After,
        }
    }

    /// Checks that bytes are a leaf's keys.
    ///
    /// # Errors
    /// If a byte differs.
    pub fn verify_keys(&self, leaf: u64, bytes: &[u8]) -> Result<Verified, TableError> {
        let expected = Table::indices(leaf).map(|index| self.key(index).to_le_bytes());
        match bytes.chunks_exact(KEY_BYTES).eq(expected) {
            true => Ok(Verified { granules: (KEYS_BYTES / GRANULE_BYTES) as u64, mixed: 0 }),
            false => Err(TableError::Keys { offset: Table::keys_offset(leaf), leaf }),
        }
    }

    /// Checks that bytes are the value of the key with this index.
    ///
    /// # Errors
    /// If a byte differs.
    pub fn verify_value(&self, index: u64, bytes: &[u8]) -> Result<Verified, TableError> {
        let key = self.key(index);
        let mut granules = bytes.chunks_exact(GRANULE_BYTES).zip((key..).step_by(GRANULE_BYTES));
        match granules.all(|(granule, at)| stamp_of(granule, at) == Some(Stamp::INITIAL)) {
            true => Ok(Verified { granules: (VALUE_BYTES / GRANULE_BYTES) as u64, mixed: 0 }),
            false => Err(TableError::Value { offset: Table::value_offset(index), key }),
        }
    }
}

/// A number below `limit` from pseudorandom bits, without a division.
fn below(bits: u64, limit: u64) -> u64 {
    ((u128::from(bits) * u128::from(limit)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGION_BYTES: u64 = 1 << 20;

    #[test]
    fn keys_ascend_and_their_density_varies() {
        let table = Table::new(REGION_BYTES);
        let keys: Vec<u64> = (0..table.key_count()).map(|index| table.key(index)).collect();
        assert!(keys.is_sorted_by(|one, other| one < other));
        let widths = keys.chunks(GROUP_KEYS as usize).map(|group| group[group.len() - 1] - group[0]);
        let (least, most) =
            widths.fold((u64::MAX, 0), |(least, most), width| (least.min(width), most.max(width)));
        assert!(most > least * 3 / 2, "{least} to {most}");
    }

    #[test]
    fn no_read_crosses_a_page() {
        let table = Table::new(REGION_BYTES);
        for index in 0..table.key_count() {
            for (offset, len) in [
                (Table::keys_offset(Table::leaf_of(index)), KEYS_BYTES),
                (Table::value_offset(index), VALUE_BYTES),
            ] {
                assert!(offset % 4096 + len as u64 <= 4096 && offset + len as u64 <= REGION_BYTES);
            }
        }
    }

    #[test]
    fn pieces_of_the_table_are_those_of_the_whole() {
        let table = Table::new(REGION_BYTES);
        let mut whole = vec![0xff; REGION_BYTES as usize];
        table.fill(&mut whole, 0);
        let mut pieces = vec![0xff; REGION_BYTES as usize];
        for (index, piece) in pieces.chunks_mut(4096).enumerate() {
            table.fill(piece, index as u64 * 4096);
        }
        assert!(whole == pieces);
        for leaf in 0..table.leaf_count() {
            let keys = &whole[Table::keys_offset(leaf) as usize..][..KEYS_BYTES];
            assert_eq!(table.verify_keys(leaf, keys).unwrap().granules, 2);
        }
        for index in 0..table.key_count() {
            let value = &whole[Table::value_offset(index) as usize..][..VALUE_BYTES];
            assert_eq!(table.verify_value(index, value).unwrap().granules, 2);
            assert!(table.verify_value(index ^ 1, value).is_err(), "the value of another key");
        }
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        let table = Table::new(REGION_BYTES);
        let mut leaf = table.leaf_content(3);
        for bit in 0..(KEYS_BYTES + VALUE_BYTES) * 8 {
            leaf[bit / 8] ^= 1 << (bit % 8);
            let keys = table.verify_keys(3, &leaf[..KEYS_BYTES]);
            let value = table.verify_value(48, &leaf[KEYS_BYTES..KEYS_BYTES + VALUE_BYTES]);
            assert_eq!((keys.is_err(), value.is_err()), (bit < KEYS_BYTES * 8, bit >= KEYS_BYTES * 8));
            leaf[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_search_tells_which_adjacent_leaf_to_read() {
        let table = Table::new(REGION_BYTES);
        let content = table.leaf_content(3);
        let search = |key| Table::search(key, 3, &content[..KEYS_BYTES]);
        assert_eq!([48, 55, 63].map(|index| search(table.key(index))), [48, 55, 63].map(Place::Found));
        assert_eq!((search(table.key(47)), search(table.key(64))), (Place::Before, Place::After));
        assert_eq!(search(table.key(50) + 1), Place::Absent);
    }
}
