//! The control queue pair of a program's queue pair: a reliable connection beside it, between the same devices, for the protocol's
//! messages.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_access::proto::{MESSAGE_BYTES_MAX, Message};
use terrace_nic::rc::{self, RNR_RETRIES};
use terrace_nic::{
    Buffer, Endpoint, Error, Path, Payload, Pd, Provided, QpCap, QueuePair, RecvWr, SendFlags, SendOp,
    SendWr, SgeList, Wc,
};

use crate::control_cqs::CqShare;

/// Receives that are posted. Both ends together have fewer messages under way, save for many descriptions at a time.
pub(crate) const RECEIVE_COUNT: u32 = 64;
/// Places of the send queue.
pub(crate) const SEND_COUNT: u32 = 256;
/// The most answers that wait for room in the send queue. A peer that takes its messages leaves far fewer, even if it has asked
/// for hundreds of descriptions at a time.
const UNSENT_ANSWERS_MAX: usize = 16 * RECEIVE_COUNT as usize;
/// `ibv_access_flags` of the receive buffers.
const LOCAL_WRITE: u32 = 1;

/// A message that waits.
struct Unsent {
    bytes: Arc<Vec<u8>>,
    is_answer: bool,
}

/// One end.
pub(crate) struct ControlQp {
    qp: Arc<QueuePair>,
    end: Endpoint,
    receives: Buffer,
    /// Released behind the queue pair.
    _cq: CqShare,
    is_connected: bool,
    /// Messages that wait for the connection, or for room in the send queue.
    unsent: VecDeque<Unsent>,
    /// How many of them answer the peer.
    unsent_answer_count: usize,
    /// Messages in the send queue.
    sent_count: u32,
}

impl ControlQp {
    /// Makes an end with posted receives, so that its [`Endpoint`] can be sent to the peer.
    pub fn new(pd: &Arc<Pd>, cq: CqShare) -> Result<ControlQp, Error> {
        let cap = QpCap {
            max_send_wr: SEND_COUNT,
            max_recv_wr: RECEIVE_COUNT,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let receives = Buffer::new(pd, RECEIVE_COUNT as usize * MESSAGE_BYTES_MAX, LOCAL_WRITE)?;
        let (qp, end) = rc::new_pair(pd, cq.cq(), cap)?;
        let unsent = VecDeque::new();
        let control = ControlQp {
            qp,
            end,
            receives,
            _cq: cq,
            is_connected: false,
            unsent,
            unsent_answer_count: 0,
            sent_count: 0,
        };
        rc::initialize(&control.qp, 0)?;
        (0..u64::from(RECEIVE_COUNT)).try_for_each(|index| control.post_receive(index))?;
        Ok(control)
    }

    /// The parameters for the peer.
    pub fn end(&self) -> Endpoint {
        self.end
    }

    /// The queue pair number.
    pub fn qpn(&self) -> u32 {
        self.end.qpn
    }

    /// Whether messages can be sent.
    pub fn is_connected(&self) -> bool {
        self.is_connected
    }

    /// Connects to the peer's end. The path MTU is the smaller of the two.
    pub fn connect(&mut self, remote: Path, peer: Endpoint) -> Result<(), Error> {
        // The peer's device posts receives again as soon as it runs, and otherwise sends no RNR NAK.
        rc::connect(&self.qp, self.end, remote, peer, RNR_RETRIES)?;
        self.is_connected = true;
        Ok(())
    }

    fn post_receive(&self, index: u64) -> Result<(), Error> {
        let sge = self.receives.sge(index as usize * MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX as u32);
        let wr = RecvWr { wr_id: index, sges: SgeList::from_slice(&[sge]) };
        self.qp.post_recv([Ok(wr)]).map_err(|(_, error)| error)
    }

    /// The bytes of a received message. Its receive is posted again.
    pub fn take_message(&self, wc: &Wc) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; (wc.byte_len as usize).min(MESSAGE_BYTES_MAX)];
        self.receives.read(wc.wr_id as usize * MESSAGE_BYTES_MAX, &mut bytes)?;
        self.post_receive(wc.wr_id)?;
        Ok(bytes)
    }

    /// Takes the completion of a message that was sent.
    pub fn note_sent(&mut self) {
        self.sent_count -= 1;
    }

    /// Queues a message; an answer, if the peer has asked for it.
    pub fn send(&mut self, message: &Message<'_>, is_answer: bool) {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        match message.encode(&mut bytes) {
            Ok(len) => {
                bytes.truncate(len);
                bytes.shrink_to_fit();
                self.send_encoded(bytes, is_answer);
            }
            // Callers build messages that fit.
            Err(error) => tracing::error!(%error, "a message cannot be sent"),
        }
    }

    /// Queues the bytes of a message.
    pub fn send_encoded(&mut self, bytes: Vec<u8>, is_answer: bool) {
        self.unsent.push_back(Unsent { bytes: Arc::new(bytes), is_answer });
        self.unsent_answer_count += usize::from(is_answer);
    }

    /// Posts queued messages, as far as there is room.
    ///
    /// # Errors
    /// If the queue pair takes none; `NoMemory` if the peer goes on asking, and does not take the answers.
    pub fn post(&mut self) -> Result<(), Error> {
        while self.is_connected && self.sent_count < SEND_COUNT {
            let Some(Unsent { bytes: source, is_answer }) = self.unsent.pop_front() else { break };
            self.unsent_answer_count -= usize::from(is_answer);
            let len = source.len() as u32;
            let payload = Payload::Provided(Box::new(Provided { source, offset: 0, len }));
            let wr = SendWr { wr_id: 0, op: SendOp::Send, payload, flags: SendFlags::SIGNALED, target: None };
            self.qp.post_send([Ok(wr)]).map_err(|(_, error)| error)?;
            self.sent_count += 1;
        }
        if self.unsent_answer_count > UNSENT_ANSWERS_MAX {
            return Err(Error::NoMemory("the peer takes no answers"));
        }
        Ok(())
    }
}

impl Drop for ControlQp {
    fn drop(&mut self) {
        // This fails only if the queue pair is destroyed already, which happens nowhere else.
        let _ = self.qp.destroy();
    }
}
