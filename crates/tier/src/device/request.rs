//! Requests to a file, their completions, and the traits of what carries them out.

use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use crate::pool::Buffer;

/// What to do.
#[derive(Debug)]
pub enum Command {
    /// Fills a part of the buffer from the file.
    Read {
        /// What to fill.
        buffer: Buffer,
        /// Which part of it.
        part: std::ops::Range<usize>,
    },
    /// Writes a part of the buffer to the file.
    Write {
        /// What to write from.
        buffer: Buffer,
        /// Which part of it.
        part: std::ops::Range<usize>,
    },
    /// Makes `len` bytes of the file durable (`fdatasync`); of 0 bytes at 0: all of it.
    Sync {
        /// How many.
        len: u32,
    },
}

impl Command {
    /// The buffer, if there is one.
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Command::Read { buffer, .. } | Command::Write { buffer, .. } => Some(buffer),
            Command::Sync { .. } => None,
        }
    }
}

/// A request.
#[derive(Debug)]
pub struct Request {
    /// Comes back with the completion.
    pub id: usize,
    /// The file; kept open until the request is done.
    pub file: Arc<OwnedFd>,
    /// Where in the file.
    pub offset: u64,
    /// What to do there.
    pub command: Command,
}

/// A request that is done.
#[derive(Debug)]
pub struct Completion {
    /// The request.
    pub request: Request,
    /// How many bytes were moved: possibly fewer than were asked for.
    pub result: Result<usize, Errno>,
}

/// Carries requests out. Requests may be carried out and completed in any order.
pub trait Device: Send + Debug {
    /// Takes all of the requests. Those that there is no room for yet wait here for the next call.
    fn submit(&mut self, requests: &mut Vec<Request>);

    /// Appends what is done.
    fn reap(&mut self, done: &mut Vec<Completion>);

    /// Readable when something is done that was not reaped.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

/// Makes a device.
pub trait DeviceFactory: Send + Sync + Debug {
    /// Opens it for about `depth` requests at a time.
    ///
    /// # Errors
    /// What the kernel says.
    fn open(&self, depth: u32) -> io::Result<Box<dyn Device>>;
}
