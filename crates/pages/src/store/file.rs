//! The files of regions.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::fs::{Advice, OFlags, SeekFrom};
use rustix::io::Errno;
use terrace_hostmem::PAGE_BYTES;
use terrace_shm::file_system;

use crate::error::PagesError;
use crate::frames::FileIdentity;
use crate::sys;

/// A file or block device that contains a region from its first byte on. It is locked against other servers.
#[derive(Debug)]
pub struct BackingFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl BackingFile {
    /// Opens a file, or creates a sparse one of the given size. A shorter file is extended; of a longer file or a block
    /// device, the first `size` bytes are used. Without `size` the region is the whole file.
    ///
    /// # Errors
    /// `Missing`, `Open`, `Kind`, `InUse`, `Size`.
    pub fn open(path: &Path, size: Option<u64>) -> Result<BackingFile, PagesError> {
        let (path, file) = open_file(path, size.is_some())?;
        sys::lock_exclusively(&file, &path, Instant::now() + sys::PATIENCE)?;
        let len = fit(&file, &path, size)?;
        Ok(BackingFile { path, file, len })
    }

    /// Opens a file to write pages back, whatever its length: another program may have changed it.
    ///
    /// # Errors
    /// `Open`, `Kind`, `InUse`.
    pub(crate) fn open_to_recover(path: &Path) -> Result<BackingFile, PagesError> {
        let (path, file) = open_file(path, false).map_err(|error| match error {
            PagesError::Missing { path } => PagesError::Open { path, source: Errno::NOENT.into() },
            other => other,
        })?;
        sys::lock_exclusively(&file, &path, Instant::now() + sys::PATIENCE)?;
        Ok(BackingFile { path, file, len: 0 })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length of the region in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len
    }

    /// For reads and writes through the page cache, and questions.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Which file and which part of it this is.
    pub(crate) fn identity(&self) -> io::Result<FileIdentity> {
        FileIdentity::of(self.file.as_fd(), 0, self.len)
    }
}

/// Removes a file that nothing was written to yet and that no server has, such as one that a server has made which then could
/// not start. Any other file stays.
pub fn remove_unwritten(path: &Path) {
    let Ok((path, file)) = open_file(path, false) else { return };
    let is_locked = sys::lock_exclusively(&file, &path, Instant::now() + sys::PATIENCE).is_ok();
    if is_locked && file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.blocks() == 0) {
        let _ = std::fs::remove_file(path);
    }
}

/// Opens a file. Also returns its path without links: by whatever path it is opened, its lock file is one. It is absolute,
/// because a later process may have another working directory.
fn open_file(path: &Path, may_create: bool) -> Result<(PathBuf, File), PagesError> {
    let error = |source| PagesError::Open { path: path.to_owned(), source };
    let mut options = OpenOptions::new();
    // `O_NONBLOCK`: opening a named pipe must not hang. Mode 0600: only the owner may read a new file, as with memory.
    options.read(true).write(true).custom_flags(OFlags::NONBLOCK.bits() as i32).mode(0o600);
    let file = match options.open(path) {
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => {
            if !may_create {
                return Err(PagesError::Missing { path: path.to_owned() });
            }
            options.create(true).truncate(false).open(path).map_err(error)?
        }
        other => other.map_err(error)?,
    };
    let kind = file.metadata().map_err(error)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(PagesError::Kind { path: path.to_owned() });
    }
    // With `O_NONBLOCK`, io_uring fails requests instead of waiting where the file system cannot tell whether it would
    // have to wait.
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).map_err(|errno| error(errno.into()))?;
    Ok((std::fs::canonicalize(path).map_err(error)?, file))
}

/// Extends the file if needed, and returns the length of the region.
fn fit(file: &File, path: &Path, size: Option<u64>) -> Result<u64, PagesError> {
    // Works for block devices, too, whose metadata say 0.
    let there =
        rustix::fs::seek(file, SeekFrom::End(0)).map_err(|_| PagesError::Kind { path: path.to_owned() })?;
    let len = size.unwrap_or(there);
    let refuse = |reason: String| Err(PagesError::Size { path: path.to_owned(), bytes: len, reason });
    if len == 0 {
        return refuse("a region has at least one page".into());
    }
    if !len.is_multiple_of(PAGE_BYTES) {
        return refuse(format!("the size must be a multiple of {PAGE_BYTES}"));
    }
    if len <= there {
        return Ok(len);
    }
    match rustix::fs::ftruncate(file, len) {
        Ok(()) => Ok(len),
        Err(Errno::INVAL) => refuse(format!("the device has {there}")),
        Err(error) => refuse(error.to_string()),
    }
}

/// The descriptors of a region's file.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) path: PathBuf,
    /// Goes through the page cache, and holds the lock.
    buffered: Arc<OwnedFd>,
    /// Bypasses the page cache; `None` where the file system does not support that.
    direct: Option<Arc<OwnedFd>>,
    /// Direct access was tried and refused.
    is_direct_refused: AtomicBool,
    /// The file is memory: reads and writes do not wait.
    pub(crate) is_memory: bool,
    /// A regular file, no device: it can become shorter, and writes can extend it.
    is_file: bool,
}

impl Files {
    /// Opens the file again for direct access, where that is possible.
    ///
    /// # Errors
    /// When the kernel does not tell what kind of file it is.
    pub(crate) fn open(backing: BackingFile) -> io::Result<Files> {
        let BackingFile { path, file, .. } = backing;
        let is_file = file.metadata()?.file_type().is_file();
        // Device nodes are on a memory file system; the devices are not.
        let is_memory = is_file && file_system(file.as_fd())?.is_in_memory();
        let direct = if is_memory { None } else { open_direct(&file) };
        // Advisory. Readahead would read pages that are not asked for.
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        let (buffered, direct) = (Arc::new(file.into()), direct.map(Arc::new));
        Ok(Files { path, buffered, direct, is_direct_refused: AtomicBool::new(false), is_memory, is_file })
    }

    /// For reads and writes of pages.
    pub(crate) fn best(&self) -> &Arc<OwnedFd> {
        let is_refused = self.is_direct_refused.load(Ordering::Relaxed);
        self.direct.as_ref().filter(|_| !is_refused).unwrap_or(&self.buffered)
    }

    /// For syncs and questions.
    pub(crate) fn buffered(&self) -> &Arc<OwnedFd> {
        &self.buffered
    }

    /// Goes through the page cache from now on, if an error says that direct access does not work. False if the error
    /// says something else.
    pub(crate) fn give_up_direct(&self, error: Errno) -> bool {
        let is_refusal = matches!(error, Errno::INVAL | Errno::OPNOTSUPP);
        if !is_refusal || self.direct.is_none() || self.is_direct_refused.swap(true, Ordering::Relaxed) {
            return false;
        }
        tracing::warn!(%error, path = ?self.path, "direct access does not work: misses go through the page cache");
        true
    }

    /// Whether the file still has `end` bytes: a write beyond its end would extend it.
    pub(crate) fn reaches(&self, end: u64) -> bool {
        !self.is_file || rustix::fs::fstat(&self.buffered).is_ok_and(|status| status.st_size as u64 >= end)
    }

    /// Whether it is a regular file.
    pub(crate) fn is_file(&self) -> bool {
        self.is_file
    }
}

fn open_direct(file: &impl AsFd) -> Option<OwnedFd> {
    match sys::open_again(file, OFlags::RDWR | OFlags::DIRECT) {
        Ok(direct) => Some(direct),
        Err(error) => {
            tracing::warn!(%error, "no direct access to a region's file: misses go through the page cache");
            None
        }
    }
}
