//! Threads of this process that touch a range wait: in their loads and stores, and in their system calls.
//!
//! `userfaultfd(2)` has a thread wait that touches a page which is not there. Nobody reads the descriptor: the range is
//! emptied, filled in by other means, and then the waiting threads are woken, to try again.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::refusal::Refusal;

/// `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

const UFFD_API: u64 = 0xaa;
const MODE_MISSING: u64 = 1;

/// The number of a request of `ioctl(2)` that reads and writes a structure, or reads one (see `asm-generic/ioctl.h`).
const fn request(direction: u64, number: u64, len: usize) -> libc::c_ulong {
    (direction << 30 | (len as u64) << 16 | UFFD_API << 8 | number) as libc::c_ulong
}

const READ: u64 = 2;
const READ_WRITE: u64 = 3;
const UFFDIO_API: libc::c_ulong = request(READ_WRITE, 0x3f, size_of::<UffdioApi>());
const UFFDIO_REGISTER: libc::c_ulong = request(READ_WRITE, 0, size_of::<UffdioRegister>());
const UFFDIO_COPY: libc::c_ulong = request(READ_WRITE, 3, size_of::<UffdioCopy>());
const UFFDIO_WAKE: libc::c_ulong = request(READ, 2, size_of::<UffdioRange>());
/// Of `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = request(0, 0, 0);

/// Has threads wait.
#[derive(Debug)]
pub(crate) struct Guard(OwnedFd);

impl Guard {
    /// # Errors
    /// `Privilege` when the kernel grants this process no `userfaultfd` for faults of the kernel; `System`.
    pub(crate) fn open() -> Result<Guard, Refusal> {
        let guard = Guard(open_descriptor()?);
        let mut api = UffdioApi { api: UFFD_API, features: 0, ioctls: 0 };
        // SAFETY: the structure of this request.
        unsafe { guard.request(UFFDIO_API, &raw mut api) }.map_err(Refusal::system("use userfaultfd"))?;
        Ok(guard)
    }

    /// From now on, threads wait that touch pages of a range which are not there.
    ///
    /// # Errors
    /// `OtherUserfaultfd`, `System`.
    pub(crate) fn cover(&self, range: HostRange) -> Result<(), Refusal> {
        let HostRange { addr: start, len } = range;
        let mut register =
            UffdioRegister { range: UffdioRange { start, len }, mode: MODE_MISSING, ioctls: 0 };
        // SAFETY: the structure of this request.
        unsafe { self.request(UFFDIO_REGISTER, &raw mut register) }.map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EBUSY) => Refusal::OtherUserfaultfd,
                _ => Refusal::System { attempt: "have threads wait that touch it", source: error },
            }
        })
    }

    /// Wakes the threads that wait for a range, which is there again.
    pub(crate) fn wake(&self, range: HostRange) {
        let mut range = UffdioRange { start: range.addr, len: range.len };
        // SAFETY: the structure of this request.
        let woken = unsafe { self.request(UFFDIO_WAKE, &raw mut range) };
        debug_assert!(woken.is_ok(), "whole pages are woken: {woken:?}");
    }

    /// Puts a copy of a page where none is.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn put_page(&self, from: u64, to: u64) -> io::Result<()> {
        let mut copy = UffdioCopy { dst: to, src: from, len: PAGE_BYTES, mode: 0, copied: 0 };
        // SAFETY: the structure of this request.
        unsafe { self.request(UFFDIO_COPY, &raw mut copy) }
    }

    /// # Safety
    /// `argument` is the structure of the request.
    unsafe fn request<T>(&self, request: libc::c_ulong, argument: *mut T) -> io::Result<()> {
        // SAFETY: the caller's.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, argument) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// A descriptor that covers faults of the kernel, too: threads may touch the memory by system calls.
fn open_descriptor() -> Result<OwnedFd, Refusal> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: takes a number.
    let mut descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) } as libc::c_int;
    if descriptor < 0
        && let Ok(device) = File::options().read(true).write(true).open("/dev/userfaultfd")
    {
        // SAFETY: takes a number.
        descriptor = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags) };
    }
    if descriptor >= 0 {
        // SAFETY: just opened.
        return Ok(unsafe { OwnedFd::from_raw_fd(descriptor) });
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOENT | libc::ENOSYS) => Err(Refusal::Privilege),
        _ => Err(Refusal::System { attempt: "open a userfaultfd", source: error }),
    }
}
