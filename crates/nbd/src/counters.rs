//! What a device has done, for its status.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};
use terrace_nic::ProgressCallback;

/// The name of the report in a device's statistics.
pub const REPORT: &str = "swap_device";

/// Counters of a device. Any thread may read them.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) connections: AtomicU64,
    pub(crate) requests: AtomicU64,
    pub(crate) loaded_pages: AtomicU64,
    pub(crate) stored_pages: AtomicU64,
    pub(crate) invalidated_pages: AtomicU64,
    pub(crate) failed_requests: AtomicU64,
}

/// The values of [`Counters`] at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Connections that are open, or handles of the file.
    pub connections: u64,
    /// Requests since the start.
    pub requests: u64,
    /// Pages that were loaded, those that are stored nowhere among them.
    pub loaded_pages: u64,
    /// Stores of pages.
    pub stored_pages: u64,
    /// Pages that were freed.
    pub invalidated_pages: u64,
    /// Requests that were answered by an error.
    pub failed_requests: u64,
}

impl Counters {
    pub(crate) fn set_connections(&self, count: u64) {
        self.connections.store(count, Relaxed);
    }

    /// Reads all counters, each at its own time.
    pub fn totals(&self) -> Totals {
        Totals {
            connections: self.connections.load(Relaxed),
            requests: self.requests.load(Relaxed),
            loaded_pages: self.loaded_pages.load(Relaxed),
            stored_pages: self.stored_pages.load(Relaxed),
            invalidated_pages: self.invalidated_pages.load(Relaxed),
            failed_requests: self.failed_requests.load(Relaxed),
        }
    }
}

/// The device through which pages go shows the counters.
impl ProgressCallback for Counters {
    fn advance(&self) -> bool {
        false
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some((REPORT.into(), serde_json::to_value(self.totals()).ok()?))
    }
}

/// Counts one. Only the device's thread writes.
pub(crate) fn count(counter: &AtomicU64) {
    counter.store(counter.load(Relaxed) + 1, Relaxed);
}
