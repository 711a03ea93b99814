//! Executes a `Write`: the data is in the message, or is READ from the client's memory in chunks. The pager writes it.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_access::proto::{Source, Status, Write};
use terrace_hostmem::HostRange;
use terrace_memory::{AccessError, Transfer, Waker};
use terrace_nic::{Buffer, Payload, Pd, SendOp, SgeList};

use super::fetch::CHUNK_BYTES_MAX;
use super::read::status_of;
use super::{JobId, Progress};
use crate::control::Control;
use crate::credits::{Credits, Reservation};
use crate::exports::{Export, REMOTE_WRITE};

/// `ibv_access_flags` of the buffer that data is fetched into.
const LOCAL_WRITE: u32 = 1;

pub(super) struct WriteJob {
    export: Arc<Export>,
    /// The rest of the range that has not been passed to the pager.
    range: HostRange,
    /// The data for the front of the range.
    data: Vec<u8>,
    /// The data in the client's memory; `None` for data in the message.
    source: Option<ClientSource>,
    in_flight: VecDeque<Arc<dyn Transfer>>,
    failed: Option<Status>,
    credits: Arc<Credits>,
    /// Credits for the data.
    reservation: Option<Reservation>,
}

/// Data in the client's memory.
struct ClientSource {
    va: u64,
    rkey: u32,
    buffer: Option<Buffer>,
    /// The bytes of the READ in flight.
    awaited: u64,
    arrived: bool,
}

impl WriteJob {
    /// Checks the request. Its data uses credits. Without credits, a request with data in the message is refused.
    pub fn new(export: Arc<Export>, write: &Write<'_>, credits: Arc<Credits>) -> Result<WriteJob, Status> {
        let range = export.begin_access(write.va, write.length.into(), REMOTE_WRITE)?;
        let (data, source, reservation) = match write.source {
            Source::Inline(data) => {
                let reservation = credits.try_reserve(data.len() as u64).ok_or(Status::Busy)?;
                (data.to_vec(), None, Some(reservation))
            }
            Source::Remote { va, rkey } => {
                (Vec::new(), Some(ClientSource { va, rkey, buffer: None, awaited: 0, arrived: false }), None)
            }
        };
        Ok(WriteJob {
            export,
            range,
            data,
            source,
            in_flight: VecDeque::new(),
            failed: None,
            credits,
            reservation,
        })
    }

    /// Marks the data of the READ as arrived in the buffer.
    pub fn mark_arrived(&mut self) {
        if let Some(source) = &mut self.source {
            source.arrived = true;
        }
    }

    /// Passes arrived data to the pager, and fetches more.
    pub fn advance(&mut self, control: &mut Control, waker: &Waker, number: JobId, pd: &Arc<Pd>) -> Progress {
        self.collect_arrived();
        self.write_to_pager(waker);
        if self.failed.is_none() && self.data.is_empty() && self.range.len > 0 {
            self.read_from_client(control, waker, number, pd);
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
        let fetching = self.source.as_ref().is_some_and(|source| source.awaited > 0);
        let is_finished = self.range.len == 0 || self.failed.is_some();
        match is_finished && self.in_flight.is_empty() && !fetching {
            true => Progress::Done(self.failed.unwrap_or(Status::Ok)),
            false => Progress::Waiting,
        }
    }

    fn collect_arrived(&mut self) {
        let Some(source) = &mut self.source else { return };
        if !std::mem::take(&mut source.arrived) {
            return;
        }
        self.data.resize(std::mem::take(&mut source.awaited) as usize, 0);
        let read = source.buffer.as_ref().map(|buffer| buffer.read(0, &mut self.data));
        if !matches!(read, Some(Ok(()))) {
            self.failed = Some(Status::DeviceError);
        }
    }

    /// Passes the data to the pager, as far as it accepts writes.
    fn write_to_pager(&mut self, waker: &Waker) {
        while self.failed.is_none() && !self.data.is_empty() {
            let len = self.data.len().min(CHUNK_BYTES_MAX as usize);
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

    /// READs the next chunk from the client's memory if none is in flight and the credits suffice.
    fn read_from_client(&mut self, control: &mut Control, waker: &Waker, number: JobId, pd: &Arc<Pd>) {
        let Some(source) = &mut self.source else { return };
        if source.awaited > 0 {
            return;
        }
        let len = self.range.len.min(CHUNK_BYTES_MAX);
        if self.reservation.is_none() {
            // The READ's buffer and the copy that waits for the pager each use the length of a chunk.
            self.reservation = self.credits.reserve(2 * len, waker);
        }
        if self.reservation.is_none() {
            return;
        }
        if source.buffer.is_none() {
            source.buffer = Buffer::new(pd, len as usize, LOCAL_WRITE).ok();
        }
        let Some(buffer) = &source.buffer else {
            self.failed = Some(Status::Busy);
            return;
        };
        let payload = Payload::Sges(SgeList::from_slice(&[buffer.sge(0, len as u32)]));
        control.push(SendOp::Read { va: source.va, rkey: source.rkey }, payload, Some(number));
        source.va = source.va.wrapping_add(len);
        source.awaited = len;
    }
}
