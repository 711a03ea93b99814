//! What memory holds if all requests of a pair are executed in the order of posting.

use std::ops::Range;

/// The writer of a byte that no request has written.
const NO_WRITER: u32 = u32::MAX;

/// Memory, and which request has written each byte last.
pub(super) struct Model {
    bytes: Vec<u8>,
    writers: Vec<u32>,
}

impl Model {
    pub fn new(bytes: Vec<u8>) -> Model {
        Model { writers: vec![NO_WRITER; bytes.len()], bytes }
    }

    pub fn get(&self, range: Range<usize>) -> Vec<u8> {
        self.bytes[range].to_vec()
    }

    /// What a request stores.
    pub fn set(&mut self, number: u32, offset: usize, data: &[u8]) {
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
        self.writers[offset..offset + data.len()].fill(number);
    }

    /// What the program stores.
    pub fn fill(&mut self, offset: usize, data: &[u8]) {
        self.set(NO_WRITER, offset, data);
    }

    /// The first byte that a request wrote and no later one overwrote, and that is not what `actual` has at `offset`.
    pub fn wrong_byte_of(&self, number: u32, offset: usize, actual: &[u8]) -> Option<usize> {
        self.first_wrong(offset, actual, |writer| writer == number)
    }

    /// The same of the requests up to `number`.
    pub fn wrong_byte_until(&self, number: u32, actual: &[u8]) -> Option<usize> {
        self.first_wrong(0, actual, |writer| writer <= number)
    }

    /// The same of all, from `offset` on.
    pub fn wrong_byte(&self, offset: usize, actual: &[u8]) -> Option<usize> {
        self.first_wrong(offset, actual, |_| true)
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    fn first_wrong(&self, offset: usize, actual: &[u8], is_of: impl Fn(u32) -> bool) -> Option<usize> {
        if self.bytes.get(offset..offset + actual.len()) == Some(actual) {
            return None;
        }
        let differs = |(at, byte): (usize, &u8)| self.bytes[at] != *byte && is_of(self.writers[at]);
        (offset..).zip(actual).position(differs).map(|at| offset + at)
    }
}
