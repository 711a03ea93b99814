//! What carries requests to files: io_uring, or threads where there is none; a faulty one for tests, and one
//! that a user's fault plan troubles.
//!
//! A device takes requests with their buffers and gives both back when they are done; in between the buffer is the
//! kernel's. It has no thread that the caller would have to wait for: whoever makes progress submits and reaps.

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
pub use threads::Threads;
pub use uring::Uring;

pub use crate::pool::Buffer;

/// io_uring with threads for what changes the file if there is one, threads only otherwise (containers often forbid io_uring).
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

/// Threads, even where there is io_uring.
#[derive(Clone, Copy, Debug, Default)]
pub struct OnlyThreads;

impl DeviceFactory for OnlyThreads {
    fn open(&self, _depth: u32) -> io::Result<Box<dyn Device>> {
        Ok(Box::new(Threads::open()?))
    }
}
