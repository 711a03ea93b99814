//! Time as the protocol crates know it: a number that their caller gives.

/// A point in time, in nanoseconds since an epoch that the caller chooses. No protocol crate asks a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub u64);

impl Time {
    /// This time plus `ns` nanoseconds.
    pub fn after_ns(self, ns: u64) -> Time {
        Time(self.0.saturating_add(ns))
    }
}
