//! System calls.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use rustix::time::ClockId;
use terrace_hostmem::PAGE_BYTES;
use terrace_sync::without_signals;

/// Milliseconds of a clock that costs nanoseconds to read and advances with the kernel's ticks.
pub fn coarse_ms() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// A descriptor for the file behind another one.
#[derive(Debug)]
pub struct Handle {
    /// The descriptor.
    pub file: OwnedFd,
    /// What it is.
    pub traits: HandleTraits,
}

/// What a handle is.
#[derive(Clone, Copy, Debug)]
pub struct HandleTraits {
    /// Whether it is open for writing.
    pub is_writable: bool,
    /// Whether its description is our own: file position, flags and write errors are not shared with the program.
    pub is_own: bool,
    /// Whether the kernel says which of the file's pages are in the page cache: it does so to who owns the file, or may
    /// write to it.
    pub is_tellable: bool,
}

impl Handle {
    /// Opens the file behind a descriptor once more, with the rights that are asked for. Where the system does not permit
    /// that (no `/proc`, permissions that have changed), the descriptor is duplicated, if its flags permit that.
    ///
    /// # Errors
    /// `EMFILE` or `ENFILE` without a free descriptor; the system's error of opening the file.
    pub fn of(file: BorrowedFd<'_>, flags: OFlags, is_writable: bool) -> io::Result<Handle> {
        let user = rustix::process::geteuid();
        let is_owned = user.is_root() || status(file)?.st_uid == user.as_raw();
        let mode = if is_writable { OFlags::RDWR } else { OFlags::RDONLY };
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        match rustix::fs::open(path, mode | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty()) {
            Ok(file) => {
                let traits = HandleTraits { is_writable, is_own: true, is_tellable: is_writable || is_owned };
                Ok(Handle { file, traits })
            }
            Err(error @ (Errno::MFILE | Errno::NFILE)) => Err(error.into()),
            // Writes of such a description ignore their offset, or need aligned memory.
            Err(error) if flags.intersects(OFlags::APPEND | OFlags::DIRECT) => Err(error.into()),
            Err(_) => {
                let file = rustix::io::fcntl_dupfd_cloexec(file, 0)?;
                let is_writable = flags & OFlags::ACCMODE == OFlags::RDWR;
                let traits =
                    HandleTraits { is_writable, is_own: false, is_tellable: is_writable || is_owned };
                Ok(Handle { file, traits })
            }
        }
    }

    /// Opens the file once more, for another process.
    ///
    /// # Errors
    /// The system's.
    pub fn open_anew(&self, is_writable: bool) -> io::Result<OwnedFd> {
        let mode = if is_writable { OFlags::RDWR } else { OFlags::RDONLY };
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        Ok(rustix::fs::open(path, mode | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())?)
    }

    /// The file's length in bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn len(&self) -> io::Result<u64> {
        Ok(status(self.file.as_fd())?.st_size.max(0) as u64)
    }

    /// Whether the file has nothing from `start` to `end`, not even in the page cache, and does not end before that.
    /// False if the question would move the program's file position.
    pub fn is_hole(&self, start: u64, end: u64) -> bool {
        if !self.traits.is_own {
            return false;
        }
        match rustix::fs::seek(&self.file, SeekFrom::Data(start)) {
            Ok(data) => data >= end,
            Err(error) => error == Errno::NXIO && self.len().is_ok_and(|len| len >= end),
        }
    }

    /// The first range with data from `start` on, which may have zeros in it; empty and at the end of the file if only a hole is
    /// left. All that is left counts as data if the question would move the program's file position.
    ///
    /// # Errors
    /// The system's.
    pub fn next_data(&self, start: u64) -> io::Result<Range<u64>> {
        let len = self.len()?;
        if start >= len {
            return Ok(len..len);
        }
        if !self.traits.is_own {
            return Ok(start..len);
        }
        let data = match rustix::fs::seek(&self.file, SeekFrom::Data(start)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(len..len),
            Err(error) => return Err(error.into()),
        };
        let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(data))?;
        Ok(data..hole)
    }

    /// Reads a whole range, and waits for the disk.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before; the system's.
    pub fn read_exact(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_parts(offset, out, |file, out, offset| rustix::io::pread(file, out, offset))
    }

    /// Reads a whole range if it is in the page cache.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before; `EAGAIN` if part of it is not in memory; `EOPNOTSUPP` if the file system
    /// cannot tell.
    pub fn read_cached(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_parts(offset, out, |file, out, offset| {
            rustix::io::preadv2(file, &mut [IoSliceMut::new(out)], offset, ReadWriteFlags::NOWAIT)
        })
    }

    fn read_parts(
        &self,
        offset: u64,
        out: &mut [u8],
        read: impl Fn(&OwnedFd, &mut [u8], u64) -> rustix::io::Result<usize>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            match read(&self.file, &mut out[done..], offset + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Writes a whole range, and waits for the disk.
    ///
    /// # Errors
    /// The system's, and how many bytes are written; `FileTooLarge` for a range beyond the process's limit.
    pub fn write_all(&self, offset: u64, data: &[u8]) -> Result<(), (usize, io::Error)> {
        if offset.saturating_add(data.len() as u64) > len_max() {
            return Err((0, io::ErrorKind::FileTooLarge.into()));
        }
        let mut done = 0;
        while done < data.len() {
            match rustix::io::pwrite(&self.file, &data[done..], offset + done as u64) {
                Ok(0) => return Err((done, io::ErrorKind::WriteZero.into())),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(error) => return Err((done, error.into())),
            }
        }
        Ok(())
    }

    /// Makes the file longer or shorter.
    ///
    /// # Errors
    /// The system's; `FileTooLarge` for a file that would become longer than the process's limit.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        if len > len_max() && len > self.len()? {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(rustix::io::retry_on_intr(|| rustix::fs::ftruncate(&self.file, len))?)
    }

    /// Gives the blocks of a range back; it reads as zeros then.
    ///
    /// # Errors
    /// The system's; `EOPNOTSUPP` if the file system has no holes.
    pub fn punch_hole(&self, offset: u64, len: u64) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, mode, offset, len))?)
    }

    /// Allocates blocks for a range that may lie beyond the end of the file, which does not move; for as much of the range
    /// as lies within the process's limit. File systems in memory hold the limit against blocks beyond the end, too.
    ///
    /// # Errors
    /// The system's; `InvalidInput` for an empty range, and for one beyond the limit.
    pub fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        let mode = FallocateFlags::KEEP_SIZE;
        let len = len.min(len_max().saturating_sub(offset));
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, mode, offset, len))?)
    }

    /// Returns when the file's bytes and its length would survive a crash.
    ///
    /// # Errors
    /// The system's. It reports a failed write once.
    pub fn sync_data(&self) -> io::Result<()> {
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&self.file))?)
    }

    /// Returns when the file's bytes and all of its attributes would survive a crash.
    ///
    /// # Errors
    /// The system's. It reports a failed write once.
    pub fn sync_all(&self) -> io::Result<()> {
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fsync(&self.file))?)
    }
}

/// The longest file that the process may write (`RLIMIT_FSIZE`), in bytes: a call beyond that would end the process by SIGXFSZ.
fn len_max() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// The status of a file.
///
/// # Errors
/// The system's.
pub fn status(file: BorrowedFd<'_>) -> io::Result<Stat> {
    Ok(rustix::fs::fstat(file)?)
}

/// Whether it is the status of a regular file.
pub fn is_regular(status: &Stat) -> bool {
    FileType::from_raw_mode(status.st_mode).is_file()
}

/// A mapping of a part of a file, until it is dropped. A forked child does not have it.
#[derive(Debug)]
pub struct Mapping {
    addr: u64,
    len: u64,
}

impl Mapping {
    /// Maps `len` bytes of a file from `offset` on, a multiple of its page size.
    ///
    /// # Errors
    /// The system's.
    pub fn new(handle: &Handle, offset: u64, len: u64) -> io::Result<Mapping> {
        let rights =
            if handle.traits.is_writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let bytes = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping, wherever the kernel has room. It is accessed only by copies that recover from faults.
        let addr = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED, &handle.file, offset)?
        };
        let mapping = Mapping { addr: addr as u64, len };
        // Both are advice: a fault that does read, because a page left meanwhile, shall read no more than that page.
        // SAFETY: our own mapping, whose content neither changes.
        unsafe {
            libc::madvise(addr, bytes, libc::MADV_DONTFORK);
            libc::madvise(addr, bytes, libc::MADV_RANDOM);
        }
        Ok(mapping)
    }

    /// The address of its first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Calls `each` with the pages of a range within the mapping, counted from its first page, and whether they are in the
    /// page cache. The kernel says that of all pages to who may not write to the file. Ends when `each` returns false.
    ///
    /// # Errors
    /// The system's.
    pub fn for_pages(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(u64, bool) -> bool,
    ) -> io::Result<()> {
        /// Pages that are asked for at a time.
        const PAGES: u64 = 64;
        let mut cached = [0_u8; PAGES as usize];
        let (first, end) = (offset / PAGE_BYTES, (offset + len).min(self.len).div_ceil(PAGE_BYTES));
        for start in (first..end).step_by(PAGES as usize) {
            let count = PAGES.min(end - start);
            let addr = self.addr + start * PAGE_BYTES;
            // SAFETY: pages of our own mapping; the kernel writes a byte for each of them, for which there is room.
            let asked = unsafe {
                libc::mincore(addr as *mut _, (count * PAGE_BYTES) as usize, cached.as_mut_ptr().cast())
            };
            if asked != 0 {
                return Err(io::Error::last_os_error());
            }
            for (page, is_cached) in (start..start + count).zip(cached) {
                if !each(page, is_cached & 1 != 0) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, which nobody accesses any more: accesses borrow it, or hold a lock that keeps it.
        let _ = unsafe { rustix::mm::munmap(self.addr as *mut _, self.len as usize) };
    }
}

/// Starts a thread that gets none of the program's signals.
///
/// # Errors
/// The system's.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = std::thread::Builder::new().name(name.into());
    without_signals(|| builder.spawn(work)).map(drop)
}
