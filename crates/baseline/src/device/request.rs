//! Requests to a file, their completions, and the traits of devices.

use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use crate::pool::Buffer;

/// The operation of a request.
#[derive(Debug)]
pub enum Command {
    /// Reads from the file into a range of the buffer.
    Read {
        /// The buffer to fill.
        buffer: Buffer,
        /// The range of the buffer.
        part: std::ops::Range<usize>,
    },
    /// Writes a range of the buffer to the file.
    Write {
        /// The buffer to write from.
        buffer: Buffer,
        /// The range of the buffer.
        part: std::ops::Range<usize>,
    },
    /// Makes `len` bytes of the file durable (`fdatasync`); with length 0 at offset 0: the whole file.
    Sync {
        /// Length in bytes.
        len: u32,
    },
}

impl Command {
    /// The buffer, if the command has one.
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Command::Read { buffer, .. } | Command::Write { buffer, .. } => Some(buffer),
            Command::Sync { .. } => None,
        }
    }
}

/// A request to a device.
#[derive(Debug)]
pub struct Request {
    /// Returned with the completion.
    pub id: usize,
    /// The file; kept open until the request has completed.
    pub file: Arc<OwnedFd>,
    /// The offset in the file.
    pub offset: u64,
    /// The operation.
    pub command: Command,
}

/// A completed request.
#[derive(Debug)]
pub struct Completion {
    /// The request.
    pub request: Request,
    /// The number of bytes moved, possibly fewer than requested.
    pub result: Result<usize, Errno>,
}

/// Carries out requests, in any order.
pub trait Device: Send + Debug {
    /// Takes all requests. Those that do not fit are queued, and submitted with the next call.
    fn submit(&mut self, requests: &mut Vec<Request>);

    /// Appends new completions.
    fn reap(&mut self, done: &mut Vec<Completion>);

    /// Readable when there are completions to reap.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

/// Opens devices.
pub trait DeviceFactory: Send + Sync + Debug {
    /// Opens a device for about `depth` requests at a time.
    ///
    /// # Errors
    /// The error of the kernel.
    fn open(&self, depth: u32) -> io::Result<Box<dyn Device>>;
}
