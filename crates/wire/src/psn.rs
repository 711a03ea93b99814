//! Packet sequence numbers: 24 bits that wrap (IBTA volume 1, 9.7.1).

const MASK: u32 = 0xff_ffff;

/// A packet sequence number. Always below 2^24; arithmetic wraps there.
///
/// There is no `Ord`: on a circle, "smaller" depends on the starting point. Use [`Psn::since`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// A number from the low 24 bits of `value`.
    pub const fn new(value: u32) -> Psn {
        Psn(value & MASK)
    }

    /// The value, below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number `count` packets later.
    pub const fn plus(self, count: u32) -> Psn {
        Psn::new(self.0.wrapping_add(count))
    }

    /// The number `count` packets earlier.
    pub const fn minus(self, count: u32) -> Psn {
        Psn::new(self.0.wrapping_sub(count))
    }

    /// The next number.
    pub const fn next(self) -> Psn {
        self.plus(1)
    }

    /// The signed distance in packets from `earlier`, modulo 2^24: -2^23 to 2^23 - 1.
    pub const fn since(self, earlier: Psn) -> i32 {
        // The difference modulo 2^24, moved to the top of the word so that its bit 23 becomes the sign.
        (self.0.wrapping_sub(earlier.0) << 8) as i32 >> 8
    }

    /// Whether the signed distance from `other` is negative.
    pub const fn is_before(self, other: Psn) -> bool {
        self.since(other) < 0
    }
}
