//! What all files of a process share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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
    /// A thread looks for those to forget.
    pub is_forgetting: AtomicBool,
}

impl Shared {
    /// Keeps a file that could not be written back.
    pub fn keep(&self, file: &Arc<OpenFile>) {
        let mut failed = self.failed.lock();
        if !failed.iter().any(|kept| Arc::ptr_eq(kept, file)) {
            failed.push(file.clone());
        }
    }

    /// Has a worker forget those that have neither regions nor names: a file system that has failed may not answer.
    pub fn forget_deleted(self: &Arc<Shared>) {
        if self.failed.lock().is_empty() || self.is_forgetting.swap(true, Ordering::AcqRel) {
            return;
        }
        let shared = self.clone();
        self.workers.run(Box::new(move || {
            shared.look_for_deleted();
            shared.is_forgetting.store(false, Ordering::Release);
        }));
    }

    fn look_for_deleted(&self) {
        let is_without_regions = |file: &&Arc<OpenFile>| Arc::strong_count(file) == 1;
        let candidates: Vec<_> = self.failed.lock().iter().filter(is_without_regions).cloned().collect();
        for file in candidates {
            if file.is_deleted() {
                // The list and this thread have it, unless it has got a region meanwhile.
                let is_over = |kept: &Arc<OpenFile>| Arc::ptr_eq(kept, &file) && Arc::strong_count(kept) == 2;
                self.failed.lock().retain(|kept| !is_over(kept));
            }
            // The last descriptor is closed here, without the lock: that gives the file's blocks back, which may take long.
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use crate::{FileExtent, Files, FilesConfig};

    use super::*;

    #[test]
    fn a_failed_file_is_forgotten_when_it_has_neither_regions_nor_a_name() {
        let files = Files::new(&FilesConfig::default());
        let named = tempfile::NamedTempFile::new().unwrap();
        let region = files.open(named.as_file().as_fd(), true, FileExtent::WHOLE).unwrap();
        let file = Arc::downgrade(region.file());
        region.file().shared().keep(region.file());
        let shared = region.file().shared().clone();
        let is_kept = || {
            shared.look_for_deleted();
            file.strong_count() > 0
        };
        drop(region);
        assert!(is_kept(), "it has a name");
        let region = files.open(named.as_file().as_fd(), true, FileExtent::WHOLE).unwrap();
        drop(named);
        assert!(is_kept(), "it has a region");
        drop(region);
        files.forget_deleted();
        let until = Instant::now() + Duration::from_secs(60);
        while file.strong_count() > 0 && Instant::now() < until {
            std::thread::yield_now();
        }
        assert_eq!(file.strong_count(), 0, "a worker has forgotten it");
    }
}
