//! One end of a control queue pair: the reliable connection between two NICs that carries the messages of `access`.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_access::proto::{Endpoint, MESSAGE_BYTES_MAX, Message};
use terrace_nic::rc::{RNR_RETRIES, TIMEOUT, connect, initialize, new_pair};
use terrace_nic::{
    Buffer, Cq, Error, Path, Payload, Pd, Provided, QpCap, QueuePair, RecvWr, SendFlags, SendOp, SendWr,
    SgeList, Wc,
};

/// The posted receives of each end, and so the most requests of a client in flight.
pub(crate) const RECEIVE_COUNT: u16 = 64;
/// The depth of the send queue. Further work requests wait in the backlog.
const SEND_COUNT: u32 = 1024;
/// The most work requests in the backlog. A client that drains its responses never has as many: it has 64 requests in
/// flight, and the bytes read for all clients of its address are limited.
const BACKLOG_MAX: usize = 2048;
/// `ibv_access_flags` of a receive buffer, and of the queue pair towards its peer.
const LOCAL_WRITE: u32 = 1;
const REMOTE_WRITE_AND_READ: u32 = 1 << 1 | 1 << 2;
/// The RNR retries of a server. A client has a receive for every answer, and its memory is present. With unlimited
/// retries, a client that sends RNR NAKs would make the server retain its answers.
const RNR_RETRIES_OF_SERVER: u8 = 6;
/// One in this many work requests is signaled, so that the backlog is posted when the send queue has space again.
const SIGNAL_EVERY: u32 = 64;
/// The `wr_id` of work requests whose completion is ignored.
const UNTRACKED: u64 = u64::MAX;

/// The place of a work request in the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlace {
    pub index: usize,
    /// The bytes of data of the batch up to its end.
    pub end_bytes: u64,
}

/// One end of a control queue pair.
pub struct Control {
    qp: Arc<QueuePair>,
    endpoint: Endpoint,
    receives: Buffer,
    /// Work requests that wait for space in the send queue.
    backlog: VecDeque<SendWr>,
    /// Work requests for the next [`Control::post`].
    batch: Vec<SendWr>,
    /// The bytes of data of the batch.
    batch_bytes: u64,
    /// The buffer in which messages are encoded.
    scratch: Vec<u8>,
    unsignaled: u32,
}

impl Control {
    /// Creates an end with posted receives, so that its [`Endpoint`] can be sent to the peer.
    pub fn new(pd: &Arc<Pd>, cq: &Arc<Cq>) -> Result<Control, Error> {
        let cap = QpCap {
            max_send_wr: SEND_COUNT,
            max_recv_wr: u32::from(RECEIVE_COUNT),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let receives = Buffer::new(pd, usize::from(RECEIVE_COUNT) * MESSAGE_BYTES_MAX, LOCAL_WRITE)?;
        let (qp, endpoint) = new_pair(pd, cq, cap)?;
        let (backlog, batch, scratch) = (VecDeque::new(), Vec::new(), vec![0; MESSAGE_BYTES_MAX]);
        let control =
            Control { qp, endpoint, receives, backlog, batch, batch_bytes: 0, scratch, unsignaled: 0 };
        if let Err(error) = control.post_receives() {
            control.close();
            return Err(error);
        }
        Ok(control)
    }

    /// Moves the queue pair to INIT, and posts its receives.
    fn post_receives(&self) -> Result<(), Error> {
        initialize(&self.qp, REMOTE_WRITE_AND_READ)?;
        (0..u64::from(RECEIVE_COUNT)).try_for_each(|index| self.post_receive(index))
    }

    /// Reposts the receive whose completion has this `wr_id`.
    pub fn post_receive(&self, index: u64) -> Result<(), Error> {
        let sge = self.receives.sge(index as usize * MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX as u32);
        let wr = RecvWr { wr_id: index, sges: SgeList::from_slice(&[sge]) };
        self.qp.post_recv([Ok(wr)]).map_err(|(_, error)| error)
    }

    /// The parameters for the peer.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The queue pair number.
    pub fn qpn(&self) -> u32 {
        self.qp.qpn()
    }

    /// Connects to a server's end. The path MTU is the smaller of the two.
    pub fn connect(&self, remote: Path, peer: Endpoint) -> Result<(), Error> {
        connect(&self.qp, self.endpoint, remote, peer, TIMEOUT, RNR_RETRIES)
    }

    /// Connects to a client's end.
    pub fn serve(&self, remote: Path, peer: Endpoint) -> Result<(), Error> {
        connect(&self.qp, self.endpoint, remote, peer, TIMEOUT, RNR_RETRIES_OF_SERVER)
    }

    /// Copies the bytes of a received message, and reposts its receive.
    pub fn take_message(&self, wc: &Wc, out: &mut Vec<u8>) -> Result<(), Error> {
        out.resize((wc.byte_len as usize).min(MESSAGE_BYTES_MAX), 0);
        self.receives.read(wc.wr_id as usize * MESSAGE_BYTES_MAX, out)?;
        self.post_receive(wc.wr_id)
    }

    /// Appends a message to the batch. Its completion is not reported.
    pub fn send(&mut self, message: &Message<'_>) {
        match message.encode(&mut self.scratch) {
            Ok(len) => self.send_encoded(self.scratch[..len].to_vec(), None),
            // Callers build messages that fit.
            Err(error) => tracing::error!(%error, "a control message cannot be sent"),
        }
    }

    /// Appends an encoded message of up to [`MESSAGE_BYTES_MAX`] to the batch; with a `wr_id` its completion is reported.
    pub fn send_encoded(&mut self, bytes: Vec<u8>, wr_id: Option<u64>) {
        let len = bytes.len() as u32;
        let payload = Payload::Provided(Box::new(Provided { source: Arc::new(bytes), offset: 0, len }));
        self.push(SendOp::Send, payload, wr_id);
    }

    /// Appends an operation to the batch, and returns its place there; with a `wr_id` its completion is reported.
    pub fn push(&mut self, op: SendOp, payload: Payload, wr_id: Option<u64>) -> BatchPlace {
        self.unsignaled = if wr_id.is_some() { 0 } else { (self.unsignaled + 1) % SIGNAL_EVERY };
        let flags = if self.unsignaled == 0 { SendFlags::SIGNALED } else { SendFlags::empty() };
        self.batch_bytes += payload.len();
        self.batch.push(SendWr { wr_id: wr_id.unwrap_or(UNTRACKED), op, payload, flags, target: None });
        BatchPlace { index: self.batch.len() - 1, end_bytes: self.batch_bytes }
    }

    /// Adds an immediate to a WRITE of the batch.
    pub fn add_immediate(&mut self, index: usize, immediate: u32) {
        let op = &mut self.batch[index].op;
        if let SendOp::Write { va, rkey } = *op {
            // Immediates are in network byte order.
            *op = SendOp::WriteImm { va, rkey, imm: immediate.to_be() };
        }
    }

    /// Sends a keepalive: a WRITE of no bytes, which the peer's NIC acknowledges. Without an ACK it completes in error.
    pub fn probe(&mut self) {
        let payload =
            Payload::Provided(Box::new(Provided { source: Arc::new(Vec::new()), offset: 0, len: 0 }));
        self.push(SendOp::Write { va: 0, rkey: 0 }, payload, None);
    }

    /// Posts the batch, as far as the send queue has space.
    ///
    /// # Errors
    /// If the queue pair refuses work requests.
    pub fn post(&mut self) -> Result<(), Error> {
        self.backlog.extend(self.batch.drain(..));
        self.batch_bytes = 0;
        if self.backlog.is_empty() {
            return Ok(());
        }
        // The owner holds its lock, which its progress callback takes.
        let device = self.qp.pd().device();
        let posted = device.postpone_callbacks(|| self.qp.post_send(self.backlog.iter().cloned().map(Ok)));
        match posted {
            Ok(()) => self.backlog.clear(),
            Err((count, Error::NoMemory(_))) => drop(self.backlog.drain(..count)),
            Err((_, error)) => return Err(error),
        }
        Ok(())
    }

    /// Whether work requests wait for space in the send queue.
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Whether the backlog exceeds its limit, because the peer does not drain its responses.
    pub fn is_backlog_full(&self) -> bool {
        self.backlog.len() > BACKLOG_MAX
    }

    /// Destroys the queue pair. Work requests in flight are lost.
    pub fn close(&self) {
        // This fails only if the queue pair is destroyed already, which happens nowhere else.
        let _ = self.qp.pd().device().postpone_callbacks(|| self.qp.destroy());
    }
}

/// Whether the completion is to be ignored.
pub fn is_untracked(wc: &Wc) -> bool {
    wc.wr_id == UNTRACKED
}
