//! Threads of this process that touch a range wait: in their loads and stores, and in their system calls.
//!
//! `userfaultfd(2)` has a thread wait that touches a page which is not there. Nobody reads the descriptor: the range is
//! emptied, filled in by other means, and then the waiting threads are woken, to try again.

use std::io;

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::refusal::Refusal;
use crate::userfault::{Userfaultfd, modes};

/// Has threads wait.
#[derive(Debug)]
pub(crate) struct Guard(Userfaultfd);

impl Guard {
    /// # Errors
    /// `Privilege` when the kernel grants this process no `userfaultfd` for faults of the kernel; `System`.
    pub(crate) fn open() -> Result<Guard, Refusal> {
        Userfaultfd::open(0).map(Guard).map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES | libc::ENOENT | libc::ENOSYS) => Refusal::Privilege,
            _ => Refusal::System { attempt: "open a userfaultfd", source: error },
        })
    }

    /// From now on, threads wait that touch pages of a range which are not there.
    ///
    /// # Errors
    /// `OtherUserfaultfd`, `System`.
    pub(crate) fn cover(&self, range: HostRange) -> Result<(), Refusal> {
        self.0.register(range, modes::MISSING).map_err(|error| match error.raw_os_error() {
            Some(libc::EBUSY) => Refusal::OtherUserfaultfd,
            _ => Refusal::System { attempt: "have threads wait that touch it", source: error },
        })
    }

    /// Wakes the threads that wait for a range, which is there again.
    pub(crate) fn wake(&self, range: HostRange) {
        let woken = self.0.wake(range);
        debug_assert!(woken.is_ok(), "whole pages are woken: {woken:?}");
    }

    /// Puts a copy of a page where none is.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn put_page(&self, from: u64, to: u64) -> io::Result<()> {
        // SAFETY: the caller's page, which is mapped; the kernel alone reads it, while any thread may store to it.
        let page = unsafe { std::slice::from_raw_parts(from as *const u8, PAGE_BYTES as usize) };
        self.0.copy(page, to, false).map(drop)
    }
}
