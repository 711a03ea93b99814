//! Reads of pages: queued by shards, submitted and reaped by the threads that make progress.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use terrace_sync::Mutex;

use crate::error::PagesError;
use crate::store::{ReadCompletion, ReadDevice, ReadRequest, read_now};

/// The device that reads, and which shards have reads for it.
#[derive(Debug)]
pub(crate) struct ReadQueue {
    /// A bit for each shard with reads to be submitted.
    with_reads: AtomicU64,
    /// Reads queued or submitted.
    in_flight: AtomicUsize,
    device: Mutex<Box<dyn ReadDevice>>,
    /// That of the device.
    descriptor: OwnedFd,
}

impl ReadQueue {
    /// # Errors
    /// `System` when the process has no descriptors left.
    pub(crate) fn new(device: Box<dyn ReadDevice>) -> Result<ReadQueue, PagesError> {
        let descriptor = device.descriptor().try_clone_to_owned();
        Ok(ReadQueue {
            with_reads: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            descriptor: descriptor.map_err(PagesError::system("duplicate a descriptor"))?,
            device: Mutex::new(device),
        })
    }

    /// How many reads are queued or submitted.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed) as u64
    }

    /// Readable when [`ReadQueue::advance`] would find a read that has ended.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Queues a read of a shard, which the caller has locked. It joins the read of the page before it, if that is not
    /// submitted yet.
    pub(crate) fn push(&self, shard: usize, to_read: &mut Vec<ReadRequest>, request: ReadRequest) {
        if to_read.last_mut().is_some_and(|last| last.join(&request)) {
            return;
        }
        to_read.push(request);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.with_reads.fetch_or(1 << shard, Ordering::Release);
    }

    /// Submits queued reads with one system call, and has `end` handle those that have ended. `take` gives the reads of a
    /// shard. Returns whether any has ended. Costs one load when nothing is under way.
    pub(crate) fn advance(
        &self,
        take: impl Fn(usize) -> Vec<ReadRequest>,
        end: impl Fn(Vec<ReadCompletion>),
    ) -> bool {
        let mut progress = false;
        // Relaxed: each thread that queues reads calls this afterwards, and reads its own count.
        while self.in_flight.load(Ordering::Relaxed) > 0 {
            // Another thread is submitting. It looks for queued reads again after it has released the device.
            let Some(mut device) = self.device.try_lock() else { break };
            let (mut requests, mut done) = (Vec::new(), Vec::new());
            let mut with_reads = self.with_reads.swap(0, Ordering::Acquire);
            while with_reads != 0 {
                requests.append(&mut take(with_reads.trailing_zeros() as usize));
                with_reads &= with_reads - 1;
            }
            for request in requests.extract_if(.., |request| request.is_memory) {
                let result = read_now(&request);
                done.push(ReadCompletion { request, result });
            }
            device.submit(&mut requests);
            device.reap(&mut done);
            drop(device);
            self.in_flight.fetch_sub(done.len(), Ordering::Relaxed);
            progress |= !done.is_empty();
            end(done);
            if self.with_reads.load(Ordering::Relaxed) == 0 {
                break;
            }
        }
        progress
    }
}
