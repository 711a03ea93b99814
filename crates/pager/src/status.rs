//! The pager's state for `terrace stat`.

use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use terrace_nic::ProgressCallback;

use crate::memory::Statistics;

/// The name of the report in a device's statistics.
pub const REPORT: &str = "pager";

/// The pages of a pager, and the processes that have them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerStatus {
    /// Pages that may be in memory.
    pub limit_pages: u64,
    /// Pages that are.
    pub local_pages: u64,
    /// Pages of the processes' memory that is not paged.
    pub unpaged_pages: u64,
    /// Counts since the start.
    pub counts: Statistics,
    /// The processes, in the order in which they came.
    pub processes: Vec<ProcessPages>,
}

/// A process of a pager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessPages {
    /// Its number; `None` for a child that has not joined the pager.
    pub pid: Option<u32>,
    /// Its pages that are in memory.
    pub local_pages: u64,
    /// Its pages that are on memory nodes, or on their way.
    pub far_pages: u64,
}

/// The state as the pager wrote it last, for other threads.
#[derive(Debug, Default)]
pub struct SharedStatus(Mutex<PagerStatus>);

impl SharedStatus {
    /// The state.
    pub fn get(&self) -> PagerStatus {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, status: PagerStatus) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }
}

/// The device through which pages go shows the state of the pager.
impl ProgressCallback for SharedStatus {
    fn advance(&self) -> bool {
        false
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some((REPORT.into(), serde_json::to_value(self.get()).ok()?))
    }
}
