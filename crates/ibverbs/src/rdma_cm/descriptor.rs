//! The descriptors that are channels to the connection manager. A descriptor's number is only a filter, and the inode of
//! the socket decides.

use std::collections::HashMap;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::descriptor_bits::DescriptorBits;
use crate::errno::{Errno, Result};
use crate::shim::signals::without_signals;

/// ID of the file that one `open` of the device created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u64);

/// The descriptors that were channels at the last check.
static NUMBERS: DescriptorBits = DescriptorBits::new();

/// Files by the inode of their socket.
static FILES: Mutex<Option<HashMap<u64, FileId>>> = Mutex::new(None);

fn files() -> MutexGuard<'static, Option<HashMap<u64, FileId>>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a descriptor may be a channel. Cheap, and async-signal-safe.
#[inline]
pub fn is_channel(fd: c_int) -> bool {
    NUMBERS.contains(fd)
}

/// Records a descriptor. Returns false if its number is too large.
pub fn add(fd: c_int, file: FileId) -> bool {
    let Some(inode) = inode(fd) else { return false };
    // The file comes first, see `lookup`.
    files().get_or_insert_default().insert(inode, file);
    let is_in_range = NUMBERS.insert(fd);
    if !is_in_range {
        remove(file);
    }
    is_in_range
}

/// Removes a file whose last descriptor is closed.
pub fn remove(file: FileId) {
    if let Some(files) = files().as_mut() {
        files.retain(|_, other| *other != file);
    }
}

/// Holds the list's lock while the process forks. A child keeps the list: writes to its copies of the parent's
/// descriptors must still be intercepted.
pub struct Hold {
    _files: MutexGuard<'static, Option<HashMap<u64, FileId>>>,
}

/// See [`Hold`].
pub fn hold_for_fork() -> Hold {
    Hold { _files: files() }
}

/// The file behind a descriptor, if it is a channel.
pub fn lookup(fd: c_int) -> Option<FileId> {
    if !is_channel(fd) {
        return None;
    }
    lookup_copy(fd).or_else(|| {
        NUMBERS.remove(fd);
        // Another thread may have opened a channel with this number since.
        lookup_copy(fd).inspect(|_| _ = NUMBERS.insert(fd))
    })
}

/// The file behind any descriptor, including one that `dup` created.
pub fn lookup_copy(fd: c_int) -> Option<FileId> {
    let inode = inode(fd)?;
    // A signal handler may use such a descriptor as well, or fork.
    without_signals(|| files().as_ref()?.get(&inode).copied())
}

/// Receives the byte that makes a descriptor readable.
pub fn clear_readable(fd: c_int) {
    let mut bytes = [0u8; 16];
    // SAFETY: an array of that length. The call may find no byte.
    unsafe { libc::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
}

/// Waits until a descriptor is readable, and leaves it so. False if it is closed or another file's. The wait goes on after a signal
/// whose handler has SA_RESTART, which `poll` does not, and is a cancellation point: the kernel's write for an event is both.
///
/// # Errors
/// EINTR after another signal; EAGAIN if the descriptor is non-blocking by now.
pub fn wait_readable(fd: c_int) -> Result<bool> {
    let mut byte = 0u8;
    // SAFETY: one byte.
    let received = unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK) };
    match received {
        1.. => Ok(true),
        0 => Ok(false),
        _ => match Errno::last() {
            error @ Errno(libc::EINTR | libc::EAGAIN) => Err(error),
            _ => Ok(false),
        },
    }
}

/// The inode of the socket behind a descriptor; `None` for anything but a socket.
fn inode(fd: c_int) -> Option<u64> {
    let status = system_fstat(fd)?;
    (status.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(status.st_ino)
}

/// `fstat(2)` by the system call: the C library's symbol is interposed here.
fn system_fstat(fd: c_int) -> Option<libc::stat> {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a structure to be written to, which is the kernel's own on 64-bit systems.
    let failed = unsafe { libc::syscall(libc::SYS_fstat, fd, status.as_mut_ptr()) } != 0;
    // SAFETY: the call has filled it.
    (!failed).then(|| unsafe { status.assume_init() })
}

/// The device number that a channel reports: that of the real device, which newer versions of librdmacm compare with
/// the kernel's answer, or otherwise that of the first miscellaneous device.
pub fn device_number() -> libc::dev_t {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    let path = c"/dev/infiniband/rdma_cm";
    // SAFETY: a C string, and a structure to be written to.
    let failed =
        unsafe { libc::syscall(libc::SYS_newfstatat, libc::AT_FDCWD, path.as_ptr(), status.as_mut_ptr(), 0) }
            != 0;
    // SAFETY: the call has filled it.
    if failed { libc::makedev(10, 0) } else { unsafe { status.assume_init() }.st_rdev }
}
