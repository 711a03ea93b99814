//! The files of regions, and the descriptors through which they are accessed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, FileType, Mode, OFlags, SeekFrom};
use terrace_hostmem::HostRange;
use terrace_shm::file_system;

use crate::error::BaselineError;
use crate::sys::{self, Mapping};

/// The memory of a region: a part of a file, and its mapping in the process.
#[derive(Debug)]
pub struct Source {
    /// The file; open for reading, and for writing if the region is writable.
    pub file: OwnedFd,
    /// The file offset at which the region begins: a multiple of the page size.
    pub file_offset: u64,
    /// The page-aligned shared mapping of that part of the file. It stays mapped until the region is removed.
    pub map: HostRange,
    /// No other program code and no other process maps or writes this part of the file.
    pub exclusive: bool,
    /// Whether the region may be written.
    pub writable: bool,
}

/// The descriptors of a region's file.
#[derive(Debug)]
pub(crate) struct FileHandles {
    /// Goes through the page cache.
    pub(crate) buffered: Arc<OwnedFd>,
    /// For FLUSH only: the kernel reports a write-back failure once per description, and write-back must not consume
    /// FLUSH's report.
    pub(crate) durable: Arc<OwnedFd>,
    /// Bypasses the page cache; `None` where the file system does not support that.
    pub(crate) direct: Option<Arc<OwnedFd>>,
    /// The file is memory: reads and writes do not wait.
    pub(crate) is_memory: bool,
    /// The file's length when it was opened.
    pub(crate) file_len: u64,
    /// A regular file, no device: it can become shorter, and writes can extend it.
    is_file: bool,
}

impl FileHandles {
    /// Opens the file again for FLUSH, and for direct access where that is possible.
    ///
    /// # Errors
    /// When the descriptor is not a file's, or when the file cannot be opened again.
    pub(crate) fn open(file: OwnedFd, writable: bool) -> io::Result<FileHandles> {
        let file_len = rustix::fs::seek(&file, SeekFrom::End(0))?;
        let is_file = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_file();
        // Device nodes are on a memory file system; the devices are not.
        let is_memory = is_file && file_system(file.as_fd())?.is_in_memory();
        let direct = if is_memory { None } else { open_direct(&file, writable) };
        let durable = Arc::new(open_again(&file, OFlags::RDONLY)?);
        let (buffered, direct) = (Arc::new(file), direct.map(Arc::new));
        Ok(FileHandles { buffered, durable, direct, is_memory, file_len, is_file })
    }

    /// Locks a part of the file for direct requests, which do not hold the description that [`BackingFile`] has locked.
    ///
    /// # Errors
    /// `EAGAIN` when another server holds the lock, or requests of a server that has ended.
    pub(crate) fn lock(&self, offset: u64, len: u64) -> io::Result<()> {
        let Some(direct) = &self.direct else { return Ok(()) };
        wait_for_lock(|| sys::lock_description(direct.as_fd(), offset, len))
    }

    /// Whether the file still has `end` bytes. Beyond the end, an access to the mapping faults, but a write to the file
    /// would extend it.
    pub(crate) fn reach(&self, end: u64) -> bool {
        !self.is_file || rustix::fs::fstat(&self.buffered).is_ok_and(|status| status.st_size as u64 >= end)
    }
}

/// Opens the file again, with a description of its own. Through `/proc`, because the path may be gone or name another
/// file by now.
fn open_again(file: impl AsFd, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
}

/// Opens the file again for direct access.
fn open_direct(file: &OwnedFd, writable: bool) -> Option<OwnedFd> {
    let mode = if writable { OFlags::RDWR } else { OFlags::RDONLY };
    match open_again(file, mode | OFlags::DIRECT) {
        Ok(direct) => Some(direct),
        Err(error) => {
            tracing::warn!(%error, "no direct access to a region's file: misses go through the page cache");
            None
        }
    }
}

/// The file of a region ([`terrace_pages::BackingFile`]), mapped into memory.
#[derive(Debug)]
pub struct BackingFile {
    file: terrace_pages::BackingFile,
    mapping: Mapping,
}

impl BackingFile {
    /// Opens or creates the file, and maps the region.
    ///
    /// # Errors
    /// `Pages`; `System` when it cannot be mapped.
    pub fn open(path: &Path, size: Option<u64>) -> Result<BackingFile, BaselineError> {
        let file = terrace_pages::BackingFile::open(path, size)?;
        let mapping = Mapping::of_file(file.file(), file.len_bytes())
            .map_err(BaselineError::system("map the region's file"))?;
        Ok(BackingFile { file, mapping })
    }

    /// The mapping of the whole region. It lives as long as this.
    pub fn map(&self) -> HostRange {
        self.mapping.range()
    }

    /// A new description of the file, which does not hold the lock.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn open_again(&self) -> io::Result<OwnedFd> {
        let file = open_again(self.file.file(), OFlags::RDWR)?;
        // For memory that is locked: the kernel must not read ahead.
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::Random);
        Ok(file)
    }

    /// The argument for [`crate::Baseline::add`]. The file is this region's alone.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn source(&self) -> Result<Source, BaselineError> {
        let file = self.file.file().as_fd().try_clone_to_owned();
        let file = file.map_err(BaselineError::system("duplicate a descriptor"))?;
        Ok(Source { file, file_offset: 0, map: self.map(), exclusive: true, writable: true })
    }
}

/// For how long to wait for a lock. Requests of a killed server, and their locks, outlive it by a few milliseconds. The
/// lock keeps the next server from writing bytes that such a request would overwrite.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// Retries until the lock is free, for [`LOCK_PATIENCE`].
fn wait_for_lock(mut lock: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match lock() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}
