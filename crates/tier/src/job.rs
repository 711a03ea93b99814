//! What is done at once by whoever is there, without locks: copies, looks into the page cache, files that are memory.

use std::io::IoSliceMut;
use std::sync::Arc;

use rustix::io::{Errno, ReadWriteFlags};
use terrace_memory::fault::Fault;
use terrace_memory::{AtomicOp, HostRange};

use crate::device::{Command, Completion, Request};
use crate::order::PartId;
use crate::pool::Buffer;
use crate::region::Region;
use crate::sys;

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Job {
    /// Copies from memory.
    CopyOut(Span),
    /// Copies to memory.
    CopyIn(Span),
    /// Acts on 8 bytes of memory.
    Atomic { id: PartId, addr: u64, op: AtomicOp },
    /// Reads if it is in the page cache.
    Peek(Span),
    /// Reads or writes a file that is memory.
    Transfer(Request),
}

/// Bytes of a region, and their place in a buffer.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) id: PartId,
    pub(crate) region: Arc<Region>,
    /// Where in the region.
    pub(crate) offset: u64,
    pub(crate) buffer: Buffer,
    pub(crate) bytes: std::ops::Range<usize>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// A copy; of an atomic, the value before.
    Copied { id: PartId, buffer: Option<Buffer>, result: Result<u64, Fault> },
    /// A look into the page cache.
    Peeked { id: PartId, buffer: Buffer, seen: Seen },
    /// As if the device had done it.
    Transferred(Completion),
}

/// What a look into the page cache found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// All of it: the bytes are in the buffer.
    All,
    /// Not all of it.
    Less,
    /// All of it, but then it went. The kernel has begun to read it again.
    Gone,
}

impl Job {
    /// Whether a copy would wait for the disk, as far as can be seen now.
    pub(crate) fn would_wait(&self) -> bool {
        let (addr, len) = match self {
            Job::CopyOut(span) | Job::CopyIn(span) => (span.addr(), span.bytes.len() as u64),
            Job::Atomic { addr, .. } => (*addr, 8),
            Job::Peek(_) | Job::Transfer(_) => return false,
        };
        !are_cached(addr, len)
    }

    /// Does it.
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
                let seen = span.peek();
                Outcome::Peeked { id: span.id, buffer: span.buffer, seen }
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
        self.region.presence.range().addr + self.offset
    }

    /// Asks first: a read without waiting starts to read what it does not find, and so would fill the page cache.
    fn peek(&mut self) -> Seen {
        if !are_cached(self.addr(), self.bytes.len() as u64) {
            return Seen::Less;
        }
        let at = self.region.file_offset + self.offset;
        let wanted = self.bytes.len();
        let target = IoSliceMut::new(&mut self.buffer[self.bytes.clone()]);
        let read = rustix::io::preadv2(&self.region.ways.buffered, &mut [target], at, ReadWriteFlags::NOWAIT);
        if read == Ok(wanted) { Seen::All } else { Seen::Gone }
    }
}

/// Whether all pages that some bytes of a mapping touch are in the page cache.
fn are_cached(addr: u64, len: u64) -> bool {
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
