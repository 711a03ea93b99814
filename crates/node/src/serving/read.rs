//! Executes a `Read`: the pager fetches the requested pages, and each chunk is written into the client's memory as it
//! arrives.

use std::sync::Arc;

use terrace_access::proto::{Read, Status, immediate_of};
use terrace_memory::{AccessError, Waker};
use terrace_nic::{ByteSource, Payload, Provided, SendOp};

use super::Progress;
use super::fetch::{Chunk, Fetch, FetchedData};
use crate::control::Control;
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

    /// Sends the fetched data, and fetches more. The last WRITE contains the answer to the request `id`.
    pub fn advance(&mut self, control: &mut Control, id: u64, waker: &Waker) -> Progress {
        // Transfers of cached pages finish at once; then more can be fetched.
        loop {
            if self.send_fetched(control, id) {
                return Progress::Answered;
            }
            if !self.fetch.begin(&*self.export.exported.pager, waker) {
                break;
            }
        }
        match self.fetch.outcome() {
            None => Progress::Waiting,
            Some(outcome) => Progress::Done(outcome.map_or_else(status_of, |()| Status::Ok)),
        }
    }

    /// Sends fetched chunks. Returns whether the last WRITE contained the answer.
    fn send_fetched(&mut self, control: &mut Control, id: u64) -> bool {
        let mut fetched = self.fetch.take_fetched();
        let answer = immediate_of(id).filter(|_| self.fetch.outcome() == Some(Ok(())));
        let last = fetched.pop();
        for (chunk, data) in fetched {
            self.send(control, chunk, data, None);
        }
        let Some((chunk, data)) = last else { return false };
        self.send(control, chunk, data, answer);
        answer.is_some()
    }

    fn send(&self, control: &mut Control, chunk: Chunk, data: FetchedData, answer: Option<u32>) {
        let (va, rkey) = (self.dest_va.wrapping_add(chunk.offset), self.dest_rkey);
        let source = Arc::new(FetchedSource(data));
        let payload = Payload::Provided(Box::new(Provided { source, offset: 0, len: chunk.len as u32 }));
        let op = match answer {
            // Immediates are in network byte order.
            Some(immediate) => SendOp::WriteImm { va, rkey, imm: immediate.to_be() },
            None => SendOp::Write { va, rkey },
        };
        control.push(op, payload, None);
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
