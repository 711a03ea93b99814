//! Calls of `fdatasync` and `fsync`. One `fdatasync` serves all accesses that wait for the one before it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::io::Errno;
use terrace_memory::AccessError;
use terrace_sync::Mutex;

use crate::sys::Handle;

/// What is durable of a file.
#[derive(Debug, Default)]
pub struct Durability {
    /// Requests so far.
    requests: AtomicU64,
    /// Requests that a finished `fdatasync` covers: it began after them.
    covered: Mutex<u64>,
    /// A write-back has failed. The kernel reports that once, and takes the pages for clean.
    has_failed: AtomicBool,
}

impl Durability {
    /// Returns when all that was written before is durable. One `fdatasync` serves all that wait for the one before it.
    ///
    /// # Errors
    /// `Flush` once a write-back of the file has failed.
    pub fn sync(&self, handle: &Handle) -> Result<(), AccessError> {
        let request = self.requests.fetch_add(1, Ordering::SeqCst) + 1;
        let mut covered = self.covered.lock();
        if *covered < request && !self.has_failed.load(Ordering::Relaxed) {
            let begun = self.requests.load(Ordering::SeqCst);
            match handle.sync_data() {
                Ok(()) => *covered = begun,
                Err(error) => self.fail(&error),
            }
        }
        if self.has_failed.load(Ordering::Relaxed) { Err(AccessError::Flush) } else { Ok(()) }
    }

    /// Returns when all that was written before is durable, and the file's attributes.
    ///
    /// # Errors
    /// The system's for the first write-back that fails; `EIO` from then on.
    pub fn sync_all(&self, handle: &Handle) -> io::Result<()> {
        // So that a commit at the same time does not succeed after this has met a failure.
        let _covered = self.covered.lock();
        if self.has_failed.load(Ordering::Relaxed) {
            return Err(Errno::IO.into());
        }
        handle.sync_all().inspect_err(|error| self.fail(error))
    }

    fn fail(&self, error: &io::Error) {
        tracing::error!(%error, "a file cannot be written: no FLUSH or commit of it succeeds any more");
        self.has_failed.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use rustix::fs::OFlags;

    use super::*;

    fn handle(file: &File) -> Handle {
        Handle::of(file.as_fd(), OFlags::RDONLY, false).unwrap()
    }

    /// A regular file that the system cannot make durable, and one that it can.
    fn handles() -> (Handle, Handle) {
        (handle(&File::open("/proc/version").unwrap()), handle(&tempfile::tempfile().unwrap()))
    }

    #[test]
    fn after_a_failed_commit_no_fsync_succeeds() {
        let ((failing, sound), durability) = (handles(), Durability::default());
        assert!(durability.sync_all(&sound).is_ok());
        assert_eq!(durability.sync(&failing), Err(AccessError::Flush));
        let error = durability.sync_all(&sound).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
    }

    #[test]
    fn after_a_failed_fsync_no_commit_succeeds() {
        let ((failing, sound), durability) = (handles(), Durability::default());
        assert!(durability.sync(&sound).is_ok());
        assert!(durability.sync_all(&failing).is_err());
        assert_eq!(durability.sync(&sound), Err(AccessError::Flush));
    }
}
