//! The inodes that the kernel knows: numbers for the server's files.
//!
//! The kernel holds an inode from the first answer that names it until it forgets it. A file keeps the server's inode number,
//! unless another file has it here: one that was deleted while it was open, or one of another device.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use fuser::Errno;
use terrace_export::FileId;
use terrace_sync::Mutex;

use crate::files::OpenFile;
use crate::locks::FileLocks;
use crate::new_directory::NewDirectory;
use crate::remote::Remote;
use crate::write_behind::{Budget, DirtyFile};

/// The number of the mounted directory.
pub(crate) const ROOT: u64 = 1;
/// Numbers from here on are for files whose number on the server is taken.
const OTHER_NUMBERS: u64 = 1 << 63;

/// A file that the kernel knows.
pub(crate) struct Inode<R: Remote> {
    /// Its number here.
    pub(crate) ino: u64,
    /// Its identity on the server.
    pub(crate) id: FileId,
    /// Bytes that the server does not have yet.
    pub(crate) dirty: DirtyFile,
    /// Counts the changes of the contents that are known here, so that readahead drops what is older.
    changes: AtomicU64,
    page_cache: Mutex<PageCache>,
    /// The length in bytes as far as it is known: only a hint for readahead.
    pub(crate) len: AtomicU64,
    pub(crate) locks: FileLocks,
    opens: Mutex<Vec<Weak<OpenFile<R>>>>,
    /// The runs of the server's host in which open files that are closed by now have written what they did not commit.
    uncommitted: Mutex<BTreeSet<u64>>,
    /// A worker is to write what has been dirty for long.
    pub(crate) is_queued: AtomicBool,
    /// The server announces changes of the file, until the last open file is closed.
    pub(crate) is_watched: AtomicBool,
    /// When this mount last changed attributes, or names in the directory; at first the last change of any file that the kernel
    /// has forgotten, which may be this one.
    changed: Mutex<Option<Instant>>,
    /// The names in a directory that this mount has just made.
    names: Mutex<Option<NewDirectory>>,
}

/// What is known of the pages of a file in the kernel's page cache.
#[derive(Default)]
struct PageCache {
    /// The version of the contents when the file was last opened here; 0 after a change.
    version: u64,
    /// The kernel has dropped the pages that were older than that.
    is_current: bool,
}

impl<R: Remote> Inode<R> {
    /// The number of known changes of the contents.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// The contents change.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        *self.page_cache.lock() = PageCache::default();
        self.note_attributes();
    }

    /// The file is opened, and its contents have this version. Returns whether they have not changed since it was opened before.
    pub(crate) fn note_version(&self, version: u64) -> bool {
        if self.page_cache.lock().version == version {
            return true;
        }
        self.note_change();
        self.page_cache.lock().version = version;
        false
    }

    /// Whether the kernel has no pages that are older than this version.
    pub(crate) fn is_page_cache_current(&self, version: u64) -> bool {
        let page_cache = self.page_cache.lock();
        page_cache.version == version && page_cache.is_current
    }

    /// The kernel has dropped the pages that are older than this version.
    pub(crate) fn note_dropped_pages(&self, version: u64) {
        let mut page_cache = self.page_cache.lock();
        page_cache.is_current |= page_cache.version == version;
    }

    /// This mount has changed attributes, or names in the directory.
    pub(crate) fn note_attributes(&self) {
        *self.changed.lock() = Some(Instant::now());
    }

    /// Whether programs here have done something since a time that the server's attributes, or names, may lack that were asked for
    /// at that time.
    pub(crate) fn has_changed_since(&self, since: Instant) -> bool {
        // In this order: the bytes that are dirty now may be written when the time is compared.
        self.is_behind() || self.last_change().is_some_and(|at| at >= since)
    }

    /// When this mount last changed the file or directory on the server.
    fn last_change(&self) -> Option<Instant> {
        self.dirty.last_written().max(*self.changed.lock())
    }

    /// Whether the server's attributes are not those that a program here has to see.
    pub(crate) fn is_behind(&self) -> bool {
        self.dirty.is_unstamped() || !self.dirty.is_clean()
    }

    /// The directory is one that this mount has made since this time.
    pub(crate) fn begin_names(&self, since: Instant) {
        *self.names.lock() = Some(NewDirectory::new(since));
    }

    /// A request may make this name in the directory.
    pub(crate) fn add_name(&self, name: &OsStr) {
        let mut names = self.names.lock();
        if names.as_mut().is_some_and(|names| !names.add(name)) {
            *names = None;
        }
    }

    /// Nothing is known of the names in the directory any more.
    pub(crate) fn forget_names(&self) {
        *self.names.lock() = None;
    }

    /// Whether the directory had no such name at a time that is not longer ago than `ttl`.
    pub(crate) fn is_absent(&self, name: &OsStr, ttl: Duration) -> bool {
        let mut names = self.names.lock();
        if names.as_ref().is_some_and(|names| names.is_older_than(ttl)) {
            *names = None;
        }
        names.as_ref().is_some_and(|names| names.is_absent(name))
    }

    /// Remembers an open file.
    pub(crate) fn add_open(&self, file: &Arc<OpenFile<R>>) {
        self.opens.lock().push(Arc::downgrade(file));
    }

    /// Removes an open file that is closed. Returns whether it was the last one.
    pub(crate) fn remove_open(&self, file: &Arc<OpenFile<R>>) -> bool {
        let mut opens = self.opens.lock();
        opens.retain(|open| !std::ptr::eq(open.as_ptr(), Arc::as_ptr(file)));
        opens.is_empty()
    }

    /// Remembers runs of the server's host in which files that are closed have written without a commit.
    pub(crate) fn add_uncommitted(&self, boots: impl IntoIterator<Item = u64>) {
        self.uncommitted.lock().extend(boots);
    }

    /// Takes these runs, for the caller to commit the file.
    pub(crate) fn take_uncommitted(&self) -> BTreeSet<u64> {
        std::mem::take(&mut self.uncommitted.lock())
    }

    /// Whether the inode has an open file.
    pub(crate) fn has_open(&self) -> bool {
        !self.opens.lock().is_empty()
    }

    /// An open file of the inode, by which a file without a name is still reached.
    pub(crate) fn any_open(&self) -> Option<Arc<OpenFile<R>>> {
        self.opens.lock().iter().find_map(Weak::upgrade)
    }

    /// The open files of the inode that may be written.
    pub(crate) fn opens_for_writing(&self) -> Vec<Arc<OpenFile<R>>> {
        let opens = self.opens.lock();
        opens.iter().filter_map(Weak::upgrade).filter(|file| file.is_writable).collect()
    }
}

/// All inodes that the kernel knows.
pub(crate) struct InodeTable<R: Remote> {
    state: Mutex<State<R>>,
    budget: Arc<Budget>,
}

struct State<R: Remote> {
    by_number: HashMap<u64, Entry<R>>,
    by_id: HashMap<FileId, u64>,
    last_other: u64,
    /// An error of write-behind that no open file of a forgotten inode has reported.
    unreported: Option<Errno>,
    /// The last change of any forgotten inode.
    forgotten_change: Option<Instant>,
}

struct Entry<R: Remote> {
    inode: Arc<Inode<R>>,
    /// Answers that named the inode and that the kernel has not forgotten.
    lookups: u64,
}

impl<R: Remote> InodeTable<R> {
    /// A table with the mounted directory, which is never forgotten.
    pub(crate) fn new(root: FileId, budget: Arc<Budget>) -> InodeTable<R> {
        let state = State {
            by_number: HashMap::new(),
            by_id: HashMap::new(),
            last_other: OTHER_NUMBERS,
            unreported: None,
            forgotten_change: None,
        };
        let table = InodeTable { state: Mutex::new(state), budget };
        table.state.lock().insert(ROOT, root, &table.budget);
        table
    }

    /// The inode of a number.
    pub(crate) fn get(&self, ino: u64) -> Option<Arc<Inode<R>>> {
        self.state.lock().by_number.get(&ino).map(|entry| entry.inode.clone())
    }

    /// The inode of a file, if the kernel knows it.
    pub(crate) fn find(&self, id: FileId) -> Option<Arc<Inode<R>>> {
        let state = self.state.lock();
        let ino = state.by_id.get(&id)?;
        state.by_number.get(ino).map(|entry| entry.inode.clone())
    }

    /// The inode of a file in an answer to the kernel, which counts it as looked up.
    pub(crate) fn look_up(&self, id: FileId) -> Arc<Inode<R>> {
        let mut state = self.state.lock();
        let ino = match state.by_id.get(&id) {
            Some(&ino) => ino,
            None => state.choose_number(id),
        };
        let entry = state.insert(ino, id, &self.budget);
        entry.lookups += 1;
        entry.inode.clone()
    }

    /// The kernel forgets `count` answers that named the inode.
    pub(crate) fn forget(&self, ino: u64, count: u64) {
        let mut state = self.state.lock();
        let Some(entry) = state.by_number.get_mut(&ino) else { return };
        entry.lookups = entry.lookups.saturating_sub(count);
        if entry.lookups > 0 || ino == ROOT {
            return;
        }
        if let Some(entry) = state.by_number.remove(&ino) {
            state.by_id.remove(&entry.inode.id);
            state.unreported = state.unreported.or(entry.inode.dirty.unreported_error());
            state.forgotten_change = state.forgotten_change.max(entry.inode.last_change());
        }
    }

    /// A number that no file has.
    pub(crate) fn unused_number(&self) -> u64 {
        self.state.lock().next_other()
    }

    /// An error of write-behind that no open file has reported.
    pub(crate) fn unreported_error(&self) -> Option<Errno> {
        let state = self.state.lock();
        let mut entries = state.by_number.values();
        state.unreported.or_else(|| entries.find_map(|entry| entry.inode.dirty.unreported_error()))
    }
}

impl<R: Remote> State<R> {
    fn choose_number(&mut self, id: FileId) -> u64 {
        if id.ino > ROOT && id.ino < OTHER_NUMBERS && !self.by_number.contains_key(&id.ino) {
            return id.ino;
        }
        self.next_other()
    }

    fn next_other(&mut self) -> u64 {
        self.last_other += 1;
        self.last_other
    }

    fn insert(&mut self, ino: u64, id: FileId, budget: &Arc<Budget>) -> &mut Entry<R> {
        let changed = self.forgotten_change;
        self.by_id.insert(id, ino);
        self.by_number.entry(ino).or_insert_with(|| Entry {
            inode: Arc::new(Inode {
                ino,
                id,
                dirty: DirtyFile::new(budget.clone()),
                changes: AtomicU64::new(0),
                page_cache: Mutex::default(),
                len: AtomicU64::new(0),
                locks: FileLocks::default(),
                opens: Mutex::default(),
                uncommitted: Mutex::default(),
                is_queued: AtomicBool::new(false),
                is_watched: AtomicBool::new(false),
                changed: Mutex::new(changed),
                names: Mutex::default(),
            }),
            lookups: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use terrace_export::Client;

    use super::*;
    use crate::extents::EXTENT_BYTES;

    fn id(ino: u64) -> FileId {
        FileId { dev: 1, ino, generation: 0 }
    }

    #[test]
    fn a_change_of_a_file_shows_after_the_kernel_has_forgotten_it() {
        let table = InodeTable::<Client>::new(id(1), Budget::new(EXTENT_BYTES).into());
        let since = Instant::now();
        let file = table.look_up(id(2));
        assert!(!file.has_changed_since(since));
        file.note_attributes();
        table.forget(file.ino, 1);
        assert!(table.look_up(id(2)).has_changed_since(since));
        assert!(!table.look_up(id(2)).has_changed_since(Instant::now()));
    }
}
