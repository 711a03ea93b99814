//! Mappings, copies to and from them, and locks of files: the only place in this crate that passes addresses to the kernel, except for
//! io_uring.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use terrace_hostmem::fault::{self, Fault};
use terrace_hostmem::{AtomicOp, HostRange};

use crate::error::{LockHolder, PagesError};

/// `BLKGETDISKSEQ` of `linux/fs.h`.
const BLKGETDISKSEQ: libc::Ioctl = 0x8008_1280_u32 as libc::Ioctl;

/// The sequence number of the disk that a block device is now: another disk, or another file behind a loop device, has
/// another one. Since Linux 5.15.
pub(crate) fn disk_sequence(device: BorrowedFd<'_>) -> Option<u64> {
    let mut sequence = 0_u64;
    // SAFETY: the request stores 8 bytes in `sequence`.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), BLKGETDISKSEQ, &raw mut sequence) };
    (result == 0).then_some(sequence)
}

/// A mapping, until it is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    range: HostRange,
}

impl Mapping {
    /// Maps the first `len` bytes of a file, shared and writable.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub(crate) fn of_file(file: BorrowedFd<'_>, len: u64) -> io::Result<Mapping> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, wherever the kernel has room.
        let addr = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len as usize, rights, MapFlags::SHARED, file, 0)?
        };
        Ok(Mapping { range: HostRange { addr: addr as u64, len } })
    }

    /// Maps a part of a file, which begins at a page and is not accessed.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub(crate) fn of_file_part(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<Mapping> {
        let rights = ProtFlags::empty();
        // SAFETY: a new mapping, wherever the kernel has room.
        let addr = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len as usize, rights, MapFlags::SHARED, file, offset)?
        };
        Ok(Mapping { range: HostRange { addr: addr as u64, len } })
    }

    /// Reserves addresses. An access to them faults.
    ///
    /// # Errors
    /// When the process has no addresses left.
    pub(crate) fn reserve(len: u64) -> io::Result<Mapping> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, wherever the kernel has room.
        let addr = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len as usize, ProtFlags::empty(), flags)?
        };
        Ok(Mapping { range: HostRange { addr: addr as u64, len } })
    }

    /// Maps zeros, whose pages are allocated as they are used.
    ///
    /// # Errors
    /// When the process has no addresses left.
    pub(crate) fn of_zeros(len: u64) -> io::Result<Mapping> {
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping, wherever the kernel has room.
        let addr = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len as usize, rights, flags)? };
        Ok(Mapping { range: HostRange { addr: addr as u64, len } })
    }

    /// The addresses.
    pub(crate) fn range(&self) -> HostRange {
        self.range
    }

    /// `count` numbers of 8 bytes from `offset` on, which is a multiple of 8.
    ///
    /// # Panics
    /// When they do not lie within the mapping.
    #[inline]
    pub(crate) fn quads(&self, offset: u64, count: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8) && offset <= self.range.len);
        assert!(count as u64 <= (self.range.len - offset) / 8);
        // SAFETY: mapped as long as `self` lives, and aligned; all users of these bytes access them as atomic numbers.
        unsafe { std::slice::from_raw_parts((self.range.addr + offset) as *const AtomicU64, count) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping; what borrows from it borrows from `self`. Addresses that are given out as numbers are
        // used for copies that recover from faults, by owners of `self`.
        let _ = unsafe { rustix::mm::munmap(self.range.addr as *mut _, self.range.len as usize) };
    }
}

/// Copies from a frame.
///
/// # Errors
/// When the pool's file has been truncated.
#[inline]
pub(crate) fn copy_out(addr: u64, out: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: an address in the mapping of a pool, to which no Rust reference exists.
    unsafe { fault::copy_from(addr, out) }
}

/// Copies to a frame.
///
/// # Errors
/// When the pool's file has been truncated.
#[inline]
pub(crate) fn copy_in(addr: u64, data: &[u8]) -> Result<(), Fault> {
    // SAFETY: an address in the mapping of a pool, to which no Rust reference exists.
    unsafe { fault::copy_to(addr, data) }
}

/// An atomic operation on 8 aligned bytes of a frame. Returns the value before it.
///
/// # Errors
/// When the pool's file has been truncated.
#[inline]
pub(crate) fn atomic(addr: u64, op: AtomicOp) -> Result<u64, Fault> {
    // SAFETY: an aligned address in the mapping of a pool, to which no Rust reference exists.
    unsafe { fault::atomic(addr, op) }
}

/// For how long to wait for what a killed process has left: its requests to the device and its locks outlive it by a few
/// milliseconds, and its peers empty their mappings when they notice.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Locks the file at a path for this open file description.
///
/// # Errors
/// `InUse` when another one has it locked at the deadline; `Open`.
pub(crate) fn lock_exclusively(file: &File, path: &Path, deadline: Instant) -> Result<(), PagesError> {
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::WOULDBLOCK) => {
                return Err(PagesError::InUse { path: path.to_owned(), holder: lock_holder(file) });
            }
            Err(errno) => return Err(PagesError::Open { path: path.to_owned(), source: errno.into() }),
        }
    }
}

/// The process that has locked a file.
fn lock_holder(file: &File) -> LockHolder {
    match process_with_lock(file) {
        Some(pid) if pid == std::process::id() => LockHolder::ThisProcess,
        pid => LockHolder::Other(pid),
    }
}

/// Its number. `None` if the kernel does not list it here.
fn process_with_lock(file: &File) -> Option<u32> {
    let status = rustix::fs::fstat(file).ok()?;
    let (major, minor) = (rustix::fs::major(status.st_dev), rustix::fs::minor(status.st_dev));
    let identity = format!("{major:02x}:{minor:02x}:{}", status.st_ino);
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    // As in `1: FLOCK  ADVISORY  WRITE 4242 fe:00:12321282 0 EOF`.
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_it = fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&&*identity);
        is_it.then(|| fields[4].parse().ok())?
    })
}

/// Marks the description of a file as one whose mappings the next owner of the file has to wait for. The mark lasts as
/// long as the description, and that as long as any process has it open or mapped.
///
/// # Errors
/// When another description has the file exclusively.
pub(crate) fn lock_shared(file: &impl AsFd) -> rustix::io::Result<()> {
    lock_description(file.as_fd(), libc::F_RDLCK, libc::F_OFD_SETLK).map(|_| ())
}

/// Waits until no description of the file is marked. False if one still is at the deadline.
pub(crate) fn wait_until_unshared(file: &impl AsFd, deadline: Instant) -> bool {
    loop {
        let found = lock_description(file.as_fd(), libc::F_WRLCK, libc::F_OFD_GETLK);
        if found == Ok(libc::F_UNLCK) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Locks a file for an open file description, or asks for the lock of another description that is in the way.
fn lock_description(
    file: BorrowedFd<'_>,
    kind: libc::c_int,
    command: libc::c_int,
) -> rustix::io::Result<libc::c_int> {
    // SAFETY: all-zero is a valid value: the whole file, and no process, as the kernel demands.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    // SAFETY: an open descriptor, and a structure that the kernel reads and writes.
    if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } != 0 {
        let error = io::Error::last_os_error();
        return Err(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO));
    }
    Ok(libc::c_int::from(lock.l_type))
}

/// Opens the file of a descriptor again, with a description of its own. Through `/proc`, because the path may be gone
/// or name another file by now.
///
/// # Errors
/// When the kernel refuses it.
pub(crate) fn open_again(
    file: impl AsFd,
    flags: rustix::fs::OFlags,
) -> rustix::io::Result<rustix::fd::OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::open(path, flags | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())
}
