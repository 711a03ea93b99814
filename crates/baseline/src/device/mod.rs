//! Devices carry out requests on files: io_uring, or threads where io_uring is missing. One device injects faults for
//! tests, another one the faults of a user's fault plan.
//!
//! A device owns requests and their buffers until it returns both with the completion; in between the kernel uses the
//! buffer. No background thread submits or reaps: the threads that call [`crate::Baseline::advance`] do.

mod both;
mod faulty;
mod injected;
mod request;
mod threads;
mod uring;

use std::io;

pub use both::Both;
pub use faulty::{Faults, Faulty};
pub(crate) use injected::Injected;
pub use request::{Command, Completion, Device, DeviceFactory, Request};

pub use crate::pool::Buffer;

/// io_uring for reads and threads for writes; only threads where io_uring is forbidden, as in many containers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Best;

impl DeviceFactory for Best {
    fn open(&self, depth: u32) -> io::Result<Box<dyn Device>> {
        match Both::open(depth) {
            Ok(both) => Ok(Box::new(both)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS | libc::EACCES)) => {
                tracing::info!(%error, "no io_uring here: threads read and write files");
                OnlyThreads.open(depth)
            }
            Err(error) => Err(error),
        }
    }
}

/// Threads, even where io_uring is available.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnlyThreads;

impl DeviceFactory for OnlyThreads {
    fn open(&self, _depth: u32) -> io::Result<Box<dyn Device>> {
        Ok(Box::new(threads::open()?))
    }
}
