//! Reads that bring pages into the page cache: queued by shards, submitted and reaped by the threads that make progress.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use terrace_hostmem::PAGE_BYTES;
use terrace_memory::AccessError;

use super::engine::{Engine, Work};
use super::region::Region;
use super::shard::Shard;
use crate::stats::add;
use crate::store::{FrameRun, RUN_FRAMES_MAX, ReadCompletion, ReadRequest, read_now};

/// For how long a read is submitted again that the device has returned undone.
const RETRY_PATIENCE: Duration = Duration::from_secs(5);

impl Engine {
    /// Queues the read of a page; joins it to the read of the page before it, if that is not submitted yet.
    pub(super) fn queue_read(&self, shard: &mut Shard, region: &Region, page: u64, slot: u32) {
        if let Some(last) = shard.to_read.last_mut()
            && last.key.slot == region.slot
            && last.key.page + last.run.frames.len() as u64 == page
            && last.run.frames.len() < RUN_FRAMES_MAX
        {
            return last.run.frames.push(slot);
        }
        let request = ReadRequest {
            key: region.key(page),
            file: region.file.clone(),
            offset: region.offset_of(page),
            run: FrameRun::new(self.sink.clone(), [slot]),
            is_memory: region.is_memory,
            undone_since: None,
        };
        self.queue_request(shard, request);
    }

    fn queue_request(&self, shard: &mut Shard, request: ReadRequest) {
        let bit = 1 << self.shard_index(request.key);
        shard.to_read.push(request);
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.with_reads.fetch_or(bit, Ordering::Release);
    }

    /// Submits queued reads with one system call, and handles those that have ended.
    pub(super) fn advance(&self) -> bool {
        let mut progress = false;
        // Relaxed: each thread that queues reads calls this afterwards, and reads its own count.
        while self.in_flight.load(Ordering::Relaxed) > 0 {
            // Another thread is submitting. It looks for queued reads again after it has released the device.
            let Some(mut device) = self.reads.try_lock() else { break };
            let (mut requests, mut done) = (self.take_reads(), Vec::new());
            for request in requests.extract_if(.., |request| request.is_memory) {
                let result = read_now(&request);
                done.push(ReadCompletion { request, result });
            }
            device.submit(&mut requests);
            device.reap(&mut done);
            drop(device);
            self.in_flight.fetch_sub(done.len(), Ordering::Relaxed);
            progress |= !done.is_empty();
            let mut work = Work::default();
            for completion in done {
                self.end_read(completion, &mut work);
            }
            self.settle(work);
            if self.with_reads.load(Ordering::Relaxed) == 0 {
                break;
            }
        }
        progress
    }

    fn take_reads(&self) -> Vec<ReadRequest> {
        let (mut with_reads, mut requests) = (self.with_reads.swap(0, Ordering::Acquire), Vec::new());
        while with_reads != 0 {
            requests.append(&mut self.shards[with_reads.trailing_zeros() as usize].lock().to_read);
            with_reads &= with_reads - 1;
        }
        requests
    }

    /// Handles a read that has ended: all of it, a part of it, or none.
    fn end_read(&self, ReadCompletion { mut request, result }: ReadCompletion, work: &mut Work) {
        let mut shard = self.lock(request.key);
        let region = self.region(request.key);
        // A page is in the page cache as a whole if one byte of it was read. The file may end within its last page.
        let done = (result.unwrap_or(0) as u64).div_ceil(PAGE_BYTES) as usize;
        for index in 0..done as u64 {
            self.end_fill(&mut shard, region.key(request.key.page + index), Ok(()), work);
        }
        add(&region.counters.pages_read, done as u64);
        if done == request.run.frames.len() {
            return;
        }
        // What is left is read again, or fails.
        request.key.page += done as u64;
        request.offset += done as u64 * PAGE_BYTES;
        request.run.frames.drain(..done);
        if done > 0 {
            request.undone_since = None;
        }
        let Err(error) = retry(&region, &mut request, result) else {
            return self.queue_request(&mut shard, request);
        };
        for index in 0..request.run.frames.len() as u64 {
            self.end_fill(&mut shard, region.key(request.key.page + index), Err(error), work);
        }
    }
}

/// Whether a read that was not carried out, or only in part, is submitted again.
///
/// # Errors
/// That of its pages, if it is not.
fn retry(
    region: &Region,
    request: &mut ReadRequest,
    result: Result<usize, Errno>,
) -> Result<(), AccessError> {
    if result.is_ok() && !region.has_page(request.key.page) {
        if region.may_complain() {
            tracing::warn!(offset = request.offset, "a region's file has become too short");
        }
        return Err(AccessError::Fault);
    }
    // io_uring returns these when the submitting thread exits or no io-wq worker is available: not an error of the
    // file. A short read may be one that a signal has ended.
    let is_undone = matches!(result, Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::CANCELED));
    if is_undone && request.undone_since.get_or_insert_with(Instant::now).elapsed() < RETRY_PATIENCE {
        return Ok(());
    }
    if region.may_complain() {
        tracing::warn!(?result, offset = request.offset, "a read of a region's file failed");
    }
    Err(AccessError::Device)
}
