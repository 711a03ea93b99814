//! Open files: reading, writing, closing, synchronizing.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fuser::{Errno, FopenFlags, OpenAccMode, OpenFlags};
use rustix::fs::OFlags;
use terrace_export::{Attributes, ExportError, OpenAccess, SetAttributes, SetTime};
use terrace_sync::Mutex;

use crate::attributes::errno;
use crate::extents::Found;
use crate::inodes::Inode;
use crate::mount::Mount;
use crate::readahead::{Fetch, ReadAhead};
use crate::remote::{Remote, RemoteOpen};
use crate::write_behind::{ErrorCursor, Next, Sink};

/// A file that has been open for so long is watched, so that programs that keep it open see others' changes.
const WATCH_AGE: Duration = Duration::from_secs(1);

/// An open file.
pub(crate) struct OpenFile<R: Remote> {
    pub(crate) inode: Arc<Inode<R>>,
    pub(crate) remote: Arc<R::File>,
    pub(crate) is_writable: bool,
    /// Opened with `O_DIRECT`: each read is the server's.
    is_direct: bool,
    sink: Arc<dyn Sink>,
    ahead: ReadAhead,
    /// The errors of write-behind that it has reported.
    cursor: ErrorCursor,
    since: Instant,
    /// What the first read finds.
    content: Mutex<Option<Content>>,
    /// The kernel drops the file's pages before the program has its descriptor, and no request has come by that yet.
    drops_pages: AtomicBool,
}

/// All bytes of a short file, which came with the answer to opening it.
struct Content {
    bytes: Vec<u8>,
    /// [`Inode::changes`]: with another count they are old.
    changes: u64,
    /// When the file was opened.
    since: Instant,
}

struct FileSink<F>(Arc<F>);

impl<F: RemoteOpen> Sink for FileSink<F> {
    fn write(&self, extents: &[(u64, &[u8])]) -> Result<bool, ExportError> {
        match extents {
            [(offset, bytes)] => self.0.write_short(*offset, bytes),
            _ => self.0.write_extents(extents).map(|()| false),
        }
    }
}

/// What the kernel's open flags ask of the server.
pub(crate) fn access_of(flags: OpenFlags) -> OpenAccess {
    let mut access = match flags.acc_mode() {
        OpenAccMode::O_RDONLY => OpenAccess::READ,
        OpenAccMode::O_WRONLY => OpenAccess::WRITE,
        OpenAccMode::O_RDWR => OpenAccess::READ | OpenAccess::WRITE,
    };
    let is_truncated = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::TRUNC);
    access.set(OpenAccess::TRUNCATE, is_truncated && access.changes());
    access
}

impl<R: Remote> OpenFile<R> {
    fn new(
        inode: &Arc<Inode<R>>,
        remote: R::File,
        flags: OpenFlags,
        content: Option<Content>,
    ) -> Arc<OpenFile<R>> {
        let remote = Arc::new(remote);
        let file = Arc::new(OpenFile {
            inode: inode.clone(),
            sink: Arc::new(FileSink(remote.clone())),
            remote,
            is_writable: access_of(flags).changes(),
            is_direct: OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::DIRECT),
            ahead: ReadAhead::default(),
            cursor: inode.dirty.cursor(),
            since: Instant::now(),
            content: Mutex::new(content),
            drops_pages: AtomicBool::new(false),
        });
        inode.add_open(&file);
        file
    }

    /// The bytes of a range from the file's beginning on, if they came with the answer to opening it: once, for the program that
    /// reads the file at once. The server is asked for a file that is locked here: the lock may be lost.
    fn take_content(&self, range: &Range<u64>, ttl: Duration) -> Option<Vec<u8>> {
        let Content { mut bytes, changes, since } = self.content.lock().take()?;
        let is_unchanged = changes == self.inode.changes() && !self.inode.locks.is_any_held();
        let is_current = range.start == 0 && is_unchanged && since.elapsed() < ttl;
        bytes.truncate(usize::try_from(range.end).unwrap_or(usize::MAX));
        is_current.then_some(bytes)
    }

    /// Reads a range without dirty bytes from the server. Returns the number of bytes, less than the buffer's at the end of the file.
    fn read_clean(&self, offset: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let read_at = |into: &mut [u8]| self.remote.read_at(offset, into).map_err(|error| errno(&error));
        let dirty_end = self.inode.dirty.end();
        let count = read_at(into)?;
        if count == into.len() || dirty_end <= offset + count as u64 {
            return Ok(count);
        }
        // The file ends behind bytes that the server does not have. The kernel would take the short read for the file's end.
        self.inode.dirty.write_all()?;
        read_at(into)
    }

    /// Whether write-behind has failed since the file reported it last.
    fn report(&self) -> Result<(), Errno> {
        self.inode.dirty.report(&self.cursor)
    }
}

impl<R: Remote> Mount<R> {
    /// Opens a file. The kernel keeps what it has of the contents if the server's file has not changed since.
    pub(crate) fn open(&self, ino: u64, flags: OpenFlags) -> Result<(u64, FopenFlags), Errno> {
        let inode = self.inode(ino)?;
        let access = access_of(flags);
        if access.contains(OpenAccess::TRUNCATE) {
            inode.dirty.write_all()?;
            inode.note_change();
        }
        let (changes, since) = (inode.changes(), Instant::now());
        let (remote, bytes) = self.remote.open(inode.id, access).map_err(|error| errno(&error))?;
        if access.contains(OpenAccess::TRUNCATE) {
            // What was read ahead meanwhile is from before or after.
            inode.note_change();
        }
        let attributes = remote.opened_attributes();
        let is_same = inode.note_version(attributes.version);
        // Bytes that were dirty may have reached the server after it had read the file.
        let may_be_old = inode.is_behind() || inode.dirty.last_written().is_some_and(|at| at >= since);
        let bytes = bytes.filter(|_| !may_be_old);
        let changes = changes + u64::from(!is_same);
        let content = bytes.map(|bytes| Content { bytes, changes, since });
        let file = OpenFile::new(&inode, remote, flags, content);
        inode.len.store(attributes.len, Ordering::Relaxed);
        // A file that was opened a moment ago may have older pages, which the kernel drops after the answer.
        let keeps_pages = inode.is_page_cache_current(attributes.version);
        file.drops_pages.store(!keeps_pages, Ordering::Relaxed);
        let keep = if keeps_pages { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() };
        Ok((self.files.add(file), keep))
    }

    /// Adds an open file that has just been made.
    pub(crate) fn add_created(&self, inode: &Arc<Inode<R>>, remote: R::File, flags: OpenFlags) -> u64 {
        self.files.add(OpenFile::new(inode, remote, flags, None))
    }

    /// The file of a request.
    ///
    /// # Errors
    /// `EBADF` if there is none.
    pub(crate) fn file(&self, handle: u64) -> Result<Arc<OpenFile<R>>, Errno> {
        let file = self.files.get(handle).ok_or(Errno::EBADF)?;
        if file.drops_pages.load(Ordering::Relaxed) && file.drops_pages.swap(false, Ordering::Relaxed) {
            file.inode.note_dropped_pages(file.remote.opened_attributes().version);
        }
        Ok(file)
    }

    /// Reads up to `len` bytes, fewer only at the end of the file.
    pub(crate) fn read(&self, handle: u64, offset: u64, len: u32) -> Result<Vec<u8>, Errno> {
        let file = self.file(handle)?;
        let range = offset..offset.saturating_add(len.into());
        match file.inode.dirty.find(&range) {
            Found::Dirty(bytes) => return Ok(bytes),
            Found::Mixed => _ = file.inode.dirty.write_all()?,
            Found::Clean => {}
        }
        let mut bytes = vec![0; len as usize];
        let mut kept = None;
        if !file.is_direct {
            if let Some(bytes) = file.take_content(&range, self.ttl) {
                return Ok(bytes);
            }
            self.read_ahead(&file, &range);
            kept = file.ahead.copy(offset, &mut bytes);
        }
        let count = match kept {
            Some(count) => count,
            None => file.read_clean(offset, &mut bytes)?,
        };
        bytes.truncate(count);
        Ok(bytes)
    }

    fn read_ahead(&self, file: &Arc<OpenFile<R>>, range: &Range<u64>) {
        let changes = file.inode.changes();
        for fetch in file.ahead.note(range, file.inode.len.load(Ordering::Relaxed), changes) {
            let file = file.clone();
            self.workers.submit(move || fetch_chunk(&file, &fetch));
        }
    }

    /// Writes: at once if `is_synchronous`, else behind.
    pub(crate) fn write(
        &self,
        handle: u64,
        offset: u64,
        bytes: &[u8],
        is_synchronous: bool,
    ) -> Result<(), Errno> {
        let file = self.file(handle)?;
        let inode = &file.inode;
        inode.note_change();
        inode.len.fetch_max(offset + bytes.len() as u64, Ordering::Relaxed);
        let next = inode.dirty.write(&file.sink, offset, bytes);
        // A chunk that was read ahead before the bytes were dirty is older.
        inode.note_change();
        if next == Next::Submit {
            let inode = inode.clone();
            self.workers.submit(move || {
                inode.dirty.write_some();
            });
        }
        if is_synchronous {
            // The file reports the error.
            let _ = inode.dirty.write_all();
            return file.report();
        }
        Ok(())
    }

    /// Writes some of what is dirty, if all files together have more dirty bytes than writers may leave.
    pub(crate) fn write_excess(&self, handle: u64) {
        if let Some(file) = self.files.get(handle) {
            file.inode.dirty.write_excess();
        }
    }

    /// Writes what is dirty, and has the server note the time, which is the version by which others see the change. Returns the
    /// attributes if the server was asked for them.
    ///
    /// # Errors
    /// `EIO` if the server did not answer in time. Errors of the bytes are those that [`OpenFile::report`] returns.
    pub(crate) fn settle(&self, inode: &Inode<R>) -> Result<Option<Attributes>, Errno> {
        let writes = inode.dirty.write_all()?;
        if !inode.dirty.begin_stamp(writes) {
            return Ok(None);
        }
        let now = SetAttributes { modified: Some(SetTime::Now), ..SetAttributes::default() };
        let stamped = self.remote.set_attributes(inode.id, &now);
        inode.note_attributes();
        match stamped {
            Ok(attributes) => Ok(Some(attributes)),
            // A deleted file has no time that matters, and one that the program may not change any more keeps its own.
            Err(error) if is_final(&error) => Ok(None),
            Err(error) => {
                inode.dirty.undo_stamp(writes);
                Err(errno(&error))
            }
        }
    }

    /// A descriptor of the file is closed: all bytes are on the server afterwards, or an error is reported.
    pub(crate) fn flush(&self, handle: u64) -> Result<(), Errno> {
        let file = self.file(handle)?;
        let settled = if file.is_writable { self.settle(&file.inode) } else { Ok(None) };
        file.report()?;
        settled.map(|_| ())
    }

    /// The last descriptor and mapping of the file are gone. The kernel tells nobody the result, so an error of write-behind
    /// stays for the file that is opened next, or for unmounting.
    ///
    /// # Errors
    /// `EBADF` if there is no such file.
    pub(crate) fn release(&self, handle: u64) -> Result<(), Errno> {
        let Some(file) = self.files.remove(handle) else { return Err(Errno::EBADF) };
        if file.is_writable {
            let _ = self.settle(&file.inode);
            // While the file counts as open: fsync looks at the open files first.
            file.inode.add_uncommitted(file.remote.uncommitted_boot());
        }
        if file.inode.remove_open(&file) {
            self.unwatch(&file.inode);
        }
        Ok(())
    }

    /// Has the server announce changes of files that have been open for long. One that cannot for this file leaves it at what
    /// attributes show. One that does not answer, or has no room for a watch now, is asked later, and for no other file now.
    pub(crate) fn watch_open_files(&self) {
        for file in self.files.all() {
            if file.since.elapsed() < WATCH_AGE {
                continue;
            }
            // A program that has not read the file by now may never do so.
            *file.content.lock() = None;
            let inode = &file.inode;
            if inode.is_watched.load(Ordering::Relaxed) {
                continue;
            }
            if self.remote.watch(inode.id).is_err_and(|error| is_lack(&error)) {
                return;
            }
            inode.is_watched.store(true, Ordering::Relaxed);
            // Closing the file meanwhile has not found the watch.
            if !inode.has_open() {
                self.unwatch(inode);
            }
        }
    }

    /// The last open file of an inode is closed.
    fn unwatch(&self, inode: &Inode<R>) {
        if inode.is_watched.swap(false, Ordering::Relaxed) {
            // A watch that is left over costs the server an entry.
            let _ = self.remote.unwatch(inode.id);
        }
    }

    /// Makes the file's bytes persistent.
    pub(crate) fn synchronize(&self, handle: u64, only_data: bool) -> Result<(), Errno> {
        let file = self.file(handle)?;
        let inode = &file.inode;
        let settled = self.settle(inode);
        file.report()?;
        settled?;
        let opens = inode.opens_for_writing();
        // After the open ones: a file that is closed now is among one of both.
        let closed = inode.take_uncommitted();
        // Only files that are open for writing have the right to commit. Without one the server makes the bytes persistent, too.
        let by_server = !only_data || opens.is_empty();
        if by_server && let Err(errno) = self.synchronize_inode(inode) {
            inode.add_uncommitted(closed);
            return Err(errno);
        }
        if let Err(error) = self.commit(&file, &opens, &closed) {
            if !matches!(error, ExportError::Rebooted) {
                inode.add_uncommitted(closed);
            }
            inode.dirty.note_error(errno(&error));
        }
        file.report()
    }

    fn synchronize_inode(&self, inode: &Inode<R>) -> Result<(), Errno> {
        match self.remote.sync(inode.id).map_err(|error| errno(&error)) {
            // A deleted file has no attributes that matter.
            Err(errno) if errno.code() == Errno::ESTALE.code() => Ok(()),
            result => result,
        }
    }

    /// Commits what programs here have written to a file. Write-behind writes by any open file, and each knows only of its own
    /// writes whether the server's host has restarted since; `closed` are the runs of the host in which files that are closed
    /// have written. Every open file has to report an error.
    fn commit(
        &self,
        file: &Arc<OpenFile<R>>,
        opens: &[Arc<OpenFile<R>>],
        closed: &BTreeSet<u64>,
    ) -> Result<(), ExportError> {
        let has_uncommitted = |open: &&Arc<OpenFile<R>>| open.remote.uncommitted_boot().is_some();
        let mut committers: Vec<_> = opens.iter().filter(has_uncommitted).collect();
        if committers.is_empty() {
            // A commit is one of all bytes of the file.
            committers.extend(opens.iter().find(|open| Arc::ptr_eq(open, file)).or(opens.first()));
        }
        for committer in committers {
            committer.remote.commit()?;
        }
        match closed.is_empty() || closed.iter().eq([&self.remote.boot()?]) {
            true => Ok(()),
            false => Err(ExportError::Rebooted),
        }
    }

    /// Gives the blocks of a range back.
    pub(crate) fn punch(&self, handle: u64, offset: u64, len: u64) -> Result<(), Errno> {
        let file = self.file(handle)?;
        file.inode.dirty.write_all()?;
        file.inode.note_change();
        let result = file.remote.punch(offset, len).map_err(|error| errno(&error));
        file.inode.note_change();
        result
    }
}

/// Whether a server that refuses a watch lacks something for now, whichever file it is.
fn is_lack(error: &ExportError) -> bool {
    let lacks = [Errno::ENOMEM, Errno::ENOSPC, Errno::EMFILE, Errno::ENFILE];
    matches!(error, ExportError::Lost) || lacks.iter().any(|errno| errno.code() == error.errno())
}

/// Whether a file's time can be set at no later time either.
fn is_final(error: &ExportError) -> bool {
    let finals = [Errno::ESTALE, Errno::EPERM, Errno::EACCES, Errno::EROFS];
    finals.iter().any(|errno| errno.code() == error.errno())
}

fn fetch_chunk<R: Remote>(file: &OpenFile<R>, fetch: &Fetch) {
    // A server that does not answer would keep a worker for each chunk that was dropped because of that.
    if !file.ahead.wants(fetch) {
        return;
    }
    let written = match file.inode.dirty.find(&fetch.range) {
        Found::Clean => Ok(()),
        _ => file.inode.dirty.write_all().map(|_| ()),
    };
    let changes = file.inode.changes();
    let mut bytes = vec![0; (fetch.range.end - fetch.range.start) as usize];
    let result = written.and_then(|()| {
        let count = file.read_clean(fetch.range.start, &mut bytes)?;
        bytes.truncate(count);
        Ok(bytes)
    });
    // A change meanwhile makes the count another one, and the chunk is dropped.
    file.ahead.complete(fetch, result, if file.inode.changes() == changes { changes } else { u64::MAX });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::fake::{self, mount, open};

    fn code<T>(result: Result<T, Errno>) -> Result<T, i32> {
        result.map_err(Errno::code)
    }

    #[test]
    fn a_host_that_restarts_before_fsync_shows_in_every_file_that_is_open() {
        let (mount, server, ino) = mount();
        let (one, two) = (open(&mount, ino, OFlags::empty()), open(&mount, ino, OFlags::empty()));
        let write = |handle, offset| code(mount.write(handle, offset, &[1; 100], false));
        assert_eq!((write(one, 0), code(mount.synchronize(one, false))), (Ok(()), Ok(())));
        // The bytes of both go by the one that writes last.
        assert_eq!((write(one, 0), write(two, 1000)), (Ok(()), Ok(())));
        assert_eq!(code(mount.flush(two)), Ok(()));
        server.boot.fetch_add(1, Ordering::Relaxed);
        for handle in [one, two] {
            assert_eq!(code(mount.synchronize(handle, false)), Err(Errno::EIO.code()));
            assert_eq!(code(mount.synchronize(handle, false)), Ok(()));
        }
    }

    #[test]
    fn a_host_that_restarts_after_a_file_was_closed_shows_in_the_next_fsync() {
        let (mount, server, ino) = mount();
        let write_and_close = || {
            let writer = open(&mount, ino, OFlags::empty());
            assert_eq!(code(mount.write(writer, 0, &[1; 100], false)), Ok(()));
            assert_eq!((code(mount.flush(writer)), code(mount.release(writer))), (Ok(()), Ok(())));
        };
        write_and_close();
        let other = open(&mount, ino, OFlags::empty());
        assert_eq!(code(mount.synchronize(other, true)), Ok(()), "the host has not restarted");
        server.boot.fetch_add(1, Ordering::Relaxed);
        assert_eq!(code(mount.synchronize(other, true)), Ok(()), "the bytes were committed");
        write_and_close();
        server.is_silent.store(true, Ordering::Relaxed);
        assert_eq!(code(mount.synchronize(other, true)), Err(Errno::EIO.code()), "the server is silent");
        server.is_silent.store(false, Ordering::Relaxed);
        server.boot.fetch_add(1, Ordering::Relaxed);
        assert_eq!(code(mount.synchronize(other, true)), Err(Errno::EIO.code()), "the bytes may be lost");
        assert_eq!(code(mount.synchronize(other, true)), Ok(()));
    }

    #[test]
    fn fdatasync_of_a_reader_makes_the_bytes_persistent_that_closed_files_have_written() {
        let (mount, server, ino) = mount();
        let reader = mount.open(ino, OpenFlags(OFlags::RDONLY.bits() as i32)).map_err(Errno::code).unwrap().0;
        for restarts in [0, 1] {
            let writer = open(&mount, ino, OFlags::empty());
            assert_eq!(code(mount.write(writer, 0, &[1; 100], false)), Ok(()));
            assert_eq!(code(mount.release(writer)), Ok(()));
            server.boot.fetch_add(restarts, Ordering::Relaxed);
            let expected = if restarts == 0 { Ok(()) } else { Err(Errno::EIO.code()) };
            assert_eq!(code(mount.synchronize(reader, true)), expected);
        }
        assert_eq!((server.syncs.load(Ordering::Relaxed), server.commits.load(Ordering::Relaxed)), (2, 0));
    }

    #[test]
    fn fsync_commits_once() {
        let (mount, server, ino) = mount();
        let (one, two) = (open(&mount, ino, OFlags::empty()), open(&mount, ino, OFlags::empty()));
        for handle in [two, one, two] {
            assert_eq!(code(mount.write(one, 0, b"bytes", false)), Ok(()));
            assert_eq!(code(mount.synchronize(handle, true)), Ok(()));
        }
        assert_eq!(code(mount.synchronize(one, true)), Ok(()));
        assert_eq!(server.commits.load(Ordering::Relaxed), 4);
    }

    #[test]
    fn a_file_whose_time_could_not_be_set_is_not_closed_as_if_it_had_been() {
        let (mount, server, ino) = mount();
        let file = open(&mount, ino, OFlags::empty());
        assert_eq!(code(mount.write(file, 0, &[1; 100], false)), Ok(()));
        assert_eq!(code(mount.inode(ino).and_then(|inode| inode.dirty.write_all())), Ok(1));
        server.is_silent.store(true, Ordering::Relaxed);
        assert_eq!(code(mount.flush(file)), Err(Errno::EIO.code()));
        server.is_silent.store(false, Ordering::Relaxed);
        assert_eq!(code(mount.flush(file)), Ok(()));
        assert_eq!(server.stamps.load(Ordering::Relaxed), 1);
        assert_eq!(code(mount.flush(file)), Ok(()));
        assert_eq!(server.stamps.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_refusal_of_the_moment_does_not_leave_the_time_unset() {
        let (mount, server, ino) = mount();
        let file = open(&mount, ino, OFlags::empty());
        let stamped_after = |refusal: Errno| {
            assert_eq!(code(mount.write(file, 0, &[1; 100], false)), Ok(()));
            server.stamp_refusal.store(refusal.code(), Ordering::Relaxed);
            let refused = code(mount.flush(file));
            server.stamp_refusal.store(0, Ordering::Relaxed);
            (refused, code(mount.flush(file)), server.stamps.swap(0, Ordering::Relaxed))
        };
        assert_eq!(stamped_after(Errno::ENOMEM), (Err(Errno::ENOMEM.code()), Ok(()), 1));
        assert_eq!(stamped_after(Errno::ESTALE), (Ok(()), Ok(()), 0), "a deleted file");
    }

    #[test]
    fn a_file_is_watched_once_until_its_last_opening_is_closed() {
        let (mount, server, ino) = mount();
        let watches = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        let old = open(&mount, ino, OFlags::empty());
        std::thread::sleep(WATCH_AGE);
        server.is_silent.store(true, Ordering::Relaxed);
        mount.watch_open_files();
        server.is_silent.store(false, Ordering::Relaxed);
        server.watch_refusal.store(Errno::ENOSPC.code(), Ordering::Relaxed);
        mount.watch_open_files();
        server.watch_refusal.store(0, Ordering::Relaxed);
        assert_eq!(watches(&server.watches), 0);
        mount.watch_open_files();
        assert_eq!(watches(&server.watches), 1, "it is tried again");
        let young = open(&mount, ino, OFlags::empty());
        mount.watch_open_files();
        assert_eq!(code(mount.release(old)), Ok(()));
        assert_eq!(watches(&server.watches), 1);
        assert_eq!(code(mount.release(young)), Ok(()));
        assert_eq!(watches(&server.watches), 0);
    }

    #[test]
    fn a_silent_server_is_not_asked_for_each_file_that_is_watched() {
        let (mount, server, ino) = mount();
        let other = mount.inodes.look_up(fake::ROOT).ino;
        for ino in [ino, other] {
            open(&mount, ino, OFlags::empty());
        }
        std::thread::sleep(WATCH_AGE);
        server.is_silent.store(true, Ordering::Relaxed);
        mount.watch_open_files();
        assert_eq!(server.unanswered.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_chunk_that_was_dropped_is_not_asked_for() {
        let (mount, server, ino) = mount();
        server.bytes.lock().resize(4 << 20, 1);
        let file = open(&mount, ino, OFlags::empty());
        // All workers are busy.
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        for _ in 0..crate::mount::WORKERS {
            let ended = ended.clone();
            mount.workers.submit(move || _ = ended.lock().recv());
        }
        while mount.workers.waiting() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let step: u32 = 128 << 10;
        for at in [0, 1, 16] {
            assert_eq!(code(mount.read(file, at * u64::from(step), step)), Ok(vec![1; step as usize]));
        }
        assert!(mount.workers.waiting() > 0, "nothing was to be read ahead");
        server.is_silent.store(true, Ordering::Relaxed);
        drop(end);
        while mount.workers.waiting() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(mount);
        assert_eq!(server.unanswered.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_hole_before_bytes_that_the_server_does_not_have_is_zeros() {
        for flags in [OFlags::empty(), OFlags::DIRECT] {
            let (mount, _, ino) = mount();
            let file = open(&mount, ino, flags);
            assert_eq!(code(mount.write(file, 1 << 20, b"far", false)), Ok(()));
            assert_eq!(code(mount.read(file, 0, 4096)), Ok(vec![0; 4096]));
        }
    }

    #[test]
    fn a_hole_before_bytes_that_the_server_does_not_have_is_read_ahead_as_zeros() {
        let (mount, server, ino) = mount();
        let step: u32 = 128 << 10;
        server.bytes.lock().resize(3 * step as usize, 0);
        let file = open(&mount, ino, OFlags::empty());
        assert_eq!(code(mount.write(file, 4 << 20, b"far", false)), Ok(()));
        for at in (0..8).map(|number| number * u64::from(step)) {
            assert_eq!(code(mount.read(file, at, step)), Ok(vec![0; step as usize]));
        }
    }

    #[test]
    fn the_kernel_keeps_its_pages_once_it_has_dropped_the_old_ones() {
        let (mount, server, ino) = mount();
        let open = || {
            let (handle, flags) =
                mount.open(ino, OpenFlags(OFlags::RDONLY.bits() as i32)).map_err(Errno::code).unwrap();
            (handle, flags.contains(FopenFlags::FOPEN_KEEP_CACHE))
        };
        for version in [1, 2] {
            server.version.store(version, Ordering::Relaxed);
            let (one, two) = (open(), open());
            assert!(!one.1 && !two.1, "the kernel may not have dropped its pages yet");
            assert_eq!(code(mount.flush(one.0)), Ok(()));
            assert!(open().1);
        }
        server.version.store(3, Ordering::Relaxed);
        let (older, _) = open();
        server.version.store(4, Ordering::Relaxed);
        assert!(!open().1);
        assert_eq!(code(mount.flush(older)), Ok(()));
        assert!(!open().1, "the kernel may have pages of the version before");
    }

    #[test]
    fn a_file_that_is_opened_with_o_direct_is_not_read_ahead() {
        let (mount, server, ino) = mount();
        let len = 4 << 20;
        server.bytes.lock().resize(len, 1);
        let file = open(&mount, ino, OFlags::DIRECT);
        let step: u32 = 128 << 10;
        for at in (0..8).map(|number| number * u64::from(step)) {
            assert_eq!(code(mount.read(file, at, step)), Ok(vec![1; step as usize]));
        }
        std::thread::sleep(Duration::from_millis(100));
        server.bytes.lock().fill(2);
        assert_eq!(code(mount.read(file, 1 << 20, step)), Ok(vec![2; step as usize]));
    }
}
