//! An io_uring whose requests own what they name to the kernel.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, squeue};
use rustix::io::Errno;
use slab::Slab;

/// A request with all that its entry names.
///
/// # Safety
/// As long as the value exists, the memory and the descriptors that the entry names exist too, where they are, also when the
/// value is moved.
pub unsafe trait RingRequest: Send {
    /// The request for the kernel. Its `user_data` is the ring's.
    fn entry(&self) -> squeue::Entry;
}

/// An io_uring.
pub struct Ring<R: RingRequest> {
    ring: IoUring,
    /// Submitted requests; the index is the entry's `user_data`. They stay here until the kernel has completed them.
    in_flight: Slab<R>,
    /// Requests that the submission queue had no space for.
    backlog: VecDeque<R>,
}

impl<R: RingRequest> Debug for Ring<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight.len()).finish()
    }
}

impl<R: RingRequest> Ring<R> {
    /// Creates a ring for submissions of up to `depth` requests.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where io_uring is forbidden or missing.
    pub fn open(depth: u32) -> io::Result<Ring<R>> {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(depth.saturating_mul(4));
        // Kernels before 5.19 do not know the flags.
        let ring = match builder.clone().setup_coop_taskrun().setup_taskrun_flag().build(depth) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => builder.build(depth)?,
            ring => ring?,
        };
        Ok(Ring { ring, in_flight: Slab::new(), backlog: VecDeque::new() })
    }

    /// Keeps a file open: the kernel ends a ring only when no request of it is under way.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn keep_open(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.submitter().register_files(&[file.as_raw_fd()])
    }

    /// Submits all requests. Those that do not fit are queued, and submitted with the next call.
    pub fn submit(&mut self, requests: impl Iterator<Item = R>) {
        self.backlog.extend(requests);
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

    /// Passes each completed request to `each`, with the number of bytes moved, possibly fewer than requested.
    pub fn reap(&mut self, mut each: impl FnMut(R, Result<usize, Errno>)) {
        self.run_kernel_work();
        for entry in self.ring.completion() {
            let request = self.in_flight.remove(entry.user_data() as usize);
            each(
                request,
                usize::try_from(entry.result()).map_err(|_| Errno::from_raw_os_error(-entry.result())),
            );
        }
    }

    /// Readable when there are completions to reap.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring is open while it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    /// Writes a request into the submission queue, or returns it when the queue is full.
    fn push(&mut self, request: R) -> Result<(), R> {
        let key = self.in_flight.insert(request);
        let entry = self.in_flight[key].entry().user_data(key as u64);
        // SAFETY: what the entry names exists as long as the request, which stays in `in_flight` until its completion was
        // reaped; `drop` waits for that, too.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| self.in_flight.remove(key))
    }

    /// Has the kernel complete requests whose IO has ended. Where it interrupts no thread for that (`COOP_TASKRUN`), it leaves
    /// the rest of a request to the next system call of the thread that submitted it. So it does with completions that
    /// found the queue full: it keeps them, and the ring stays readable.
    fn run_kernel_work(&mut self) {
        let queue = self.ring.submission();
        let is_due = queue.taskrun() || queue.cq_overflow();
        drop(queue);
        if is_due {
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

impl<R: RingRequest> Drop for Ring<R> {
    fn drop(&mut self) {
        while !self.in_flight.is_empty() {
            if self.ring.submit_and_wait(1).is_err_and(|error| error.raw_os_error() != Some(libc::EINTR)) {
                // The kernel may still write to the memory of these requests: it must not be used again.
                std::mem::forget(std::mem::take(&mut self.in_flight));
                return;
            }
            self.reap(|_, _| {});
        }
    }
}

#[cfg(test)]
mod tests {
    use io_uring::opcode;

    use super::*;

    /// A request that ends as it is submitted.
    struct Nothing;

    // SAFETY: the entry names neither memory nor a descriptor.
    unsafe impl RingRequest for Nothing {
        fn entry(&self) -> squeue::Entry {
            opcode::Nop::new().build()
        }
    }

    #[test]
    fn more_completions_than_the_queue_holds_are_reaped_without_another_submission() {
        const COUNT: usize = 1000;
        let mut ring = match Ring::open(8) {
            Ok(ring) => ring,
            Err(error) => return eprintln!("no io_uring on this system ({error}): not tested"),
        };
        ring.submit((0..COUNT).map(|_| Nothing));
        let mut reaped = 0;
        for _ in 0..COUNT {
            ring.submit(std::iter::empty());
            ring.reap(|_, result| reaped += usize::from(result == Ok(0)));
        }
        assert_eq!(reaped, COUNT);
    }
}
