//! What an atomic operation does.

/// An atomic operation on 8 aligned bytes, which hold an integer in the host's byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Stores `swap` if the bytes hold `compare`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Adds, modulo 2^64.
    FetchAdd {
        /// Summand.
        add: u64,
    },
    /// Stores with one access (ATOMIC WRITE); needs permission to write, not permission for atomics.
    Write {
        /// New value.
        value: u64,
    },
    /// Compares the bits in `compare_mask`; if they are equal, stores the bits in `swap_mask`.
    MaskedCompareSwap {
        /// Expected value of the compared bits.
        compare: u64,
        /// New value of the stored bits.
        swap: u64,
        /// The bits to compare.
        compare_mask: u64,
        /// The bits to store.
        swap_mask: u64,
    },
    /// Adds field by field: a carry out of a bit in `boundary`, the highest of its field, is lost.
    MaskedFetchAdd {
        /// Summand.
        add: u64,
        /// The highest bit of each field.
        boundary: u64,
    },
}

impl AtomicOp {
    /// The value that the operation leaves where `before` was.
    #[inline]
    pub fn apply(self, before: u64) -> u64 {
        match self {
            AtomicOp::CompareSwap { compare, swap } if before == compare => swap,
            AtomicOp::CompareSwap { .. } => before,
            AtomicOp::FetchAdd { add } => before.wrapping_add(add),
            AtomicOp::Write { value } => value,
            AtomicOp::MaskedCompareSwap { compare, swap, compare_mask, swap_mask } => {
                let is_equal = (before ^ compare) & compare_mask == 0;
                if is_equal { before & !swap_mask | swap & swap_mask } else { before }
            }
            AtomicOp::MaskedFetchAdd { add, boundary } => {
                // Without the highest bits, no carry leaves a field; they are added without a carry.
                let below = (before & !boundary).wrapping_add(add & !boundary);
                below ^ ((before ^ add) & boundary)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_masked_compare_and_swap_sees_and_changes_only_the_bits_in_its_masks() {
        let op =
            AtomicOp::MaskedCompareSwap { compare: 0x12, swap: !0, compare_mask: 0xff, swap_mask: 0xf0f0 };
        assert_eq!(op.apply(0xaaaa_0012), 0xaaaa_f0f2);
        assert_eq!(op.apply(0xaaaa_0013), 0xaaaa_0013);
    }

    #[test]
    fn a_masked_fetch_and_add_carries_within_fields_only() {
        let bytes = 0x8080_8080_8080_8080;
        let op = AtomicOp::MaskedFetchAdd { add: 0x01_01_00_ff, boundary: bytes };
        assert_eq!(op.apply(0xff_7f_05_02), 0x00_80_05_01);
        let modulo = AtomicOp::MaskedFetchAdd { add: 8, boundary: 1 << 5 };
        assert_eq!(modulo.apply(0x1000 + 56), 0x1000, "a ring of 64 bytes at a multiple of its size");
        let whole = AtomicOp::MaskedFetchAdd { add: 3, boundary: 0 };
        assert_eq!(whole.apply(u64::MAX), 2);
    }
}
