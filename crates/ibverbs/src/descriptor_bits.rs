//! A set of descriptors' numbers. A lookup takes no lock, so it is cheap and async-signal-safe.
//!
//! A number does not suffice to recognize a file: the program may have closed the descriptor without an interposed call,
//! and got the same number for another file. So the set is only a filter.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Higher numbers cannot be members.
const DESCRIPTORS_MAX: usize = 1 << 16;

/// One bit for each descriptor.
pub struct DescriptorBits([AtomicU64; DESCRIPTORS_MAX / 64]);

impl DescriptorBits {
    /// The empty set.
    pub const fn new() -> DescriptorBits {
        DescriptorBits([const { AtomicU64::new(0) }; DESCRIPTORS_MAX / 64])
    }

    fn bit(&self, fd: c_int) -> Option<(&AtomicU64, u64)> {
        let index = usize::try_from(fd).ok()?;
        Some((self.0.get(index / 64)?, 1 << (index % 64)))
    }

    /// Whether a number is in the set.
    #[inline]
    pub fn contains(&self, fd: c_int) -> bool {
        self.bit(fd).is_some_and(|(word, mask)| word.load(Relaxed) & mask != 0)
    }

    /// Adds a number. Returns false if it is too large.
    pub fn insert(&self, fd: c_int) -> bool {
        self.bit(fd).map(|(word, mask)| word.fetch_or(mask, Relaxed)).is_some()
    }

    /// Removes a number.
    pub fn remove(&self, fd: c_int) {
        self.bit(fd).map(|(word, mask)| word.fetch_and(!mask, Relaxed));
    }
}
