//! APPEND, an operation of Terrace's own: a record goes to the end of the peer's region, which grows by it, and its
//! offset comes back. Here are its limits; the rest is where the other operations have it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest record of an APPEND in bytes. Its responder keeps the packets of a record until the last one has arrived.
pub const APPEND_LEN_MAX: u32 = 1 << 20;

/// The staging budget of a device unless it is given another one, in bytes: 64 of the longest records.
const STAGING_BYTES_MAX: u64 = 64 * APPEND_LEN_MAX as u64;

/// How many bytes the responders of a device may keep of incomplete records. A responder reserves a record's whole
/// length with its first packet: if records shared the budget packet by packet, several incomplete ones could use it
/// up, and none could ever be completed.
#[derive(Debug)]
pub struct StagingBudget {
    free_bytes: AtomicU64,
}

impl Default for StagingBudget {
    fn default() -> StagingBudget {
        StagingBudget::new(STAGING_BYTES_MAX)
    }
}

impl StagingBudget {
    /// A budget of so many bytes.
    pub fn new(bytes: u64) -> StagingBudget {
        StagingBudget { free_bytes: AtomicU64::new(bytes) }
    }

    /// Bytes that are not reserved.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes.load(Ordering::Relaxed)
    }

    /// Reserves bytes; `None` if so many are not free.
    pub fn reserve(self: &Arc<StagingBudget>, bytes: u32) -> Option<StagingReservation> {
        let left = |free: u64| free.checked_sub(bytes.into());
        self.free_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).ok()?;
        Some(StagingReservation { budget: self.clone(), bytes })
    }
}

/// Reserved bytes of a [`StagingBudget`], free again when this is dropped.
#[derive(Debug)]
pub struct StagingReservation {
    budget: Arc<StagingBudget>,
    bytes: u32,
}

impl Drop for StagingReservation {
    fn drop(&mut self) {
        self.budget.free_bytes.fetch_add(self.bytes.into(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_is_whole_or_none_and_returns_when_it_is_dropped() {
        let budget = Arc::new(StagingBudget::new(100));
        let first = budget.reserve(60).expect("60 of 100 are free");
        assert!(budget.reserve(41).is_none());
        assert_eq!(budget.free_bytes(), 40);
        drop(first);
        assert!(budget.reserve(100).is_some());
        assert_eq!(budget.free_bytes(), 100);
    }
}
