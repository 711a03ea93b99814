//! A swap file: without a name, so that its space is free when the process ends, however it ends.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use terrace_hostmem::PAGE_BYTES;
use terrace_shm::file_system;

use crate::known_files::Known;
use crate::maps::{FileId, Mapping};
use crate::sys;

/// The length of a swap file, unless the file system or a limit has less: more than any range of memory. A range that
/// the program lengthens later continues with zeros.
const LENGTH_MAX: u64 = 1 << 43;

/// A file without a name.
#[derive(Debug)]
pub(crate) struct SwapFile {
    /// Dropped before the descriptor is closed: another file may have the inode's number then.
    _known: Known,
    file: OwnedFd,
    /// A mapping of it, as the kernel lists it.
    listed: Mapping,
}

impl SwapFile {
    /// Creates one that is at least so long, and sparse.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn create(directory: &Path, len: u64) -> io::Result<SwapFile> {
        // Beyond its limit the kernel would end the process.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
        let mut wanted = limit.unwrap_or(LENGTH_MAX).min(LENGTH_MAX);
        if wanted < len {
            return Err(Errno::FBIG.into());
        }
        let file = create_nameless(directory)?;
        while let Err(error) = rustix::fs::ftruncate(&file, wanted) {
            if wanted == len || !matches!(error, Errno::FBIG | Errno::INVAL) {
                return Err(error.into());
            }
            wanted = len.max(wanted / 2);
        }
        // Advisory: page faults and reads bring the page that they need and no others.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
        let listed = sys::list_mapping_of(file.as_fd())?;
        Ok(SwapFile { _known: Known::add(&listed)?, file, listed })
    }

    /// Whether its bytes are in memory anyway.
    pub(crate) fn is_in_memory(&self) -> io::Result<bool> {
        let system = file_system(self.file.as_fd())?;
        Ok(system.is_in_memory() || system.page_bytes != PAGE_BYTES)
    }

    /// Makes a part of the file a hole, which reads as zeros.
    pub(crate) fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, offset, len)?)
    }

    /// The kernel's identifier of the file in its list of mappings.
    pub(crate) fn id(&self) -> FileId {
        self.listed.file()
    }

    /// Whether a mapping is a shared one of this file.
    pub(crate) fn is_behind(&self, mapping: &Mapping<&[u8]>) -> bool {
        mapping.is_shared() && mapping.is_of_same_file(&self.listed)
    }

    /// Another description of the file.
    pub(crate) fn open_again(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
    }
}

impl AsFd for SwapFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn create_nameless(directory: &Path) -> io::Result<OwnedFd> {
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    match rustix::fs::open(directory, flags | OFlags::TMPFILE | OFlags::EXCL, mode) {
        // The file system has no files without names, or the kernel does not know of them.
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => {}
        result => return Ok(result?),
    }
    let name = format!(".terrace-swap-{}-{:x}", std::process::id(), std::ptr::from_ref(&flags).addr());
    let path = directory.join(name);
    let file = rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
    rustix::fs::unlink(&path)?;
    Ok(file)
}
