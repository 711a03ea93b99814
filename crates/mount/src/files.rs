//! Open files: reading, writing, closing, synchronizing.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fuser::{Errno, FopenFlags, OpenAccMode, OpenFlags};
use rustix::fs::OFlags;
use terrace_export::{Attributes, OpenAccess, SetAttributes, SetTime};
use terrace_sync::Mutex;

use crate::attributes::errno;
use crate::inodes::Inode;
use crate::mount::Mount;
use crate::readahead::{Fetch, ReadAhead};
use crate::remote::{Remote, RemoteOpen};
use crate::write_behind::{ErrorCursor, Found, Next, Sink};

/// A file that has been open for so long is watched, so that programs that keep it open see others' changes.
const WATCH_AGE: Duration = Duration::from_secs(1);

/// An open file.
pub(crate) struct OpenFile<R: Remote> {
    pub(crate) inode: Arc<Inode<R>>,
    pub(crate) remote: Arc<R::File>,
    pub(crate) is_writable: bool,
    sink: Arc<dyn Sink>,
    ahead: ReadAhead,
    /// The errors of write-behind that it has reported.
    cursor: ErrorCursor,
    since: Instant,
    /// The server announces changes of the file.
    is_watched: AtomicBool,
    /// What the first read finds.
    content: Mutex<Option<Content>>,
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
    fn write(&self, extents: &[(u64, &[u8])]) -> Result<bool, Errno> {
        match extents {
            [(offset, bytes)] => self.0.write_short(*offset, bytes),
            _ => self.0.write_extents(extents).map(|()| false),
        }
        .map_err(|error| errno(&error))
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
        access: OpenAccess,
        content: Option<Content>,
    ) -> Arc<OpenFile<R>> {
        let remote = Arc::new(remote);
        let file = Arc::new(OpenFile {
            inode: inode.clone(),
            sink: Arc::new(FileSink(remote.clone())),
            remote,
            is_writable: access.changes(),
            ahead: ReadAhead::default(),
            cursor: inode.dirty.cursor(),
            since: Instant::now(),
            is_watched: AtomicBool::new(false),
            content: Mutex::new(content),
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
            inode.dirty.write_all();
            inode.note_change();
        }
        let (changes, since) = (inode.changes(), Instant::now());
        let (remote, bytes) = self.remote.open(inode.id, access).map_err(|error| errno(&error))?;
        if access.contains(OpenAccess::TRUNCATE) {
            // What was read ahead meanwhile is from before or after.
            inode.note_change();
        }
        let attributes = remote.opened_attributes();
        let is_same = inode.cached_version.swap(attributes.version, Ordering::Relaxed) == attributes.version;
        if !is_same {
            inode.note_change();
            inode.cached_version.store(attributes.version, Ordering::Relaxed);
        }
        let is_direct = OFlags::from_bits_retain(flags.0 as u32).contains(OFlags::DIRECT);
        // Bytes that were dirty may have reached the server after it had read the file.
        let may_be_old = inode.is_behind() || inode.dirty.last_written().is_some_and(|at| at >= since);
        let bytes = bytes.filter(|_| !is_direct && !may_be_old);
        let changes = changes + u64::from(!is_same);
        let content = bytes.map(|bytes| Content { bytes, changes, since });
        let file = OpenFile::new(&inode, remote, access, content);
        inode.len.store(attributes.len, Ordering::Relaxed);
        let keep = if is_same { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() };
        Ok((self.files.add(file), keep))
    }

    /// Adds an open file that has just been made.
    pub(crate) fn add_created(&self, inode: &Arc<Inode<R>>, remote: R::File, access: OpenAccess) -> u64 {
        self.files.add(OpenFile::new(inode, remote, access, None))
    }

    pub(crate) fn file(&self, handle: u64) -> Result<Arc<OpenFile<R>>, Errno> {
        self.files.get(handle).ok_or(Errno::EBADF)
    }

    /// Reads up to `len` bytes, fewer only at the end of the file.
    pub(crate) fn read(&self, handle: u64, offset: u64, len: u32) -> Result<Vec<u8>, Errno> {
        let file = self.file(handle)?;
        let range = offset..offset.saturating_add(len.into());
        match file.inode.dirty.find(&range) {
            Found::Dirty(bytes) => return Ok(bytes),
            Found::Mixed => {
                file.inode.dirty.write_all();
            }
            Found::Clean => {}
        }
        if let Some(bytes) = file.take_content(&range, self.ttl) {
            return Ok(bytes);
        }
        self.read_ahead(&file, &range);
        let mut bytes = vec![0; len as usize];
        let count = match file.ahead.copy(offset, &mut bytes) {
            Some(count) => count,
            None => file.remote.read_at(offset, &mut bytes).map_err(|error| errno(&error))?,
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
            inode.dirty.write_all();
            return file.report();
        }
        Ok(())
    }

    /// Writes what is dirty, and has the server note the time. Returns the attributes if it was asked for them.
    pub(crate) fn settle(&self, inode: &Inode<R>) -> Result<Option<Attributes>, Errno> {
        let writes = inode.dirty.write_all();
        if !inode.dirty.begin_stamp(writes) {
            return Ok(None);
        }
        let now = SetAttributes { modified: Some(SetTime::Now), ..SetAttributes::default() };
        let stamped = self.remote.set_attributes(inode.id, &now).map_err(|error| errno(&error));
        inode.note_attributes();
        stamped.map(Some)
    }

    /// A descriptor of the file is closed: all bytes are on the server afterwards, or an error is reported.
    pub(crate) fn flush(&self, handle: u64) -> Result<(), Errno> {
        let file = self.file(handle)?;
        if file.is_writable {
            // A file that was deleted has no time that matters.
            let _ = self.settle(&file.inode);
        }
        file.report()
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
        }
        if file.is_watched.load(Ordering::Relaxed) && !file.inode.has_open_besides(&file) {
            // A watch that is left over costs the server an entry.
            let _ = self.remote.unwatch(file.inode.id);
        }
        Ok(())
    }

    /// Has the server announce changes of files that have been open for long. A server that cannot leaves it at what
    /// attributes show.
    pub(crate) fn watch_open_files(&self) {
        for file in self.files.all() {
            if file.since.elapsed() >= WATCH_AGE && !file.is_watched.swap(true, Ordering::Relaxed) {
                let _ = self.remote.watch(file.inode.id);
                // A program that has not read the file by now may never do so.
                *file.content.lock() = None;
            }
        }
    }

    /// Makes the file's bytes persistent.
    pub(crate) fn synchronize(&self, handle: u64, only_data: bool) -> Result<(), Errno> {
        let file = self.file(handle)?;
        let _ = self.settle(&file.inode);
        file.report()?;
        if !only_data {
            match self.remote.sync(file.inode.id).map_err(|error| errno(&error)) {
                // A deleted file has no attributes that matter.
                Err(errno) if errno.code() == Errno::ESTALE.code() => {}
                result => return result,
            }
        }
        // Readers have no right to commit, and nothing to.
        let committer = if file.is_writable { Some(file) } else { file.inode.any_open(true) };
        committer.map_or(Ok(()), |file| file.remote.commit().map_err(|error| errno(&error)))
    }

    /// Gives the blocks of a range back.
    pub(crate) fn punch(&self, handle: u64, offset: u64, len: u64) -> Result<(), Errno> {
        let file = self.file(handle)?;
        file.inode.dirty.write_all();
        file.inode.note_change();
        let result = file.remote.punch(offset, len).map_err(|error| errno(&error));
        file.inode.note_change();
        result
    }
}

fn fetch_chunk<R: Remote>(file: &OpenFile<R>, fetch: &Fetch) {
    if file.inode.dirty.find(&fetch.range) != Found::Clean {
        file.inode.dirty.write_all();
    }
    let changes = file.inode.changes();
    let mut bytes = vec![0; (fetch.range.end - fetch.range.start) as usize];
    let result = file.remote.read_at(fetch.range.start, &mut bytes).map_err(|error| errno(&error));
    let result = result.map(|count| {
        bytes.truncate(count);
        bytes
    });
    // A change meanwhile makes the count another one, and the chunk is dropped.
    file.ahead.complete(fetch, result, if file.inode.changes() == changes { changes } else { u64::MAX });
}
