//! Fields by their offset as in chapter 12 of the standard: bytes count from the end of the common header, bits from
//! the most significant one.

use super::MAD_BYTES;

/// Length of the common header of management datagrams (IBTA volume 1, 13.4.3).
const HEADER_BYTES: usize = 24;

/// A datagram's bytes. Offsets are constants of the other modules in `cm`, all within the datagram.
pub(super) struct Buffer(pub [u8; MAD_BYTES]);

impl Buffer {
    pub fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut array = [0; N];
        array.copy_from_slice(&self.0[HEADER_BYTES + at..][..N]);
        array
    }

    pub fn u8(&self, at: usize) -> u8 {
        self.0[HEADER_BYTES + at]
    }

    pub fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.array(at))
    }

    pub fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.array(at))
    }

    pub fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.array(at))
    }

    /// A 24-bit field.
    pub fn u24(&self, at: usize) -> u32 {
        self.u32(at) >> 8
    }

    /// `width` bits of a byte, from bit `bit` on.
    pub fn bits(&self, at: usize, bit: u32, width: u32) -> u8 {
        (self.u8(at) >> (8 - bit - width)) & mask(width)
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[HEADER_BYTES + at..][..bytes.len()].copy_from_slice(bytes);
    }

    pub fn put_u24(&mut self, at: usize, value: u32) {
        let [_, bytes @ ..] = value.to_be_bytes();
        self.put(at, &bytes);
    }

    /// Sets bits that are still zero.
    pub fn put_bits(&mut self, at: usize, bit: u32, width: u32, value: u8) {
        self.0[HEADER_BYTES + at] |= (value & mask(width)) << (8 - bit - width);
    }
}

fn mask(width: u32) -> u8 {
    0xff >> (8 - width)
}
