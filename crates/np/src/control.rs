//! The control queue pair of a program's queue pair: a reliable connection beside it, between the same devices, for the protocol's
//! messages, and for the bytes that an end moves for the other. It has a protection domain of its own, in which nothing but
//! the memory that is lent permits accesses of the peer.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_access::optimistic::Lent;
use terrace_access::proto::{MESSAGE_BYTES_MAX, Message};
use terrace_nic::rc;
use terrace_nic::{
    Buffer, Device, Endpoint, Error, Path, Payload, Pd, Provided, QpCap, QueuePair, RecvWr, SendFlags,
    SendOp, SendWr, SgeList, Wc, WcOpcode,
};

use crate::control_cqs::CqShare;
use crate::ending::in_background;
use crate::settings::{CALL_BYTES_MAX, CALL_COUNT_MAX};

/// Receives that are posted. Both ends together have fewer messages under way, save for many descriptions at a time.
pub(crate) const RECEIVE_COUNT: u32 = 64;
/// Places of the send queue.
pub(crate) const SEND_COUNT: u32 = 256;
/// The most answers that wait for room in the send queue. A peer that takes its messages leaves far fewer, even if it has asked
/// for hundreds of descriptions at a time.
const UNSENT_ANSWERS_MAX: usize = 16 * RECEIVE_COUNT as usize;
/// `ibv_access_flags` of the receive buffers, and of what the peer reads and writes.
const LOCAL_WRITE: u32 = 1;
const BY_PEER: u32 = 1 << 1 | 1 << 2;

/// A message or a transfer that waits.
struct Unsent {
    wr: SendWr,
    /// Whether the peer has asked for it.
    is_answer: bool,
}

/// The protection domain of one end. Dropped behind everything in it.
struct OwnPd(Arc<Pd>);

impl Drop for OwnPd {
    fn drop(&mut self) {
        if let Err(error) = self.0.dealloc() {
            tracing::error!(%error, "the protection domain of a control queue pair cannot be deallocated");
        }
    }
}

/// Memory for the bytes of calls, a slot for each. The ids of calls that are under way at a time differ by less than there are
/// slots.
struct Slots(Buffer);

impl Slots {
    fn new(pd: &Arc<Pd>, access: u32) -> Result<Slots, Error> {
        Buffer::new(pd, CALL_COUNT_MAX as usize * CALL_BYTES_MAX as usize, access).map(Slots)
    }

    fn offset(id: u64) -> usize {
        (id % u64::from(CALL_COUNT_MAX)) as usize * CALL_BYTES_MAX as usize
    }
}

/// One end.
pub(crate) struct ControlQp {
    qp: Arc<QueuePair>,
    end: Endpoint,
    receives: Buffer,
    /// What is lent to the peer, if it may move bytes.
    lent: Option<Slots>,
    /// What this end has READ from the peer.
    fetched: Slots,
    /// Released behind the queue pair.
    _cq: CqShare,
    _pd: OwnPd,
    /// The peer's end, once it is connected with that.
    peer: Option<Endpoint>,
    /// Messages that wait for the connection, or for room in the send queue.
    unsent: VecDeque<Unsent>,
    /// How many of them answer the peer.
    unsent_answer_count: usize,
    /// Messages and transfers in the send queue.
    sent_count: u32,
}

impl ControlQp {
    /// Makes an end with posted receives, so that its [`Endpoint`] can be sent to the peer. If `is_lending`, it has memory that
    /// the peer may READ and WRITE.
    pub fn new(device: &Arc<Device>, cq: CqShare, is_lending: bool) -> Result<ControlQp, Error> {
        let own_pd = OwnPd(device.alloc_pd()?);
        let pd = &own_pd.0;
        let cap = QpCap {
            max_send_wr: SEND_COUNT,
            max_recv_wr: RECEIVE_COUNT,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let receives = Buffer::new(pd, RECEIVE_COUNT as usize * MESSAGE_BYTES_MAX, LOCAL_WRITE)?;
        let lent = is_lending.then(|| Slots::new(pd, LOCAL_WRITE | BY_PEER)).transpose()?;
        let fetched = Slots::new(pd, LOCAL_WRITE)?;
        let (qp, end) = rc::new_pair(pd, cq.cq(), cap)?;
        let unsent = VecDeque::new();
        let control = ControlQp {
            qp,
            end,
            receives,
            lent,
            fetched,
            _cq: cq,
            _pd: own_pd,
            peer: None,
            unsent,
            unsent_answer_count: 0,
            sent_count: 0,
        };
        rc::initialize(&control.qp, if is_lending { BY_PEER } else { 0 })?;
        (0..u64::from(RECEIVE_COUNT)).try_for_each(|index| control.post_receive(index))?;
        Ok(control)
    }

    /// Destroys the queue pair at once, and releases its memory without a wait of the caller: a same-host peer that is stopped
    /// in the middle of a copy from or to what it was lent is waited for by a thread, for as long as a registration's end waits.
    pub fn retire(self) {
        let _ = self.qp.destroy();
        if self.lent.is_some() {
            // Where no thread can be started, this drops it here.
            let _ = in_background(move || drop(self));
        }
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
        self.peer.is_some()
    }

    /// The peer's end, if it is connected.
    pub fn peer(&self) -> Option<Endpoint> {
        self.peer
    }

    /// Connects to the peer's end. The path MTU is the smaller of the two. The peer is given up after seven retries with this
    /// `timeout` of `ibv_qp_attr`.
    pub fn connect(&mut self, remote: Path, peer: Endpoint, timeout: u8) -> Result<(), Error> {
        // The peer's device posts receives again as soon as it runs, and otherwise sends no RNR NAK.
        rc::connect(&self.qp, self.end, remote, peer, timeout, rc::RNR_RETRIES)?;
        self.peer = Some(peer);
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

    /// Takes the completion of a message that was sent, or of a transfer. True for the latter.
    pub fn note_sent(&mut self, wc: &Wc) -> bool {
        self.sent_count -= 1;
        wc.opcode != WcOpcode::Send
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
        self.queue(signaled(0, SendOp::Send, bytes), is_answer);
    }

    /// Queues a WRITE to what the peer has lent, in front of later messages. The completion has this id.
    pub fn store(&mut self, id: u64, (rkey, va): (u32, u64), data: Vec<u8>) {
        self.queue(signaled(id, SendOp::Write { va, rkey }, data), true);
    }

    /// Queues a READ of what the peer has lent, for [`ControlQp::take_fetched`] after its completion, which has this id.
    pub fn fetch(&mut self, id: u64, (rkey, va): (u32, u64), length: u32) {
        let sge = self.fetched.0.sge(Slots::offset(id), length);
        self.queue(SendWr::with_sge(id, SendOp::Read { va, rkey }, sge, SendFlags::SIGNALED), true);
    }

    /// The bytes that were READ.
    ///
    /// # Errors
    /// Those of the buffer.
    pub fn take_fetched(&self, id: u64, length: u32) -> Result<Vec<u8>, Error> {
        let mut data = vec![0; length as usize];
        self.fetched.0.read(Slots::offset(id), &mut data)?;
        Ok(data)
    }

    /// Lends the peer memory for a call, with these bytes.
    ///
    /// # Errors
    /// EINVAL if this end lends nothing, or the bytes are too many.
    pub fn lend(&self, id: u64, bytes: &[u8]) -> Result<Lent, Error> {
        let Slots(buffer) = self.lent.as_ref().ok_or(Error::Invalid("no memory is lent"))?;
        let offset = Slots::offset(id);
        if !bytes.is_empty() {
            buffer.write(offset, bytes)?;
        }
        Ok(Lent { va: buffer.addr() + offset as u64, rkey: buffer.mr().rkey() })
    }

    /// Copies what the peer has written for a call.
    ///
    /// # Errors
    /// As for [`ControlQp::lend`].
    pub fn take_lent(&self, id: u64, out: &mut [u8]) -> Result<(), Error> {
        let Slots(buffer) = self.lent.as_ref().ok_or(Error::Invalid("no memory is lent"))?;
        buffer.read(Slots::offset(id), out)
    }

    /// Queues a message, or a transfer for the peer.
    fn queue(&mut self, wr: SendWr, is_answer: bool) {
        self.unsent.push_back(Unsent { wr, is_answer });
        self.unsent_answer_count += usize::from(is_answer);
    }

    /// Posts what is queued, as far as there is room.
    ///
    /// # Errors
    /// If the queue pair takes none; `NoMemory` if the peer goes on asking, and does not take the answers.
    pub fn post(&mut self) -> Result<(), Error> {
        while self.is_connected() && self.sent_count < SEND_COUNT {
            let Some(Unsent { wr, is_answer }) = self.unsent.pop_front() else { break };
            self.unsent_answer_count -= usize::from(is_answer);
            self.qp.post_send([Ok(wr)]).map_err(|(_, error)| error)?;
            self.sent_count += 1;
        }
        if self.unsent_answer_count > UNSENT_ANSWERS_MAX {
            return Err(Error::NoMemory("the peer takes no answers"));
        }
        Ok(())
    }
}

/// A work request that sends these bytes.
fn signaled(wr_id: u64, op: SendOp, bytes: Vec<u8>) -> SendWr {
    let len = bytes.len() as u32;
    let payload = Payload::Provided(Box::new(Provided { source: Arc::new(bytes), offset: 0, len }));
    SendWr { wr_id, op, payload, flags: SendFlags::SIGNALED, target: None }
}

impl Drop for ControlQp {
    fn drop(&mut self) {
        // This fails only if the queue pair is destroyed already, when it was retired.
        let _ = self.qp.destroy();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use terrace_fabric::sim::{SimConfig, SimNet};
    use terrace_nic::{DeviceConfig, ManualClock, Time, WcStatus};

    use super::*;
    use crate::control_cqs::ControlCqs;

    /// Two connected ends; the second one moves bytes.
    struct Ends {
        net: SimNet,
        clock: Arc<ManualClock>,
        controls: [ControlQp; 2],
        cqs: [ControlCqs; 2],
        devices: [Arc<Device>; 2],
    }

    fn address(index: usize) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + index as u8))
    }

    impl Ends {
        fn new(is_lending: bool) -> Ends {
            let net = SimNet::new(1, SimConfig::default());
            let clock = Arc::new(ManualClock::new());
            let devices = [0, 1].map(|index| {
                let port = Box::new(net.port(address(index)));
                Device::open(DeviceConfig::simulated(port, clock.clone(), index as u64)).expect("a device")
            });
            let cqs = [ControlCqs::new(), ControlCqs::new()];
            let mut controls = [0, 1].map(|index| {
                let cq = cqs[index].take(&devices[index]).expect("a completion queue");
                ControlQp::new(&devices[index], cq, is_lending).expect("an end")
            });
            let ends = [controls[0].end(), controls[1].end()];
            for index in 0..2 {
                let peer = ends[1 - index];
                let path = rc::path_to(&devices[index], address(1 - index), peer.qpn);
                let path = path.expect("an address").expect("a path");
                controls[index].connect(path, peer, rc::TIMEOUT).expect("the ends connect");
            }
            Ends { net, clock, controls, cqs, devices }
        }

        /// The status of what the second end has been asked for.
        fn status(&mut self) -> WcStatus {
            self.controls[1].post().expect("it is posted");
            let mut status = None;
            while status.is_none() {
                let now = self.net.now();
                self.devices.iter().for_each(|device| _ = device.step(Time(now)));
                // Those behind it are of receives, which end with the connection.
                self.cqs[1].take_completions(|wc| _ = status.get_or_insert(wc.status));
                let deadlines = self.devices.iter().filter_map(|device| device.next_deadline());
                let next = deadlines.map(|at| at.0).chain(self.net.next_delivery()).min();
                self.net.advance_to(next.unwrap_or(now).max(now));
                self.clock.set(Time(self.net.now()));
            }
            status.expect("it has completed")
        }

        fn fetch(&mut self, from: (u32, u64)) -> WcStatus {
            self.controls[1].fetch(1, from, 8);
            self.status()
        }

        fn store(&mut self, to: (u32, u64)) -> WcStatus {
            self.controls[1].store(1, to, vec![1; 8]);
            self.status()
        }
    }

    impl Drop for Ends {
        fn drop(&mut self) {
            self.devices.iter().for_each(|device| device.close());
        }
    }

    #[test]
    fn an_end_moves_the_bytes_of_what_the_other_has_lent() {
        let mut ends = Ends::new(true);
        let data: Vec<u8> = (0..CALL_BYTES_MAX).map(|index| (index % 251) as u8).collect();
        // The slots of both ids are others.
        let lent = ends.controls[0].lend(u64::from(CALL_COUNT_MAX) - 1, &data).expect("it lends");
        let other = ends.controls[0].lend(u64::from(CALL_COUNT_MAX), &[]).expect("it lends");
        ends.controls[1].fetch(7, (lent.rkey, lent.va), CALL_BYTES_MAX);
        assert_eq!(ends.status(), WcStatus::Success);
        assert_eq!(ends.controls[1].take_fetched(7, CALL_BYTES_MAX).expect("it was fetched"), data);
        ends.controls[1].store(8, (other.rkey, other.va), data.clone());
        assert_eq!(ends.status(), WcStatus::Success);
        let mut written = vec![0; data.len()];
        ends.controls[0].take_lent(2 * u64::from(CALL_COUNT_MAX), &mut written).expect("it was written");
        assert_eq!(written, data);
    }

    #[test]
    fn an_end_accesses_nothing_but_what_the_other_has_lent() {
        const ALL: u32 = 0xf;
        for access in [Ends::fetch, Ends::store] {
            let mut program = Ends::new(true);
            let pd = program.devices[0].alloc_pd().expect("a protection domain");
            let region = Buffer::new(&pd, 64, ALL).expect("a region of the program");
            let of_program = (region.mr().rkey(), region.addr());
            assert_eq!(access(&mut program, of_program), WcStatus::RemoteAccess);
            let mut received = Ends::new(true);
            let receives = &received.controls[0].receives;
            let of_messages = (receives.mr().rkey(), receives.addr());
            assert_eq!(access(&mut received, of_messages), WcStatus::RemoteAccess);
            let mut beyond = Ends::new(true);
            let lent = beyond.controls[0].lend(0, &[]).expect("it lends");
            let end = lent.va + u64::from(CALL_COUNT_MAX * CALL_BYTES_MAX);
            assert_eq!(access(&mut beyond, (lent.rkey, end - 4)), WcStatus::RemoteAccess);
            let mut without = Ends::new(false);
            assert!(without.controls[0].lend(0, &[]).is_err());
            let open =
                Buffer::new(&without.controls[0]._pd.0, 64, ALL).expect("a region beside the queue pair");
            let of_open = (open.mr().rkey(), open.addr());
            assert_ne!(access(&mut without, of_open), WcStatus::Success);
        }
    }
}
