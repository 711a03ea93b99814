//! Executes a `Read`: the pager fetches the requested pages, and each chunk is written into the client's memory as it
//! arrives.

use std::sync::Arc;

use terrace_access::proto::{Read, Status};
use terrace_memory::{AccessError, Waker};
use terrace_nic::{ByteSource, Payload, Provided, SendOp};

use super::Progress;
use super::fetch::{Chunk, Fetch, FetchedData};
use crate::control::{BatchPlace, Control};
use crate::credits::Credits;
use crate::exports::{Export, REMOTE_READ};

pub(super) struct ReadJob {
    export: Arc<Export>,
    fetch: Fetch,
    dest_va: u64,
    dest_rkey: u32,
}

impl ReadJob {
    /// Checks the request. Fetched data uses credits until the client has acknowledged it.
    pub fn new(export: Arc<Export>, read: &Read, credits: Arc<Credits>) -> Result<ReadJob, Status> {
        let len = u64::from(read.length);
        let range = export.begin_access(read.va, len, REMOTE_READ)?;
        let (page_count, lead) = (export.layout.page_count(read.va, len), export.layout.page_offset(read.va));
        let pages = match &read.pages {
            None => None,
            Some(pages) if pages.wanted.page_count() == page_count && usize::from(pages.offset) == lead => {
                Some(pages.wanted.clone())
            }
            // The client's region grid is stale.
            Some(_) => return Err(Status::Invalid),
        };
        let fetch = Fetch::new(range, pages, lead, credits);
        Ok(ReadJob { export, fetch, dest_va: read.dest_va, dest_rkey: read.dest_rkey })
    }

    /// Sends the fetched data, and fetches more.
    pub fn advance(&mut self, control: &mut Control, waker: &Waker) -> Progress {
        let mut last_write = None;
        // Transfers of cached pages finish at once; then more can be fetched.
        loop {
            for (chunk, data) in self.fetch.take_fetched() {
                last_write = Some(self.send(control, chunk, data));
            }
            if !self.fetch.begin(&*self.export.exported.pager, waker) {
                break;
            }
        }
        match (self.fetch.outcome(), last_write) {
            (None, _) => Progress::Waiting,
            (Some(Ok(())), Some(write)) => Progress::Written(write),
            (Some(outcome), _) => Progress::Done(outcome.map_or_else(status_of, |()| Status::Ok)),
        }
    }

    /// Appends a WRITE of a chunk to the batch, and returns its place there.
    fn send(&self, control: &mut Control, chunk: Chunk, data: FetchedData) -> BatchPlace {
        let (va, rkey) = (self.dest_va.wrapping_add(chunk.offset), self.dest_rkey);
        let source = Arc::new(FetchedSource(data));
        let payload = Payload::Provided(Box::new(Provided { source, offset: 0, len: chunk.len as u32 }));
        control.push(SendOp::Write { va, rkey }, payload, None)
    }
}

/// A transfer's data as a send payload, which is copied from the pager's buffer into packets. The buffer is in use until
/// the client has acknowledged all of the data.
#[derive(Debug)]
struct FetchedSource(FetchedData);

impl ByteSource for FetchedSource {
    fn copy(&self, offset: u64, out: &mut [u8]) -> bool {
        self.0.transfer.read(offset, out).is_ok()
    }
}

/// The status for the client.
pub(super) fn status_of(error: AccessError) -> Status {
    match error {
        AccessError::OutOfRange => Status::OutOfRange,
        AccessError::NoSpace => Status::NoSpace,
        _ => Status::DeviceError,
    }
}
