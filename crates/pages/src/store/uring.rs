//! Reads by io_uring.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::types::Fd;
use io_uring::{opcode, squeue};

use super::request::{ReadCompletion, ReadDevice, ReadRequest};
use super::ring::{Ring, RingRequest};

/// A ring of reads.
pub(super) type Uring = Ring<InFlight>;

/// A read, and its frames for the kernel.
pub(super) struct InFlight {
    request: ReadRequest,
    iovecs: Box<[libc::iovec]>,
}

// SAFETY: the addresses in `iovecs` are those of frames, which any thread may name to the kernel.
unsafe impl Send for InFlight {}

// SAFETY: the request keeps the file open and the frames mapped; the vectors are in a box.
unsafe impl RingRequest for InFlight {
    fn entry(&self) -> squeue::Entry {
        let InFlight { request, iovecs } = self;
        let file = Fd(request.file.as_raw_fd());
        if let [only] = iovecs[..] {
            let target = only.iov_base.cast();
            return opcode::Read::new(file, target, only.iov_len as u32).offset(request.offset).build();
        }
        opcode::Readv::new(file, iovecs.as_ptr(), iovecs.len() as u32).offset(request.offset).build()
    }
}

/// Opens a ring that keeps `pool` open until its last read has ended.
///
/// # Errors
/// `EPERM` or `ENOSYS` where io_uring is forbidden or missing.
pub(super) fn open(depth: u32, pool: BorrowedFd<'_>) -> io::Result<Uring> {
    let ring = Ring::open(depth)?;
    ring.keep_open(pool)?;
    Ok(ring)
}

impl ReadDevice for Uring {
    fn submit(&mut self, requests: &mut Vec<ReadRequest>) {
        let in_flight = |request: ReadRequest| {
            let iovecs = request.run.iovecs().into_vec().into();
            InFlight { request, iovecs }
        };
        Ring::submit(self, requests.drain(..).map(in_flight));
    }

    fn reap(&mut self, done: &mut Vec<ReadCompletion>) {
        Ring::reap(self, |InFlight { request, .. }, result| done.push(ReadCompletion { request, result }));
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        Ring::descriptor(self)
    }
}
