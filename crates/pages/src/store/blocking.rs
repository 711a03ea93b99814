//! Reads, writes and syncs that block the calling thread.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;

use super::request::{FrameRun, ReadRequest, WriteDevice};

/// Writes by system calls.
#[derive(Debug)]
pub(super) struct Blocking;

impl WriteDevice for Blocking {
    fn write(&self, file: BorrowedFd<'_>, offset: u64, run: &FrameRun) -> Result<usize, Errno> {
        let parts = run.iovecs();
        // SAFETY: the frames belong to the pool that the run keeps. Programs may store to them meanwhile, which the
        // kernel sees or does not: nothing in this process borrows their bytes.
        let count = unsafe {
            libc::pwritev(file.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int, offset as libc::off_t)
        };
        moved(count)
    }

    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        rustix::fs::fdatasync(file)
    }
}

/// Carries a read out, and returns when it has ended.
pub(crate) fn read_now(request: &ReadRequest) -> Result<usize, Errno> {
    let parts = request.run.iovecs();
    let (file, offset) = (request.file.as_fd().as_raw_fd(), request.offset as libc::off_t);
    // SAFETY: the frames belong to the pool that the run keeps, and have no page yet: nothing else accesses them.
    let count = unsafe { libc::preadv(file, parts.as_ptr(), parts.len() as libc::c_int, offset) };
    moved(count)
}

fn moved(count: isize) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))
    })
}
