//! All files of a process, of which there are regions.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use rustix::fs::{OFlags, SealFlags, Stat};
use rustix::io::Errno;
use terrace_sync::Mutex;

use crate::budget::Budget;
use crate::config::FilesConfig;
use crate::descriptors::Descriptors;
use crate::open_file::{OpenFile, is_full};
use crate::published::Lengths;
use crate::region::{FileExtent, FileRegion};
use crate::shared::Shared;
use crate::stats::{Counters, FilesStats, count, read};
use crate::sys::{self, Handle};
use crate::workers::Workers;

/// Device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FileId {
    dev: u64,
    ino: u64,
}

impl FileId {
    fn of(status: &Stat) -> FileId {
        FileId { dev: status.st_dev, ino: status.st_ino }
    }
}

/// Why a descriptor cannot become a region.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is no descriptor of an open file.
    #[error("the descriptor is not open")]
    NotOpen,
    /// It is a directory, a device, a pipe or a socket.
    #[error("the descriptor is not of a regular file")]
    NotRegular,
    /// It is open for less than the region permits.
    #[error("the descriptor is {0}")]
    NotPermitted(&'static str),
    /// The process or the system has no descriptor left.
    #[error("no descriptor is left: {0}")]
    NoDescriptor(io::Error),
    /// The system refused something else.
    #[error("the file cannot be used: {0}")]
    System(io::Error),
}

/// As an error of the system.
impl From<OpenError> for io::Error {
    fn from(error: OpenError) -> io::Error {
        match error {
            OpenError::NotOpen => Errno::BADF.into(),
            OpenError::NotRegular => Errno::OPNOTSUPP.into(),
            OpenError::NotPermitted(_) => Errno::ACCESS.into(),
            OpenError::NoDescriptor(error) | OpenError::System(error) => error,
        }
    }
}

/// The files of a process.
#[derive(Debug)]
pub struct Files {
    shared: Arc<Shared>,
    open: Mutex<OpenFiles>,
}

/// The files that are open, so that regions of the same file share its end, its windows and one descriptor.
#[derive(Debug, Default)]
struct OpenFiles {
    /// Also some that have ended since the last look.
    files: HashMap<FileId, Weak<OpenFile>>,
    /// The number of files at which to look for those that have ended.
    look_at: usize,
}

/// Files that have ended are kept in the table until there are at least so many.
const ENDED_MAX: usize = 64;

impl OpenFiles {
    fn find(&self, id: FileId) -> Option<Arc<OpenFile>> {
        self.files.get(&id).and_then(Weak::upgrade)
    }

    /// Inserts a file, and returns it, unless another thread has inserted the same one meanwhile.
    fn find_or_insert(&mut self, id: FileId, file: &Arc<OpenFile>) -> Arc<OpenFile> {
        if let Some(found) = self.find(id) {
            return found;
        }
        if self.files.len() >= self.look_at {
            self.files.retain(|_, file| file.strong_count() > 0);
            self.look_at = self.files.len() * 5 / 4 + ENDED_MAX;
        }
        self.files.insert(id, Arc::downgrade(file));
        file.clone()
    }
}

impl Files {
    /// No files yet. Nothing is started.
    pub fn new(config: &FilesConfig) -> Files {
        let (budget, workers) = (Budget::new(config.windows_max), Workers::new(config.workers_max));
        let descriptors = Descriptors::new(config.descriptors_max);
        Files {
            shared: Arc::new(Shared {
                budget,
                descriptors,
                workers,
                lengths: Lengths::default(),
                counters: Counters::default(),
                failed: Mutex::default(),
                is_forgetting: AtomicBool::new(false),
            }),
            open: Mutex::default(),
        }
    }

    /// A region of the file behind a descriptor, which the caller may close afterwards. Costs the same for any length.
    ///
    /// # Errors
    /// `NotPermitted` if the descriptor is not open for reading, or is to be written and is not open for that, or only for
    /// appending; see [`OpenError`] for the others.
    pub fn open(
        &self,
        descriptor: BorrowedFd<'_>,
        is_writable: bool,
        extent: FileExtent,
    ) -> Result<Arc<FileRegion>, OpenError> {
        self.open_region(descriptor, is_writable, extent)
            .inspect_err(|_| count(&self.shared.counters.refused, 1))
    }

    /// Makes a file or a directory durable with its attributes (`fsync(2)`), whether there are regions of it or not.
    ///
    /// # Errors
    /// `EIO` once a write-back of a regular file has failed, also if the error was reported by a FLUSH or a commit: the system reports it once. The
    /// system's.
    pub fn sync(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let status = sys::status(descriptor)?;
        if !sys::is_regular(&status) {
            return Ok(rustix::fs::fsync(descriptor)?);
        }
        let flags = rustix::fs::fcntl_getfl(descriptor)?;
        let file = self.find(FileId::of(&status), descriptor, flags, false);
        file.map_err(io::Error::from)?.sync_all()
    }

    fn open_region(
        &self,
        descriptor: BorrowedFd<'_>,
        is_writable: bool,
        extent: FileExtent,
    ) -> Result<Arc<FileRegion>, OpenError> {
        let flags = rustix::fs::fcntl_getfl(descriptor).map_err(|_| OpenError::NotOpen)?;
        check_rights(descriptor, flags, is_writable)?;
        let status = sys::status(descriptor).map_err(OpenError::System)?;
        if !sys::is_regular(&status) {
            return Err(OpenError::NotRegular);
        }
        let file = self.find(FileId::of(&status), descriptor, flags, is_writable)?;
        Ok(FileRegion::new(file, is_writable, extent))
    }

    /// The file is opened without the lock: its server may not answer.
    fn find(
        &self,
        id: FileId,
        descriptor: BorrowedFd<'_>,
        flags: OFlags,
        is_writable: bool,
    ) -> Result<Arc<OpenFile>, OpenError> {
        let known = self.open.lock().find(id);
        let file = match known {
            Some(file) => file,
            None => {
                let handle = self.handle(descriptor, flags, is_writable)?;
                let opened = OpenFile::new(handle, self.shared.clone()).map_err(OpenError::System)?;
                let opened = Arc::new(opened);
                let file = self.open.lock().find_or_insert(id, &opened);
                if Arc::ptr_eq(&file, &opened) {
                    file.keep_open();
                }
                file
            }
        };
        if is_writable && !file.is_writable() {
            file.make_writable(self.handle(descriptor, flags, true)?);
        }
        Ok(file)
    }

    /// A handle of the file behind a descriptor. Other files are parked if no descriptor is left.
    fn handle(
        &self,
        descriptor: BorrowedFd<'_>,
        flags: OFlags,
        is_writable: bool,
    ) -> Result<Handle, OpenError> {
        let open = || Handle::of(descriptor.as_fd(), flags, is_writable);
        let opened = open().or_else(|error| match is_full(&error) && self.shared.descriptors.make_room() {
            true => open(),
            false => Err(error),
        });
        opened.map_err(|error| match is_full(&error) {
            true => OpenError::NoDescriptor(error),
            false => OpenError::System(error),
        })
    }

    /// Forgets failed write-backs of files that have neither regions nor names, which gives their space back. For a process that opens files by
    /// their names only: a later region of such a file, by a descriptor that the process has kept, would not know of the failure.
    pub fn forget_deleted(&self) {
        self.shared.forget_deleted();
    }

    /// The number of windows.
    pub fn window_count(&self) -> usize {
        self.shared.budget.count()
    }

    /// The statistics now.
    pub fn stats(&self) -> FilesStats {
        let Counters { open_files, appends, appended_bytes, commits, refused } = &self.shared.counters;
        FilesStats {
            open_files: read(open_files),
            windows: self.shared.budget.count() as u64,
            mapped_bytes: self.shared.budget.bytes(),
            appends: read(appends),
            appended_bytes: read(appended_bytes),
            commits: read(commits),
            refused: read(refused),
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.shared.workers.close();
    }
}

/// Checks what a descriptor is open for: a region permits no more.
fn check_rights(descriptor: BorrowedFd<'_>, flags: OFlags, is_writable: bool) -> Result<(), OpenError> {
    if flags.contains(OFlags::PATH) {
        return Err(OpenError::NotOpen);
    }
    let mode = flags & OFlags::ACCMODE;
    if mode == OFlags::WRONLY {
        return Err(OpenError::NotPermitted("open for writing only"));
    }
    if !is_writable {
        return Ok(());
    }
    if mode != OFlags::RDWR {
        return Err(OpenError::NotPermitted("open for reading only"));
    }
    if flags.contains(OFlags::APPEND) {
        return Err(OpenError::NotPermitted("open for appending only"));
    }
    let seals = rustix::fs::fcntl_get_seals(descriptor).unwrap_or(SealFlags::empty());
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(OpenError::NotPermitted("of a file that is sealed against writing"));
    }
    Ok(())
}
