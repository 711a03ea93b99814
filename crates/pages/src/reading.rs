//! Reads into frames, from the miss to the end of the fill.

use std::sync::Arc;

use rustix::io::Errno;
use terrace_hostmem::PAGE_BYTES;
use terrace_memory::AccessError;

use crate::engine::{Engine, Work};
use crate::region::Region;
use crate::shard::Shard;
use crate::stats::add;
use crate::store::{FrameRun, ReadCompletion, ReadRequest};

impl Engine {
    /// Queues the read of a page.
    pub(crate) fn queue_read(&self, shard: &mut Shard, region: &Region, page: u64, frame: u32) {
        let request = ReadRequest {
            key: region.key(page),
            file: region.files.best().clone(),
            offset: region.file_offset(page),
            run: FrameRun::new(self.pool.clone(), [frame]),
            is_memory: region.files.is_memory,
            undone_since: None,
        };
        self.queue_request(shard, request);
    }

    fn queue_request(&self, shard: &mut Shard, request: ReadRequest) {
        self.reads.push(self.shard_index(request.key), &mut shard.to_read, request);
    }

    /// Submits queued reads with one system call, and handles those that have ended. Returns whether any has. Costs one
    /// load when nothing is under way.
    pub(crate) fn advance(&self) -> bool {
        self.reads.advance(
            |shard| std::mem::take(&mut self.shards()[shard].lock().to_read),
            |done| {
                let mut work = Work::default();
                done.into_iter().for_each(|completion| self.end_read(completion, &mut work));
                self.settle(work);
            },
        )
    }

    /// Handles a read that has ended: all of it, a part of it, or none.
    fn end_read(&self, ReadCompletion { mut request, result }: ReadCompletion, work: &mut Work) {
        let mut shard = self.lock(request.key);
        let region = shard.region(request.key);
        let page_bytes = PAGE_BYTES as usize;
        let done = match result {
            Ok(count) => count / page_bytes,
            Err(_) => 0,
        };
        for index in 0..done as u64 {
            self.end_fill(&mut shard, region.key(request.key.page + index), Ok(()), work);
        }
        add(&region.counters.pages_read, done as u64);
        if done == request.run.frames.len() {
            return;
        }
        // What is left is read again, or fails.
        request.skip(done);
        let Err(error) = self.retry(&region, &mut request, result) else {
            return self.queue_request(&mut shard, request);
        };
        for index in 0..request.run.frames.len() as u64 {
            self.end_fill(&mut shard, region.key(request.key.page + index), Err(error), work);
        }
    }

    /// Whether a read that was not carried out, or only in part, is submitted again.
    ///
    /// # Errors
    /// That of its pages, if it is not.
    fn retry(
        &self,
        region: &Region,
        request: &mut ReadRequest,
        result: Result<usize, Errno>,
    ) -> Result<(), AccessError> {
        let first_end = request.offset + PAGE_BYTES;
        if result.is_ok() && !region.files.reaches(first_end) {
            return Err(region.too_short(request.offset));
        }
        if let Err(error) = result
            && region.files.give_up_direct(error)
        {
            request.file = region.files.best().clone();
            return Ok(());
        }
        if request.is_retried(result) {
            return Ok(());
        }
        // Reads that were submitted before another one's error showed that direct access does not work.
        if result == Err(Errno::INVAL) && !Arc::ptr_eq(&request.file, region.files.best()) {
            request.file = region.files.best().clone();
            return Ok(());
        }
        if region.may_complain() {
            tracing::warn!(?result, offset = request.offset, path = ?region.files.path, "a read of a region's file failed");
        }
        Err(AccessError::Device)
    }
}
