//! Reads by io_uring.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::types::Fd;
use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;
use slab::Slab;

use super::request::{ReadCompletion, ReadDevice, ReadRequest};

/// An io_uring.
pub(super) struct Uring {
    ring: IoUring,
    /// Submitted requests; the index is the entry's `user_data`. Frames, files and vectors stay here until the kernel
    /// has completed the request.
    in_flight: Slab<InFlight>,
    /// Requests that the submission queue had no space for.
    backlog: VecDeque<ReadRequest>,
}

struct InFlight {
    request: ReadRequest,
    iovecs: Box<[libc::iovec]>,
}

// SAFETY: the addresses in `iovecs` are those of frames, which any thread may name to the kernel.
unsafe impl Send for InFlight {}

impl Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring").field("in_flight", &self.in_flight.len()).finish()
    }
}

impl Uring {
    /// Creates a ring for submissions of up to `depth` requests. It keeps `pool` open: the kernel ends a ring only when
    /// no request of it is under way.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where io_uring is forbidden or missing.
    pub(super) fn open(depth: u32, pool: BorrowedFd<'_>) -> io::Result<Uring> {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(depth.saturating_mul(4));
        // Kernels before 5.19 do not know the flags.
        let ring = match builder.clone().setup_coop_taskrun().setup_taskrun_flag().build(depth) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => builder.build(depth)?,
            ring => ring?,
        };
        ring.submitter().register_files(&[pool.as_raw_fd()])?;
        Ok(Uring { ring, in_flight: Slab::new(), backlog: VecDeque::new() })
    }

    /// Writes a request into the submission queue, or returns it when the queue is full.
    fn push(&mut self, request: ReadRequest) -> Result<(), ReadRequest> {
        let iovecs = request.run.iovecs().into_vec().into();
        let key = self.in_flight.insert(InFlight { request, iovecs });
        let entry = entry_of(&self.in_flight[key]).user_data(key as u64);
        // SAFETY: the frames, the vectors and the descriptor that the entry names stay in `in_flight` until its
        // completion was reaped; `drop` waits for that, too. The vectors do not move when the slab grows.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| self.in_flight.remove(key).request)
    }

    /// Has the kernel complete requests whose IO has ended. Where it interrupts no thread for that (`COOP_TASKRUN`), it leaves
    /// the rest of a request to the next system call of the thread that submitted it.
    fn run_task_work(&mut self) {
        if self.ring.submission().taskrun() {
            // On failure the next system call does it.
            let _ = self.ring.submit();
        }
    }

    /// Submits the queue to the kernel. Entries that the kernel has no resources for stay queued.
    fn enter(&mut self) {
        if self.ring.submission().is_empty() {
            return;
        }
        while let Err(error) = self.ring.submit() {
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN | libc::EBUSY) => return,
                _ => {
                    // No entry of ours is invalid; the only remedy is to try again later.
                    tracing::error!(%error, "io_uring takes no requests");
                    return;
                }
            }
        }
    }
}

/// The request as a submission queue entry.
fn entry_of(InFlight { request, iovecs }: &InFlight) -> squeue::Entry {
    let file = Fd(request.file.as_raw_fd());
    if let [only] = iovecs[..] {
        let target = only.iov_base.cast();
        return opcode::Read::new(file, target, only.iov_len as u32).offset(request.offset).build();
    }
    opcode::Readv::new(file, iovecs.as_ptr(), iovecs.len() as u32).offset(request.offset).build()
}

impl ReadDevice for Uring {
    fn submit(&mut self, requests: &mut Vec<ReadRequest>) {
        self.backlog.extend(requests.drain(..));
        while let Some(request) = self.backlog.pop_front() {
            if let Err(request) = self.push(request) {
                self.backlog.push_front(request);
                self.enter();
                if self.ring.submission().is_full() {
                    return;
                }
            }
        }
        self.enter();
    }

    fn reap(&mut self, done: &mut Vec<ReadCompletion>) {
        self.run_task_work();
        for entry in self.ring.completion() {
            let InFlight { request, .. } = self.in_flight.remove(entry.user_data() as usize);
            let result =
                usize::try_from(entry.result()).map_err(|_| Errno::from_raw_os_error(-entry.result()));
            done.push(ReadCompletion { request, result });
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring is open while it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while !self.in_flight.is_empty() {
            if self.ring.submit_and_wait(1).is_err_and(|error| error.raw_os_error() != Some(libc::EINTR)) {
                // The kernel may still write to the frames: the pool must not be unmapped and used again.
                std::mem::forget(std::mem::take(&mut self.in_flight));
                return;
            }
            self.reap(&mut done);
        }
    }
}
