//! Work that the calling thread does itself, without locks: copies, reads from the page cache without waiting,
//! transfers of memory files.

use std::io::IoSliceMut;
use std::sync::Arc;

use rustix::io::{Errno, ReadWriteFlags};
use terrace_hostmem::fault::Fault;
use terrace_hostmem::{AtomicOp, HostRange};

use crate::device::{Command, Completion, Request};
use crate::order::AccessId;
use crate::pool::Buffer;
use crate::region::Region;
use crate::sys;

/// A job.
#[derive(Debug)]
pub(crate) enum Job {
    /// Copies from the mapping.
    CopyOut(Span),
    /// Copies to the mapping.
    CopyIn(Span),
    /// An atomic operation on 8 bytes of the mapping.
    Atomic { id: AccessId, addr: u64, op: AtomicOp },
    /// Reads the bytes if they are in the page cache.
    Peek(Span),
    /// Reads or writes a file in memory.
    Transfer(Request),
}

/// Bytes of a region, and their range in a buffer.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) id: AccessId,
    pub(crate) region: Arc<Region>,
    /// The offset in the region.
    pub(crate) offset: u64,
    pub(crate) buffer: Buffer,
    pub(crate) bytes: std::ops::Range<usize>,
}

/// The result of a job.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Of a copy; for an atomic, `result` has the value before.
    Copied { id: AccessId, buffer: Option<Buffer>, result: Result<u64, Fault> },
    /// Of a read without waiting. `is_read`: the page cache had all bytes, which are in the buffer.
    Peeked { id: AccessId, buffer: Buffer, is_read: bool },
    /// Of a transfer, as if the device had completed it.
    Transferred(Completion),
}

impl Job {
    /// Whether a copy would wait for the disk, by the current state of the page cache.
    pub(crate) fn would_wait(&self) -> bool {
        let (addr, len) = match self {
            Job::CopyOut(span) | Job::CopyIn(span) => (span.addr(), span.bytes.len() as u64),
            Job::Atomic { addr, .. } => (*addr, 8),
            Job::Peek(_) | Job::Transfer(_) => return false,
        };
        !are_cached(addr, len)
    }

    pub(crate) fn run(self) -> Outcome {
        match self {
            Job::CopyOut(mut span) => {
                let result = sys::copy_out(span.addr(), &mut span.buffer[span.bytes]).map(|()| 0);
                Outcome::Copied { id: span.id, buffer: Some(span.buffer), result }
            }
            Job::CopyIn(span) => {
                let result = sys::copy_in(span.addr(), &span.buffer[span.bytes]).map(|()| 0);
                Outcome::Copied { id: span.id, buffer: Some(span.buffer), result }
            }
            Job::Atomic { id, addr, op } => {
                Outcome::Copied { id, buffer: None, result: sys::atomic(addr, op) }
            }
            Job::Peek(mut span) => {
                let is_read = span.peek();
                Outcome::Peeked { id: span.id, buffer: span.buffer, is_read }
            }
            Job::Transfer(mut request) => {
                let result = transfer(&mut request);
                Outcome::Transferred(Completion { request, result })
            }
        }
    }
}

impl Span {
    fn addr(&self) -> u64 {
        self.region.range().addr + self.offset
    }

    /// Reads the bytes if the page cache has all of them. Checks with `mincore` first: `RWF_NOWAIT` starts readahead of
    /// missing pages, and so would fill the page cache.
    fn peek(&mut self) -> bool {
        if !are_cached(self.addr(), self.bytes.len() as u64) {
            return false;
        }
        let at = self.region.file_offset + self.offset;
        let wanted = self.bytes.len();
        let target = IoSliceMut::new(&mut self.buffer[self.bytes.clone()]);
        rustix::io::preadv2(&self.region.files.buffered, &mut [target], at, ReadWriteFlags::NOWAIT)
            == Ok(wanted)
    }
}

/// Whether the page cache contains all pages of a byte range of a mapping.
pub(crate) fn are_cached(addr: u64, len: u64) -> bool {
    let skip = addr % 4096;
    sys::is_cached(HostRange { addr: addr - skip, len: skip + len })
}

fn transfer(request: &mut Request) -> Result<usize, Errno> {
    let (file, offset) = (&request.file, request.offset);
    match &mut request.command {
        Command::Read { buffer, part } => rustix::io::pread(file, &mut buffer[part.clone()], offset),
        Command::Write { buffer, part } => rustix::io::pwrite(file, &buffer[part.clone()], offset),
        Command::Sync { .. } => rustix::fs::fdatasync(file).map(|()| 0),
    }
}
