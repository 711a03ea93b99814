//! Carries out a `Read`: the pager fetches the requested pages, and each piece is written into the client's memory as
//! it arrives.

use std::sync::Arc;

use terrace_access::proto::{Read, Status, immediate_of};
use terrace_memory::{AccessError, Waker};
use terrace_nic::{ByteSource, Payload, Provided, SendOp};

use super::Progress;
use super::fetch::{Brought, Fetch, Piece};
use crate::control::Control;
use crate::exports::{Export, REMOTE_READ};
use crate::room::Room;

pub(super) struct ReadJob {
    export: Arc<Export>,
    fetch: Fetch,
    dest_va: u64,
    dest_rkey: u32,
}

impl ReadJob {
    /// Checks the request. Fetched data holds credits until the client has it.
    pub fn new(export: Arc<Export>, read: &Read, room: Arc<Room>) -> Result<ReadJob, Status> {
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
        let fetch = Fetch::new(range, pages, lead, room);
        Ok(ReadJob { export, fetch, dest_va: read.dest_va, dest_rkey: read.dest_rkey })
    }

    /// Sends the fetched data, and fetches more. The answer to the request `id` goes with the last of it.
    pub fn advance(&mut self, control: &mut Control, id: u64, waker: &Waker) -> Progress {
        // Cached pages are there at once, however many they are: then there are credits for more.
        loop {
            if self.send_fetched(control, id) {
                return Progress::Told;
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

    /// Returns whether that was all, and an immediate has told the client so.
    fn send_fetched(&mut self, control: &mut Control, id: u64) -> bool {
        let mut fetched = self.fetch.take();
        let answer = immediate_of(id).filter(|_| self.fetch.outcome() == Some(Ok(())));
        let last = fetched.pop();
        for (piece, brought) in fetched {
            self.send(control, piece, brought, None);
        }
        let Some((piece, brought)) = last else { return false };
        self.send(control, piece, brought, answer);
        answer.is_some()
    }

    fn send(&self, control: &mut Control, piece: Piece, brought: Brought, answer: Option<u32>) {
        let (va, rkey) = (self.dest_va.wrapping_add(piece.offset), self.dest_rkey);
        let source = Arc::new(Leaving(brought));
        let payload = Payload::Provided(Box::new(Provided { source, offset: 0, len: piece.len as u32 }));
        let op = match answer {
            // Immediates are in network byte order.
            Some(immediate) => SendOp::WriteImm { va, rkey, imm: immediate.to_be() },
            None => SendOp::Write { va, rkey },
        };
        control.push(op, payload, None);
    }
}

/// A transfer's data as a send payload: straight from the pager's buffer into the packet. The buffer is in use until
/// the client has acknowledged all of it.
#[derive(Debug)]
struct Leaving(Brought);

impl ByteSource for Leaving {
    fn copy(&self, offset: u64, out: &mut [u8]) -> bool {
        self.0.transfer.read(offset, out).is_ok()
    }
}

/// The status that the client gets.
pub(super) fn status_of(error: AccessError) -> Status {
    match error {
        AccessError::OutOfRange => Status::OutOfRange,
        AccessError::NoSpace => Status::NoSpace,
        _ => Status::DeviceError,
    }
}
