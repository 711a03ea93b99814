//! Statistics of a process's files, for `terrace stat`.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// The files of a process: what there is now, and what has happened since they were begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesStats {
    /// Files of which there are regions.
    pub open_files: u64,
    /// Mappings of parts of files.
    pub windows: u64,
    /// The bytes of these mappings.
    pub mapped_bytes: u64,
    /// Records that were appended.
    pub appends: u64,
    /// Their bytes.
    pub appended_bytes: u64,
    /// Commits that have succeeded: of appends and by FLUSH.
    pub commits: u64,
    /// Descriptors that were refused as regions.
    pub refused: u64,
}

/// The counters of a process's files.
#[derive(Debug, Default)]
pub struct Counters {
    pub open_files: AtomicU64,
    pub appends: AtomicU64,
    pub appended_bytes: AtomicU64,
    pub commits: AtomicU64,
    pub refused: AtomicU64,
}

/// Adds to a counter.
pub fn count(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// What a counter has.
pub fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
