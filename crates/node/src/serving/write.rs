//! Carries out a `Write`: the data is in the message, or is READ from the client's memory piece by piece, and goes to
//! the pager.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_access::proto::{Source, Status, Write};
use terrace_hostmem::HostRange;
use terrace_memory::{AccessError, Transfer, Waker};
use terrace_nic::{Buffer, Payload, Pd, SendOp, SgeList};

use super::fetch::PIECE_BYTES_MAX;
use super::read::status_of;
use super::{JobId, Progress};
use crate::control::Control;
use crate::exports::{Export, REMOTE_WRITE};
use crate::room::{Room, Share};

/// `ibv_access_flags` of the buffer that data is fetched into.
const LOCAL_WRITE: u32 = 1;

pub(super) struct WriteJob {
    export: Arc<Export>,
    /// The rest of the range that the pager has not got yet.
    range: HostRange,
    /// The data of the front of the range.
    data: Vec<u8>,
    fetch: Option<Fetch>,
    in_flight: VecDeque<Arc<dyn Transfer>>,
    failed: Option<Status>,
    room: Arc<Room>,
    /// Credits for the data.
    share: Option<Share>,
}

/// Data in the client's memory.
struct Fetch {
    va: u64,
    rkey: u32,
    buffer: Option<Buffer>,
    /// Bytes of the READ in flight.
    awaited: u64,
    arrived: bool,
}

impl WriteJob {
    /// Checks the request. Its data takes credits; data in the message cannot wait for them.
    pub fn new(export: Arc<Export>, write: &Write<'_>, room: Arc<Room>) -> Result<WriteJob, Status> {
        let range = export.begin_access(write.va, write.length.into(), REMOTE_WRITE)?;
        let (data, fetch, share) = match write.source {
            Source::Inline(data) => {
                let share = room.take_now(data.len() as u64).ok_or(Status::Busy)?;
                (data.to_vec(), None, Some(share))
            }
            Source::Remote { va, rkey } => {
                (Vec::new(), Some(Fetch { va, rkey, buffer: None, awaited: 0, arrived: false }), None)
            }
        };
        Ok(WriteJob { export, range, data, fetch, in_flight: VecDeque::new(), failed: None, room, share })
    }

    /// The data of the READ has arrived in the buffer.
    pub fn note_fetched(&mut self) {
        if let Some(fetch) = &mut self.fetch {
            fetch.arrived = true;
        }
    }

    /// Passes arrived data to the pager, and fetches more.
    pub fn advance(&mut self, control: &mut Control, waker: &Waker, number: JobId, pd: &Arc<Pd>) -> Progress {
        self.collect_fetched();
        self.hand_over(waker);
        if self.failed.is_none() && self.data.is_empty() && self.range.len > 0 {
            self.fetch(control, waker, number, pd);
        }
        let failed = &mut self.failed;
        self.in_flight.retain(|transfer| match transfer.outcome() {
            None => true,
            Some(Ok(())) => false,
            Some(Err(error)) => {
                *failed = Some(status_of(error));
                false
            }
        });
        let fetching = self.fetch.as_ref().is_some_and(|fetch| fetch.awaited > 0);
        let over = self.range.len == 0 || self.failed.is_some();
        match over && self.in_flight.is_empty() && !fetching {
            true => Progress::Done(self.failed.unwrap_or(Status::Ok)),
            false => Progress::Waiting,
        }
    }

    fn collect_fetched(&mut self) {
        let Some(fetch) = &mut self.fetch else { return };
        if !std::mem::take(&mut fetch.arrived) {
            return;
        }
        self.data.resize(std::mem::take(&mut fetch.awaited) as usize, 0);
        let read = fetch.buffer.as_ref().map(|buffer| buffer.read(0, &mut self.data));
        if !matches!(read, Some(Ok(()))) {
            self.failed = Some(Status::DeviceError);
        }
    }

    fn hand_over(&mut self, waker: &Waker) {
        while self.failed.is_none() && !self.data.is_empty() {
            let len = self.data.len().min(PIECE_BYTES_MAX as usize);
            match self.export.exported.pager.write(self.range.addr, &self.data[..len], waker) {
                Ok(transfer) => self.in_flight.push_back(transfer),
                Err(AccessError::NotReady) => return,
                Err(error) => self.failed = Some(status_of(error)),
            }
            self.data.drain(..len);
            self.range.addr += len as u64;
            self.range.len -= len as u64;
        }
    }

    /// READs the next piece from the client's memory, one at a time, once there are credits for the pieces.
    fn fetch(&mut self, control: &mut Control, waker: &Waker, number: JobId, pd: &Arc<Pd>) {
        let Some(fetch) = &mut self.fetch else { return };
        if fetch.awaited > 0 {
            return;
        }
        let len = self.range.len.min(PIECE_BYTES_MAX);
        if self.share.is_none() {
            // Once for the READ's buffer, once for the copy that waits for the pager.
            self.share = self.room.take(2 * len, waker);
        }
        if self.share.is_none() {
            return;
        }
        if fetch.buffer.is_none() {
            fetch.buffer = Buffer::new(pd, len as usize, LOCAL_WRITE).ok();
        }
        let Some(buffer) = &fetch.buffer else {
            self.failed = Some(Status::Busy);
            return;
        };
        let payload = Payload::Sges(SgeList::from_slice(&[buffer.sge(0, len as u32)]));
        control.push(SendOp::Read { va: fetch.va, rkey: fetch.rkey }, payload, Some(number));
        fetch.va = fetch.va.wrapping_add(len);
        fetch.awaited = len;
    }
}
