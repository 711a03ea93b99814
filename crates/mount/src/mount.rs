//! A mounted export: its tables and caches.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fuser::{Errno, INodeNo, Notifier};
use terrace_export::{Change, ChangeSet, FileId};

use crate::directories::OpenDirectory;
use crate::files::OpenFile;
use crate::handles::Handles;
use crate::inodes::InodeTable;
use crate::locks::LockWaiters;
use crate::remote::Remote;
use crate::turns::Turns;
use crate::workers::Workers;
use crate::write_behind::Budget;

/// Bytes of all files that may be dirty before writers write by themselves.
const DIRTY_BYTES_MAX: usize = 32 << 20;
/// Bytes are written when they have been dirty for so long.
const DIRTY_AGE_MAX: Duration = Duration::from_secs(1);
/// Threads that answer the kernel's requests. A request that waits for the server takes one.
pub(crate) const THREADS: usize = 8;
/// Threads that read ahead and write behind.
pub(crate) const WORKERS: usize = 4;

/// A mounted export.
pub(crate) struct Mount<R: Remote> {
    pub(crate) remote: Arc<R>,
    pub(crate) inodes: InodeTable<R>,
    pub(crate) files: Handles<OpenFile<R>>,
    pub(crate) directories: Handles<OpenDirectory<R>>,
    pub(crate) workers: Workers,
    pub(crate) lock_waiters: LockWaiters<R>,
    pub(crate) turns: Arc<Turns>,
    /// How long the kernel believes names and attributes.
    pub(crate) ttl: Duration,
    /// Whether other users than the one who mounts have access.
    pub(crate) serves_others: bool,
}

impl<R: Remote> Mount<R> {
    /// Prepares the tables.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub(crate) fn new(
        remote: Arc<R>,
        root: FileId,
        ttl: Duration,
        serves_others: bool,
    ) -> io::Result<Mount<R>> {
        let budget = Arc::new(Budget::new(DIRTY_BYTES_MAX));
        Ok(Mount {
            inodes: InodeTable::new(root, budget),
            remote,
            files: Handles::default(),
            directories: Handles::default(),
            workers: Workers::start(WORKERS)?,
            lock_waiters: LockWaiters::start()?,
            turns: Turns::new(THREADS),
            ttl,
            serves_others,
        })
    }

    /// Writes what has been dirty for long.
    pub(crate) fn write_old(&self) {
        for file in self.files.all() {
            let is_old = file.is_writable && file.inode.dirty.is_old(DIRTY_AGE_MAX);
            if is_old && !file.inode.is_queued.swap(true, Ordering::Relaxed) {
                let inode = file.inode.clone();
                self.workers.submit(move || {
                    inode.is_queued.store(false, Ordering::Relaxed);
                    // Open files report the error.
                    let _ = inode.dirty.write_all();
                });
            }
        }
    }

    /// Writes everything. A server that does not answer for one file is not asked for the others.
    ///
    /// # Errors
    /// An error of write-behind, of now or before, that no program has been told.
    pub(crate) fn write_all(&self) -> Result<(), Errno> {
        let mut is_silent = false;
        for file in self.files.all() {
            match is_silent {
                true => file.inode.dirty.give_up(),
                false => is_silent = file.inode.dirty.write_all().is_err(),
            }
        }
        self.inodes.unreported_error().map_or(Ok(()), Err)
    }

    /// Has the kernel drop what the server says has changed.
    pub(crate) fn apply(&self, change: Change, notifier: &Notifier) {
        match change {
            Change::Changed { id, change } if !change.contains(ChangeSet::LOST) => {
                self.invalidate(id, change, notifier);
            }
            // Anything may have changed, also while there was no connection.
            Change::Changed { .. } | Change::Reconnected => {
                for file in self.files.all() {
                    self.invalidate(file.inode.id, ChangeSet::all(), notifier);
                }
            }
        }
    }

    fn invalidate(&self, id: FileId, change: ChangeSet, notifier: &Notifier) {
        let Some(inode) = self.inodes.find(id) else { return };
        let mut first = -1;
        if change.contains(ChangeSet::CONTENTS) {
            inode.note_change();
            first = 0;
        }
        // Fails if the kernel does not have the inode any more.
        let _ = notifier.inval_inode(INodeNo(inode.ino), first, 0);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::OFlags;

    use super::*;
    use crate::fake::{ROOT, mount, open};

    #[test]
    fn unmounting_waits_once_for_a_server_that_is_silent() {
        let (mount, server, ino) = mount();
        let other = mount.inodes.look_up(ROOT).ino;
        for ino in [ino, other] {
            let file = open(&mount, ino, OFlags::empty());
            assert!(mount.write(file, 0, b"lost", false).is_ok());
        }
        server.is_silent.store(true, Ordering::Relaxed);
        assert_eq!(mount.write_all().map_err(Errno::code), Err(Errno::EIO.code()));
        assert_eq!(server.unanswered.load(Ordering::Relaxed), 1);
        for file in mount.files.all() {
            assert!(file.inode.dirty.is_clean() && file.inode.dirty.unreported_error().is_some());
        }
    }

    #[test]
    fn a_file_that_waits_for_a_worker_is_queued_once() {
        let (mount, _, ino) = mount();
        let file = open(&mount, ino, OFlags::empty());
        assert!(mount.write(file, 0, b"bytes", false).is_ok());
        // All workers are busy.
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let ended = Arc::new(terrace_sync::Mutex::new(ended));
        for _ in 0..WORKERS {
            let ended = ended.clone();
            mount.workers.submit(move || _ = ended.lock().recv());
        }
        std::thread::sleep(DIRTY_AGE_MAX);
        for _ in 0..10 {
            mount.write_old();
        }
        assert!(mount.workers.waiting() <= WORKERS + 1, "{}", mount.workers.waiting());
        drop(end);
    }
}
