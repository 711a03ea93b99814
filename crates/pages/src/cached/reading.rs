//! Reads that bring pages into the page cache, from the miss to the end of the fill.

use std::time::Duration;

use rustix::io::Errno;
use terrace_hostmem::PAGE_BYTES;
use terrace_memory::AccessError;

use super::engine::{Engine, Work};
use super::region::Region;
use super::shard::Shard;
use crate::stats::add;
use crate::store::{FrameRun, ReadCompletion, ReadRequest};

/// The interval at which a thread that waits looks for reads that have ended.
const WAITING_PERIOD: Duration = Duration::from_micros(200);

impl Engine {
    /// Queues the read of a page.
    pub(super) fn queue_read(&self, shard: &mut Shard, region: &Region, page: u64, slot: u32) {
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
        self.reads.push(self.shard_index(request.key), &mut shard.to_read, request);
    }

    /// Submits queued reads with one system call, and handles those that have ended.
    pub(super) fn advance(&self) -> bool {
        self.reads.advance(
            |shard| std::mem::take(&mut self.shards[shard].lock().to_read),
            |done| {
                let mut work = Work::default();
                done.into_iter().for_each(|completion| self.end_read(completion, &mut work));
                self.settle(work);
            },
        )
    }

    /// Handles reads that have ended, as long as what a thread waits for is under way.
    pub(super) fn advance_while(&self, is_under_way: impl Fn() -> bool) {
        while is_under_way() {
            if !self.advance() {
                std::thread::sleep(WAITING_PERIOD);
            }
        }
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
        request.skip(done);
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
    // `EFAULT` is no error of the file: the kernel had no page for the sink at that moment. Seen once, on a loaded machine.
    let of_file = result.or_else(|error| if error == Errno::FAULT { Ok(0) } else { Err(error) });
    if request.is_retried(of_file) {
        return Ok(());
    }
    if region.may_complain() {
        tracing::warn!(?result, offset = request.offset, "a read of a region's file failed");
    }
    Err(AccessError::Device)
}
