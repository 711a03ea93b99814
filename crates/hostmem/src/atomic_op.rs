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
}
