//! Which files have a descriptor. The others are parked: the file tables of io_uring hold files that take no descriptors.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use terrace_sync::Mutex;

use crate::budget::Fate;
use crate::sys::Handle;

/// Files of a table. The kernel also limits it to the process's number of descriptors.
const TABLE_MAX: u64 = 16 << 10;
/// Files that are looked at to find one that can be parked.
const LOOKS: usize = 32;

/// The queue may have so many files that have ended, beside as many as have descriptors.
const QUEUE_SPARE: usize = 64;

/// A file that can be parked.
pub trait Holder: Send + Sync + std::fmt::Debug {
    /// Parks the file, unless its descriptor was used since the last call or is being used. Returns its handle, too, which
    /// the caller drops without locks: the file is closed, and its server may not answer.
    fn try_park(&self, tables: &Arc<Tables>) -> (Fate, Option<Arc<Handle>>);
}

/// A file that could have been parked, and its handle if it is parked now. Dropped without locks: it may be the last reference, and a file that
/// is closed may wait for its server.
pub type Examined = (Arc<dyn Holder>, Option<Arc<Handle>>);

/// The descriptors of a process's files.
#[derive(Debug)]
pub struct Descriptors {
    open_max: usize,
    count: AtomicUsize,
    /// In the order in which they got a descriptor, or used it when they would have been parked.
    queue: Mutex<VecDeque<Weak<dyn Holder>>>,
    tables: Arc<Tables>,
}

/// A file's right to a descriptor.
#[derive(Debug)]
pub struct Right(Arc<Descriptors>);

impl Drop for Right {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Descriptors {
    /// At most this many, as far as files can be parked.
    pub fn new(open_max: usize) -> Arc<Descriptors> {
        let (count, queue, tables) = (AtomicUsize::new(0), Mutex::default(), Arc::default());
        Arc::new(Descriptors { open_max, count, queue, tables })
    }

    /// Gives a file the right to a descriptor. Others are parked if there are too many; if that is not possible, there are
    /// more. Returns the files that were examined, for the caller to drop without locks.
    pub fn take(self: &Arc<Descriptors>, file: &Arc<dyn Holder>) -> (Right, Vec<Examined>) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut queue = self.queue.lock();
        queue.push_back(Arc::downgrade(file));
        if queue.len() > 2 * self.count.load(Ordering::Relaxed) + QUEUE_SPARE {
            queue.retain(|file| file.strong_count() > 0);
        }
        let examined = self.park(&mut queue, Some(file), self.open_max);
        (Right(self.clone()), examined)
    }

    /// Parks a file, because the process has no descriptors left, and closes it. The caller holds no lock. False if none can be parked.
    pub fn make_room(&self) -> bool {
        let count = self.count.load(Ordering::Relaxed);
        let mut queue = self.queue.lock();
        // The first round finds what was used since the last one.
        let left: Vec<_> =
            (0..2).flat_map(|_| self.park(&mut queue, None, count.saturating_sub(1))).collect();
        drop(queue);
        drop(left);
        self.count.load(Ordering::Relaxed) < count
    }

    /// Parks files while more than `open_max` have descriptors. Returns those that were looked at, which may end with their
    /// references, and the handles of those that are parked. Their ends take other locks and may wait for a server.
    fn park(
        &self,
        queue: &mut VecDeque<Weak<dyn Holder>>,
        spared: Option<&Arc<dyn Holder>>,
        open_max: usize,
    ) -> Vec<Examined> {
        let mut left = Vec::new();
        for _ in 0..LOOKS.min(queue.len()) {
            if self.count.load(Ordering::Relaxed) <= open_max {
                break;
            }
            let Some(weak) = queue.pop_front() else { break };
            let Some(file) = weak.upgrade() else { continue };
            let is_spared =
                spared.is_some_and(|spared| std::ptr::addr_eq(Arc::as_ptr(spared), Arc::as_ptr(&file)));
            let (fate, handle) = if is_spared { (Fate::Stays, None) } else { file.try_park(&self.tables) };
            if fate == Fate::Stays {
                queue.push_back(weak);
            }
            left.push((file, handle));
        }
        left
    }
}

/// The tables of parked files.
#[derive(Debug, Default)]
pub struct Tables {
    tables: Mutex<Vec<Table>>,
    /// The system has refused a table.
    is_refused: OnceLock<()>,
}

struct Table {
    ring: IoUring,
    free: Vec<u32>,
    /// Numbers the entries: one that could not be submitted stays, and completes with a later one.
    last_entry: u64,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table").field("free", &self.free.len()).finish_non_exhaustive()
    }
}

impl Table {
    fn new() -> io::Result<Table> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(TABLE_MAX);
        let count = limit.min(TABLE_MAX) as u32;
        let ring = IoUring::new(2)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::FixedFdInstall::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        ring.submitter().register_files_sparse(count)?;
        Ok(Table { ring, free: (0..count).rev().collect(), last_entry: 0 })
    }
}

/// A parked file, until it is dropped.
#[derive(Debug)]
pub struct Parked {
    tables: Arc<Tables>,
    table: u16,
    slot: u32,
}

impl Tables {
    /// Parks the file of a descriptor, which may be closed afterwards. `None` if the system cannot.
    pub fn park(self: &Arc<Tables>, file: &OwnedFd) -> Option<Parked> {
        let mut tables = self.tables.lock();
        // There are far fewer tables than a u16 counts: the kernel permits no process so many files.
        let table = match tables.iter().position(|table| !table.free.is_empty()) {
            Some(table) => table,
            None if self.is_refused.get().is_some() => return None,
            None => {
                let table = Table::new().inspect_err(|error| {
                    tracing::info!(%error, "each region that is a file keeps a descriptor");
                    // Without descriptors or memory it may be possible later.
                    if !matches!(
                        Errno::from_io_error(error),
                        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN)
                    ) {
                        self.is_refused.get_or_init(|| ());
                    }
                });
                tables.push(table.ok()?);
                tables.len() - 1
            }
        };
        let Table { ring, free, .. } = &mut tables[table];
        let slot = free.pop()?;
        if ring.submitter().register_files_update(slot, &[file.as_raw_fd()]).is_err() {
            free.push(slot);
            return None;
        }
        Some(Parked { tables: self.clone(), table: table as u16, slot })
    }
}

impl Parked {
    /// A new descriptor of the file.
    ///
    /// # Errors
    /// `EMFILE` without a free descriptor; the system's.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let mut tables = self.tables.tables.lock();
        let Table { ring, last_entry, .. } = &mut tables[usize::from(self.table)];
        *last_entry += 1;
        let entry = opcode::FixedFdInstall::new(types::Fixed(self.slot), 0).build().user_data(*last_entry);
        if ring.submission().is_full() {
            // With entries of calls that failed, which the system may take now.
            ring.submit()?;
        }
        // SAFETY: the entry has no pointers.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
        loop {
            match ring.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(_) => {}
            }
            for completed in ring.completion() {
                let number = completed.user_data();
                let opened = match completed.result() {
                    error @ ..0 => Err(io::Error::from_raw_os_error(-error)),
                    // SAFETY: the kernel has just made it for us.
                    descriptor => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
                };
                // Another one is of a call that failed, and may be of any file: it is closed.
                if number == *last_entry {
                    return opened;
                }
            }
        }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        let mut tables = self.tables.tables.lock();
        let Table { ring, free, .. } = &mut tables[usize::from(self.table)];
        // A slot that cannot be emptied holds its file until it is used again.
        let _ = ring.submitter().register_files_update(self.slot, &[-1]);
        free.push(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parked_file_is_opened_after_calls_that_failed() {
        let tables: Arc<Tables> = Arc::default();
        let file = tempfile::tempfile().unwrap();
        let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
        let file = OwnedFd::from(file);
        // Without tables there is nothing to test.
        let Some(parked) = tables.park(&file) else { return };
        for failed in 0..3 {
            for _ in 0..failed {
                let mut tables = tables.tables.lock();
                let Table { ring, last_entry, .. } = &mut tables[0];
                *last_entry += 1;
                let install = opcode::FixedFdInstall::new(types::Fixed(parked.slot), 0).build();
                // SAFETY: the entry has no pointers.
                unsafe { ring.submission().push(&install.user_data(*last_entry)) }.unwrap();
            }
            let opened = parked.open().unwrap_or_else(|error| panic!("after {failed} failed calls: {error}"));
            assert_eq!(inode(&opened), inode(&file));
        }
    }
}
