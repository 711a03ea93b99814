//! A counting semaphore with a file descriptor, so that a program can wait for it with `poll`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, ReadWriteFlags, preadv2, read, write};

use crate::error::Error;

/// An eventfd that counts tokens. Whether taking one blocks is the program's choice, by O_NONBLOCK on the
/// descriptor, as for the descriptors that real verbs have here.
#[derive(Debug)]
pub(crate) struct Semaphore {
    fd: OwnedFd,
}

impl Semaphore {
    /// A semaphore without tokens; its descriptor blocks until the program makes it non-blocking.
    pub fn new() -> Result<Semaphore, Error> {
        let fd = eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC)?;
        Ok(Semaphore { fd })
    }

    /// Adds a token. It cannot fail: the counter has 64 bits.
    pub fn post(&self) {
        let _ = write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Takes a token. Waits for one unless the descriptor has O_NONBLOCK, in which case it is `Again`. The thread may be
    /// cancelled meanwhile, as in rdma-core: programs end threads that wait for events in this way. The caller holds no lock.
    pub fn take(&self) -> Result<(), Error> {
        let mut token = [0u8; 8];
        // By the C library, whose function is a cancellation point; the system call alone is none.
        nix::unistd::read(&self.fd, &mut token).map_err(|error| Errno::from_raw_os_error(error as i32))?;
        Ok(())
    }

    /// Takes a token if there is one, and never waits. Where the system cannot promise that, the token stays.
    pub fn try_take(&self) -> bool {
        let mut token = [0u8; 8];
        let mut buffers = [std::io::IoSliceMut::new(&mut token)];
        preadv2(&self.fd, &mut buffers, u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
    }

    /// Whether the program has asked for non-blocking takes.
    pub fn is_nonblocking(&self) -> bool {
        rustix::fs::fcntl_getfl(&self.fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A descriptor that wakes a sleeping thread; any number of rings before the thread reads it count once.
#[derive(Debug)]
pub(crate) struct Doorbell {
    fd: OwnedFd,
}

impl Doorbell {
    pub fn new() -> Result<Doorbell, Error> {
        Ok(Doorbell { fd: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)? })
    }

    pub fn ring(&self) {
        let _ = write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Clears the ringing.
    pub fn silence(&self) {
        let mut count = [0u8; 8];
        let _: Result<usize, Errno> = read(&self.fd, &mut count);
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
