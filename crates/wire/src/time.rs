//! Time in the protocol crates: a number that the caller supplies.

/// A point in time, in nanoseconds since an epoch of the caller's choice. No protocol crate reads a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

impl Time {
    /// This time plus `ns` nanoseconds.
    pub fn after_ns(self, ns: u64) -> Time {
        Time(self.0.saturating_add(ns))
    }
}
