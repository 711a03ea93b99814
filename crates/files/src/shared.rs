//! What all files of a process share.

use std::sync::Arc;

use terrace_sync::Mutex;

use crate::budget::Budget;
use crate::descriptors::Descriptors;
use crate::open_file::OpenFile;
use crate::published::Lengths;
use crate::stats::Counters;
use crate::workers::Workers;

/// What all files of a process share.
#[derive(Debug)]
pub struct Shared {
    /// The windows.
    pub budget: Arc<Budget>,
    /// The descriptors.
    pub descriptors: Arc<Descriptors>,
    /// The threads that wait for disks.
    pub workers: Arc<Workers>,
    /// The lengths that peers see.
    pub lengths: Lengths,
    /// For statistics.
    pub counters: Counters,
    /// Files that could not be written back. They stay for as long as the process, so that this is not forgotten.
    pub failed: Mutex<Vec<Arc<OpenFile>>>,
}

impl Shared {
    /// Keeps a file that could not be written back.
    pub fn keep(&self, file: &Arc<OpenFile>) {
        let mut failed = self.failed.lock();
        if !failed.iter().any(|kept| Arc::ptr_eq(kept, file)) {
            failed.push(file.clone());
        }
    }
}
