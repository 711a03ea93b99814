//! `userfaultfd(2)`: faults in registered memory become messages, and pages are put there, moved away and protected.
//!
//! Structures and numbers are those of `linux/userfaultfd.h`, which the `libc` crate lacks.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use terrace_hostmem::{HostRange, PAGE_BYTES};

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

/// `struct uffdio_copy` and `struct uffdio_move`.
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

/// `struct uffdio_poison` and `struct uffdio_zeropage`.
#[repr(C)]
struct UffdioPoison {
    range: UffdioRange,
    mode: u64,
    done: i64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct UffdioWriteProtect {
    range: UffdioRange,
    mode: u64,
}

/// `struct uffd_msg`. The meaning of the arguments depends on the event.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct UffdMessage {
    event: u8,
    reserved: [u8; 7],
    arguments: [u64; 3],
}

const UFFD_API: u64 = 0xaa;
const COPY_WRITE_PROTECTED: u64 = 2;
const WRITE_PROTECT: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_FORK: u8 = 0x13;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;
const PAGEFAULT_WRITE: u64 = 1;
const PAGEFAULT_WRITE_PROTECTED: u64 = 2;

/// What a descriptor reports, and how, besides absent pages (`UFFD_FEATURE_*`).
pub mod features {
    /// Stores to write-protected pages.
    pub const WRITE_PROTECTED: u64 = 1;
    /// Forks, with a descriptor for the child's memory. Needs `CAP_SYS_PTRACE`.
    pub const FORK: u64 = 1 << 1;
    /// `mremap(2)`.
    pub const REMAP: u64 = 1 << 2;
    /// `madvise(2)` with `MADV_DONTNEED` or `MADV_FREE`.
    pub const REMOVE: u64 = 1 << 3;
    /// `munmap(2)`.
    pub const UNMAP: u64 = 1 << 6;
    /// [`Userfaultfd::poison`](super::Userfaultfd::poison); Linux 6.6.
    pub const POISON: u64 = 1 << 14;
    /// [`Userfaultfd::move_pages`](super::Userfaultfd::move_pages); Linux 6.8.
    pub const MOVE: u64 = 1 << 16;
}

/// Which touches of a registered range are faults (`UFFDIO_REGISTER_MODE_*`).
pub mod modes {
    /// Of an absent page.
    pub const MISSING: u64 = 1;
    /// Of a page that is write-protected by this descriptor.
    pub const WRITE_PROTECTED: u64 = 2;
}

/// The number of a request of `ioctl(2)` that reads and writes a structure, or reads one (see `asm-generic/ioctl.h`).
const fn request(direction: u64, number: u64, len: usize) -> libc::c_ulong {
    (direction << 30 | (len as u64) << 16 | UFFD_API << 8 | number) as libc::c_ulong
}

const READ: u64 = 2;
const READ_WRITE: u64 = 3;
const UFFDIO_API: libc::c_ulong = request(READ_WRITE, 0x3f, size_of::<UffdioApi>());
const UFFDIO_REGISTER: libc::c_ulong = request(READ_WRITE, 0, size_of::<UffdioRegister>());
const UFFDIO_UNREGISTER: libc::c_ulong = request(READ, 1, size_of::<UffdioRange>());
const UFFDIO_WAKE: libc::c_ulong = request(READ, 2, size_of::<UffdioRange>());
const UFFDIO_COPY: libc::c_ulong = request(READ_WRITE, 3, size_of::<UffdioCopy>());
const UFFDIO_ZEROPAGE: libc::c_ulong = request(READ_WRITE, 4, size_of::<UffdioPoison>());
const UFFDIO_MOVE: libc::c_ulong = request(READ_WRITE, 5, size_of::<UffdioCopy>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = request(READ_WRITE, 6, size_of::<UffdioWriteProtect>());
const UFFDIO_POISON: libc::c_ulong = request(READ_WRITE, 8, size_of::<UffdioPoison>());
/// Of `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = request(0, 0, 0);

/// A message of the kernel.
#[derive(Debug)]
pub enum Message {
    /// A thread waits, because it touched a page.
    Fault {
        /// The address of the page.
        page: u64,
        /// Whether it stores.
        is_store: bool,
        /// Whether the page is there, but protected.
        is_protected: bool,
    },
    /// A child has a copy of the memory, and this descriptor for it.
    Fork(Userfaultfd),
    /// A range has other addresses.
    Remap {
        /// The old addresses.
        from: HostRange,
        /// The first new one.
        to: u64,
    },
    /// The pages of a range go away, and are zeros when they are touched again.
    Remove(HostRange),
    /// A range is not mapped any more.
    Unmap(HostRange),
}

/// A descriptor that handles faults of one process.
#[derive(Debug)]
pub struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// A descriptor for this process. It covers faults of the kernel, too: threads may touch the memory by system calls.
    ///
    /// # Errors
    /// The system's; `PermissionDenied` and `NotFound` without privilege, `InvalidInput` if the kernel lacks a feature.
    pub fn open(features: u64) -> io::Result<Userfaultfd> {
        let descriptor = Userfaultfd(open_descriptor()?);
        let mut api = UffdioApi { api: UFFD_API, features, ioctls: 0 };
        // SAFETY: the structure of this request.
        unsafe { descriptor.request(UFFDIO_API, &raw mut api) }?;
        Ok(descriptor)
    }

    /// Makes touches of a range faults (`modes`).
    ///
    /// # Errors
    /// The system's; EBUSY if another descriptor handles it.
    pub fn register(&self, range: HostRange, mode: u64) -> io::Result<()> {
        let HostRange { addr: start, len } = range;
        let mut register = UffdioRegister { range: UffdioRange { start, len }, mode, ioctls: 0 };
        // SAFETY: the structure of this request.
        unsafe { self.request(UFFDIO_REGISTER, &raw mut register) }
    }

    /// Reverts [`Userfaultfd::register`].
    ///
    /// # Errors
    /// The system's.
    pub fn unregister(&self, range: HostRange) -> io::Result<()> {
        let mut range = UffdioRange { start: range.addr, len: range.len };
        // SAFETY: the structure of this request.
        unsafe { self.request(UFFDIO_UNREGISTER, &raw mut range) }
    }

    /// Wakes the threads that wait for a range, to try again.
    ///
    /// # Errors
    /// The system's.
    pub fn wake(&self, range: HostRange) -> io::Result<()> {
        let mut range = UffdioRange { start: range.addr, len: range.len };
        // SAFETY: the structure of this request.
        unsafe { self.request(UFFDIO_WAKE, &raw mut range) }
    }

    /// Puts copies of pages where none are, and wakes the threads that wait for them. Returns the number of bytes.
    ///
    /// # Errors
    /// The system's if not one page could be put there; `AlreadyExists` if a page is there, `WouldBlock` while a change of
    /// mappings has not been read, ESRCH if the process is gone.
    pub fn copy(&self, from: &[u8], to: u64, is_protected: bool) -> io::Result<u64> {
        let mode = if is_protected { COPY_WRITE_PROTECTED } else { 0 };
        let (src, len) = (from.as_ptr().addr() as u64, from.len() as u64 / PAGE_BYTES * PAGE_BYTES);
        let mut copy = UffdioCopy { dst: to, src, len, mode, done: 0 };
        // SAFETY: the structure of this request; the kernel only reads the source.
        let result = unsafe { self.request(UFFDIO_COPY, &raw mut copy) };
        count_done(result, copy.done)
    }

    /// Maps the page of zeros where no pages are, and wakes the threads that wait for them. Returns the number of bytes.
    ///
    /// # Errors
    /// As of [`Userfaultfd::copy`].
    pub fn zero(&self, range: HostRange) -> io::Result<u64> {
        let (start, len) = (range.addr, range.len);
        let mut zero = UffdioPoison { range: UffdioRange { start, len }, mode: 0, done: 0 };
        // SAFETY: the structure of this request.
        let result = unsafe { self.request(UFFDIO_ZEROPAGE, &raw mut zero) };
        count_done(result, zero.done)
    }

    /// Moves pages of this process to where none are, in a range that is registered. What was there is absent then.
    /// Returns the number of bytes.
    ///
    /// # Errors
    /// The system's if not one page could be moved; `NotFound` if none is there, `ResourceBusy` if another process shares
    /// it or a device uses it, `WouldBlock` while a change of mappings has not been read.
    ///
    /// # Safety
    /// Those who need the pages at their old addresses wait for faults there.
    pub unsafe fn move_pages(&self, from: HostRange, to: u64) -> io::Result<u64> {
        let mut moving = UffdioCopy { dst: to, src: from.addr, len: from.len, mode: 0, done: 0 };
        // SAFETY: the structure of this request.
        let result = unsafe { self.request(UFFDIO_MOVE, &raw mut moving) };
        count_done(result, moving.done)
    }

    /// Protects the pages of a range from stores, or reverts that and wakes the threads that wait.
    ///
    /// # Errors
    /// The system's; as of [`Userfaultfd::copy`].
    pub fn protect(&self, range: HostRange, is_protected: bool) -> io::Result<()> {
        let mode = if is_protected { WRITE_PROTECT } else { 0 };
        let mut protect =
            UffdioWriteProtect { range: UffdioRange { start: range.addr, len: range.len }, mode };
        // SAFETY: the structure of this request.
        unsafe { self.request(UFFDIO_WRITEPROTECT, &raw mut protect) }
    }

    /// Has touches of pages that are not there give SIGBUS, or EFAULT in system calls.
    ///
    /// # Errors
    /// As of [`Userfaultfd::copy`].
    pub fn poison(&self, range: HostRange) -> io::Result<u64> {
        let (start, len) = (range.addr, range.len);
        let mut poison = UffdioPoison { range: UffdioRange { start, len }, mode: 0, done: 0 };
        // SAFETY: the structure of this request.
        let result = unsafe { self.request(UFFDIO_POISON, &raw mut poison) };
        count_done(result, poison.done)
    }

    /// Whether the process whose memory this is still has it.
    pub fn is_alive(&self) -> bool {
        // Nothing is mapped at address 0, so a process that is there gives another error.
        let probe = self.protect(HostRange { addr: 0, len: PAGE_BYTES }, true);
        probe.err().and_then(|error| error.raw_os_error()) != Some(libc::ESRCH)
    }

    /// Reads the next message; `None` if there is none.
    ///
    /// # Errors
    /// The system's.
    pub fn read(&self) -> io::Result<Option<Message>> {
        let mut message = UffdMessage::default();
        let descriptor = self.0.as_raw_fd();
        // SAFETY: reads at most one structure into one.
        let len = unsafe { libc::read(descriptor, (&raw mut message).cast(), size_of::<UffdMessage>()) };
        if len == size_of::<UffdMessage>() as isize {
            return Ok(message.decode());
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(error),
        }
    }

    /// # Safety
    /// `argument` is the structure of the request.
    unsafe fn request<T>(&self, request: libc::c_ulong, argument: *mut T) -> io::Result<()> {
        // SAFETY: the caller's.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, argument) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor that another process has opened, and has sent here.
impl From<OwnedFd> for Userfaultfd {
    fn from(descriptor: OwnedFd) -> Userfaultfd {
        Userfaultfd(descriptor)
    }
}

/// The kernel gives the number of bytes, or the negative error of the first page.
fn count_done(result: io::Result<()>, done: i64) -> io::Result<u64> {
    match (result, done) {
        (Ok(()), _) => Ok(done as u64),
        (Err(_), 1..) => Ok(done as u64),
        (Err(error), _) => Err(error),
    }
}

impl UffdMessage {
    fn decode(self) -> Option<Message> {
        let [first, second, third] = self.arguments;
        let range = |start: u64, end: u64| HostRange { addr: start, len: end.saturating_sub(start) };
        Some(match self.event {
            EVENT_PAGEFAULT => Message::Fault {
                page: second & !(PAGE_BYTES - 1),
                is_store: first & PAGEFAULT_WRITE != 0,
                is_protected: first & PAGEFAULT_WRITE_PROTECTED != 0,
            },
            // SAFETY: the kernel has just installed this descriptor for the reader of the message.
            EVENT_FORK => Message::Fork(Userfaultfd(unsafe { OwnedFd::from_raw_fd(first as u32 as i32) })),
            EVENT_REMAP => Message::Remap { from: HostRange { addr: first, len: third }, to: second },
            EVENT_REMOVE => Message::Remove(range(first, second)),
            EVENT_UNMAP => Message::Unmap(range(first, second)),
            _ => return None,
        })
    }
}

fn open_descriptor() -> io::Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: takes a number.
    let mut descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) } as libc::c_int;
    if descriptor < 0
        && let Ok(device) = File::options().read(true).write(true).open("/dev/userfaultfd")
    {
        // SAFETY: takes a number.
        descriptor = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW as _, flags) };
    }
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
