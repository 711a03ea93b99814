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
    /// Files that could not be written back. They stay for as long as the process, so that this is not forgotten, or until
    /// [`Shared::forget_deleted`].
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

    /// Forgets those that have neither regions nor names.
    pub fn forget_deleted(&self) {
        let mut failed = self.failed.lock();
        let is_over = |file: &mut Arc<OpenFile>| Arc::strong_count(file) == 1 && file.is_deleted();
        let deleted: Vec<_> = failed.extract_if(.., is_over).collect();
        // Closing the last descriptor of a file gives its blocks back, which may take long.
        drop(failed);
        drop(deleted);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use crate::{FileExtent, Files, FilesConfig};

    use super::*;

    #[test]
    fn a_failed_file_is_forgotten_when_it_has_neither_regions_nor_a_name() {
        let files = Files::new(&FilesConfig::default());
        let named = tempfile::NamedTempFile::new().unwrap();
        let region = files.open(named.as_file().as_fd(), true, FileExtent::WHOLE).unwrap();
        let file = Arc::downgrade(region.file());
        region.file().shared().keep(region.file());
        let is_kept = || {
            files.forget_deleted();
            file.strong_count() > 0
        };
        drop(region);
        assert!(is_kept(), "it has a name");
        let region = files.open(named.as_file().as_fd(), true, FileExtent::WHOLE).unwrap();
        drop(named);
        assert!(is_kept(), "it has a region");
        drop(region);
        assert!(!is_kept());
    }
}
