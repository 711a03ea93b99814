//! Changes of files, by whomever: the kernel reports them (`inotify(7)`).

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use terrace_sync::Mutex;

use super::tree::by_descriptor;
use crate::proto::{ChangeSet, FileId};

/// Bytes of events that are read at once.
const EVENTS_BYTES: usize = 4096;

/// How much the kernel is to report of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Attributes, for files that clients have open: a client may lose its right.
    Rights,
    /// Everything, for files that clients watch.
    All,
}

impl Interest {
    fn flags(self) -> WatchFlags {
        // Several watches of one file are one watch of the kernel.
        let rights = WatchFlags::ATTRIB | WatchFlags::MASK_ADD;
        match self {
            Interest::Rights => rights,
            Interest::All => {
                rights
                    | WatchFlags::MODIFY
                    | WatchFlags::CREATE
                    | WatchFlags::DELETE
                    | WatchFlags::MOVE
                    | WatchFlags::MOVE_SELF
            }
        }
    }
}

#[derive(Debug, Default)]
struct Table {
    watched: HashMap<FileId, Watch>,
    by_number: HashMap<i32, FileId>,
    /// Those that nobody needs, perhaps.
    idle: Vec<FileId>,
}

#[derive(Debug, Default)]
struct Watch {
    /// The kernel's, once it has one.
    number: Option<i32>,
    users: usize,
}

/// The watched files.
#[derive(Debug)]
pub struct Watches {
    inotify: OwnedFd,
    table: Mutex<Table>,
}

impl Watches {
    /// None yet.
    ///
    /// # Errors
    /// `EMFILE` if the user has as many inotify instances as the system permits.
    pub fn new() -> io::Result<Watches> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Watches { inotify, table: Mutex::default() })
    }

    /// Readable when something has changed.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }

    /// Watches a file once more.
    ///
    /// # Errors
    /// `ENOSPC` if the user has as many watches as the system permits; `EACCES` if the server may not read it.
    pub fn add(&self, id: FileId, file: BorrowedFd<'_>, interest: Interest) -> io::Result<()> {
        // First, so that no other thread ends the kernel's watch of the file, which may be there already. The call is made without the lock:
        // the file system may not answer.
        self.table.lock().watched.entry(id).or_default().users += 1;
        let add = || inotify::add_watch(&self.inotify, by_descriptor(file), interest.flags());
        let added = add().or_else(|error| match error {
            Errno::NOSPC => {
                self.end_idle();
                add()
            }
            error => Err(error),
        });
        let number = added.inspect_err(|_| self.remove(id))?;
        let mut table = self.table.lock();
        table.by_number.insert(number, id);
        // The kernel has ended an earlier one with the file's last name.
        let earlier = table.watched.entry(id).or_default().number.replace(number);
        if let Some(earlier) = earlier.filter(|earlier| *earlier != number) {
            table.by_number.remove(&earlier);
        }
        Ok(())
    }

    /// Watches a file once less.
    pub fn remove(&self, id: FileId) {
        let mut table = self.table.lock();
        let Some(watch) = table.watched.get_mut(&id) else { return };
        watch.users -= 1;
        if watch.users == 0 {
            table.idle.push(id);
        }
    }

    /// Ends the watches that nobody needs any more. The kernel reports each end, so they end together, and files that are opened
    /// again soon keep theirs.
    pub fn end_idle(&self) {
        let mut table = self.table.lock();
        for id in std::mem::take(&mut table.idle) {
            let is_idle = table.watched.get(&id).is_some_and(|watch| watch.users == 0);
            let watch = if is_idle { table.watched.remove(&id) } else { None };
            let Some(number) = watch.and_then(|watch| watch.number) else { continue };
            table.by_number.remove(&number);
            // It has ended with its file, perhaps.
            let _ = inotify::remove_watch(&self.inotify, number);
        }
    }

    fn id_of(&self, number: i32) -> Option<FileId> {
        self.table.lock().by_number.get(&number).copied()
    }

    /// Reports what has changed to `report`, up to a buffer of it: programs can change files as fast as that is reported, and the
    /// caller has other things to do. `None` stands for all files, when the kernel has lost changes.
    pub fn take(&self, mut report: impl FnMut(Option<FileId>, ChangeSet)) {
        let mut buffer = [MaybeUninit::uninit(); EVENTS_BYTES];
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        loop {
            let (number, flags) = match reader.next() {
                Ok(event) => (event.wd(), event.events()),
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                report(None, ChangeSet::LOST);
            } else if let Some(id) = self.id_of(number) {
                report(Some(id), change_of(flags));
            }
            if reader.is_buffer_empty() {
                return;
            }
        }
    }
}

fn change_of(flags: ReadFlags) -> ChangeSet {
    let mut change = ChangeSet::empty();
    change.set(ChangeSet::CONTENTS, flags.contains(ReadFlags::MODIFY));
    change.set(ChangeSet::ATTRIBUTES, flags.contains(ReadFlags::ATTRIB));
    let entries = ReadFlags::CREATE | ReadFlags::DELETE | ReadFlags::MOVED_FROM | ReadFlags::MOVED_TO;
    change.set(ChangeSet::ENTRIES, flags.intersects(entries));
    let name = ReadFlags::MOVE_SELF | ReadFlags::DELETE_SELF | ReadFlags::IGNORED;
    change.set(ChangeSet::NAME, flags.intersects(name));
    change
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn changes(watches: &Watches) -> Vec<(Option<FileId>, ChangeSet)> {
        let mut changes = Vec::new();
        watches.take(|id, change| changes.push((id, change)));
        changes
    }

    #[test]
    fn a_watch_ends_when_nobody_has_needed_it_for_a_while() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let touch = |mode| rustix::fs::chmod(file.path(), rustix::fs::Mode::from_raw_mode(mode)).unwrap();
        let (watches, id) = (Watches::new().unwrap(), FileId { dev: 1, ino: 2, generation: 3 });
        let add = || watches.add(id, file.as_file().as_fd(), Interest::Rights).unwrap();
        add();
        watches.remove(id);
        add();
        watches.end_idle();
        touch(0o600);
        assert_eq!(changes(&watches), [(Some(id), ChangeSet::ATTRIBUTES)]);
        watches.remove(id);
        watches.end_idle();
        touch(0o644);
        assert_eq!(changes(&watches), []);
        let table = watches.table.lock();
        assert!(table.watched.is_empty() && table.by_number.is_empty() && table.idle.is_empty());
    }

    #[test]
    fn a_watch_that_another_thread_ends_meanwhile_is_there() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (watches, id) = (Watches::new().unwrap(), FileId { dev: 1, ino: 2, generation: 3 });
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    watches.end_idle();
                }
            });
            for _ in 0..2000 {
                watches.add(id, file.as_file().as_fd(), Interest::Rights).unwrap();
                rustix::fs::chmod(file.path(), rustix::fs::Mode::RUSR).unwrap();
                let seen = changes(&watches);
                watches.remove(id);
                if seen != [(Some(id), ChangeSet::ATTRIBUTES)] {
                    is_over.store(true, Ordering::Relaxed);
                    panic!("{seen:?}");
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        watches.end_idle();
        let table = watches.table.lock();
        assert!(table.watched.is_empty() && table.by_number.is_empty() && table.idle.is_empty());
    }

    #[test]
    fn changes_that_come_as_fast_as_they_are_reported_keep_no_caller() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let touch = || rustix::fs::chmod(file.path(), rustix::fs::Mode::RUSR).unwrap();
        let (watches, id) = (Watches::new().unwrap(), FileId { dev: 1, ino: 2, generation: 3 });
        watches.add(id, file.as_file().as_fd(), Interest::Rights).unwrap();
        touch();
        let mut count = 0;
        watches.take(|_, _| {
            count += 1;
            assert!(count < 10_000, "it reports for as long as the file changes");
            touch();
        });
        // The rest is reported by the next calls.
        assert_eq!(changes(&watches), [(Some(id), ChangeSet::ATTRIBUTES)]);
    }
}
