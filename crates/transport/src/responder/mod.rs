//! The responder: takes request packets in order, acts on memory and on the receive queue, and owes answers.
//!
//! Every NAK of a connected queue pair is decided in this file or in `duplicates.rs`; `emit.rs` only sends what is
//! owed, and `at_once.rs` is a shorter way for ordinary messages. A request packet goes through the same gates whatever it asks for:
//!
//! ```text
//!   PSN ---- ahead ----> NAK sequence error, once
//!    |  \--- behind ---> duplicates.rs
//!    v expected
//!   order of opcodes, length rules ---- broken ----> NAK invalid request
//!    v
//!   queue pair's access flags, resources ---- no --> NAK invalid request
//!    v
//!   rkey, range, rights ---- no --> NAK remote access error
//!    v
//!   receive there? ---- no --> RNR NAK
//!    v
//!   memory, completion, answer owed
//!    \- absent --> parked.rs
//! ```

mod at_once;
mod duplicates;
mod emit;
mod one_sided;
mod parked;
mod unreliable;

use std::collections::VecDeque;

pub use at_once::Taken;
pub(crate) use emit::Answered;

use terrace_wire::{NakCode, OpcodeInfo, Operation, Packet, Psn, Syndrome, Trailer};

use crate::access;
use crate::common::{Common, Verdict};
use crate::host::{Host, RemoteAccess, RemoteError};
use crate::types::{MESSAGE_LEN_MAX, QpEvent, QpType, RecvWr, Wc, WcFlags, WcOpcode, WcStatus};
use parked::{Parked, ReadAnswer, Settle};

/// A message of several packets that has begun to arrive.
#[derive(Debug)]
enum Incoming {
    Send { receive: RecvWr, capacity: u64, offset: u64 },
    Write { va: u64, rkey: u32, length: u64, offset: u64 },
}

/// What the peer is owed, in order.
#[derive(Debug)]
enum Owed {
    Ack {
        psn: Psn,
        syndrome: Syndrome,
        msn: u32,
    },
    Read(ReadAnswer),
    /// ACKs of WRITEs whose data is on its way into memory.
    Settle(Settle),
    /// The answer to an atomic or a FLUSH that is under way.
    Parked(Parked),
    /// A completion that must not be seen before what is owed before it has come about.
    Tell(Wc),
    AtomicResult {
        psn: Psn,
        value: u64,
        msn: u32,
    },
    /// The empty READ response that answers FLUSH and ATOMIC WRITE.
    Done {
        psn: Psn,
        msn: u32,
    },
}

/// A READ or atomic that was carried out, kept in case the peer asks again.
#[derive(Debug)]
struct Remembered {
    psn: Psn,
    packets: u32,
    what: Kept,
}

#[derive(Clone, Copy, Debug)]
enum Kept {
    Read {
        va: u64,
        rkey: u32,
        length: u64,
    },
    Atomic {
        value: u64,
        msn: u32,
    },
    Done {
        msn: u32,
    },
    /// An atomic that is under way.
    Parked,
}

#[derive(Debug, Default)]
pub(crate) struct Responder {
    receives: VecDeque<RecvWr>,
    /// XRC: number of the shared receive queue that the message under way is for, and that `receives` came back to be for.
    srqn: u32,
    expected: Psn,
    /// Messages completed, modulo 2^24.
    msn: u32,
    incoming: Option<Incoming>,
    /// A NAK for the expected PSN is out: say no more until it arrives.
    nak_out: bool,
    owed: VecDeque<Owed>,
    /// Whether the oldest thing that is owed waits for memory, and nothing can leave before somebody wakes the queue pair.
    parked: bool,
    /// Whether somebody has done that, or a READ has left: READs that wait to fetch may get their turn.
    woken: bool,
    /// Whether there are such READs.
    hungry: bool,
    /// Whether the peer repeats what waits for memory, and is to be told to be patient.
    impatient: bool,
    history: VecDeque<Remembered>,
}

/// A request that cannot be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Nak(NakCode),
    /// No receive is posted: the peer shall try again.
    NotReady,
    /// The request needs memory that is absent, or would overtake one that does: the peer shall try again after the time
    /// that this code stands for.
    Rnr {
        timer: u8,
    },
    /// The message is longer than its receive: the program learns it too.
    ReceiveTooShort,
    /// The receive's own memory cannot be written.
    ReceiveProtection,
    /// The peer may not have this key invalidated (IBTA volume 1, 9.9.3, class J): the receive completes in error, and no answer leaves.
    Invalidation,
}

impl From<RemoteError> for Refusal {
    fn from(error: RemoteError) -> Refusal {
        match error {
            RemoteError::NotReady | RemoteError::Retry => ABSENT,
            error => Refusal::Nak(error.into()),
        }
    }
}

impl From<RemoteError> for NakCode {
    fn from(error: RemoteError) -> NakCode {
        match error {
            RemoteError::Access => NakCode::RemoteAccess,
            RemoteError::Invalid => NakCode::InvalidRequest,
            RemoteError::Operation | RemoteError::NotReady | RemoteError::Retry => NakCode::RemoteOperation,
        }
    }
}

/// What the program is told when a NAK with this code ends the connection.
fn event_of(code: NakCode) -> QpEvent {
    match code {
        NakCode::RemoteAccess => QpEvent::AccessError,
        NakCode::RemoteOperation => QpEvent::Fatal,
        _ => QpEvent::RequestError,
    }
}

/// Answers that may wait while nothing can leave, beside those that each responder resource needs: what a peer sends
/// beyond them is dropped unseen, as if the network had lost it.
const OWED_MAX: usize = 64;

/// The memory is absent, and there is no room to wait for it here, or the region does not want that: 0.12 ms.
const ABSENT: Refusal = Refusal::Rnr { timer: 7 };

/// The request must not overtake writes that are under way. The RNR NAK leaves behind their ACK, so that the peer need
/// not wait any longer then: 0.01 ms, the shortest time there is.
const UNSETTLED: Refusal = Refusal::Rnr { timer: 1 };

/// A peer that repeats what waits for memory is told to do so again after 10.24 ms: its patience with a silent responder has an
/// end, and storage that is busy takes longer than that at times.
const PATIENCE_TIMER: u8 = 20;

const INVALID_REQUEST: Refusal = Refusal::Nak(NakCode::InvalidRequest);

impl Responder {
    pub(crate) fn start(&mut self, common: &Common) {
        self.expected = Psn::new(common.attr.rq_psn);
        self.msn = 0;
    }

    pub(crate) fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// Receives in the queue; one that a message is arriving in counts, since it may come back.
    pub(crate) fn receives_len(&self) -> usize {
        self.receives.len() + usize::from(matches!(self.incoming, Some(Incoming::Send { .. })))
    }

    pub(crate) fn post(&mut self, wr: RecvWr) {
        self.receives.push_back(wr);
    }

    /// Forgets everything without completions, as RESET does.
    pub(crate) fn clear(&mut self) {
        *self = Responder::default();
    }

    /// Completes all receives as flushed. What is owed is still sent: it may be the NAK that tells the peer why.
    pub(crate) fn flush(&mut self, common: &mut Common) {
        if let Some(Incoming::Send { receive, .. }) = self.incoming.take() {
            let wc = common.flushed_receive(receive.wr_id, self.srqn);
            common.complete_receive(wc);
        }
        while let Some(receive) = self.receives.pop_front() {
            let wc = common.flushed_receive(receive.wr_id, self.srqn);
            common.complete_receive(wc);
        }
    }

    /// Stops reading memory for the peer, in a queue pair whose program or requester has put it in error, and stops
    /// waiting for memory. Other answers tell of what has been done, and may leave.
    pub(crate) fn stop_reading(&mut self, common: &mut Common) {
        let settled = self.owed.iter().position(Owed::is_unsettled).unwrap_or(self.owed.len());
        self.forget_owed(common, settled);
        self.owed.retain(|owed| !matches!(owed, Owed::Read(_)));
        self.parked = false;
    }

    /// A request packet of a reliable connection.
    pub(crate) fn handle_request(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Verdict {
        let distance = packet.bth.psn.since(self.expected);
        if distance < 0 && self.waits_at(common).is_some_and(|waiting| !packet.bth.psn.is_before(waiting)) {
            common.counters.duplicates += 1;
            self.impatient = true;
            return Verdict::Fine;
        }
        if self.owed.len() >= OWED_MAX + 4 * usize::from(common.attr.max_dest_rd_atomic) {
            common.counters.dropped += 1;
            return Verdict::Fine;
        }
        if distance > 0 {
            if !self.nak_out {
                common.counters.sequence_naks_sent += 1;
                self.nak_out = true;
                self.owe_nak(Syndrome::Nak(NakCode::PsnSequence));
            }
            return Verdict::Fine;
        }
        if distance < 0 {
            common.counters.duplicates += 1;
            return self.handle_duplicate(common, packet, host);
        }
        self.nak_out = false;
        match self.carry_out_for(common, packet, host) {
            Ok(()) => Verdict::Fine,
            Err(refusal) => {
                let refusal = self.postpone(packet.bth.opcode.info(), refusal);
                self.refuse(common, refusal)
            }
        }
    }

    fn owe_nak(&mut self, syndrome: Syndrome) {
        self.owed.push_back(Owed::Ack { psn: self.expected, syndrome, msn: self.msn });
    }

    /// Refuses the request at the expected PSN.
    fn refuse(&mut self, common: &mut Common, refusal: Refusal) -> Verdict {
        let code = match refusal {
            Refusal::NotReady => return self.refuse_for_now(common, common.attr.min_rnr_timer),
            Refusal::Rnr { timer } => return self.refuse_for_now(common, timer),
            Refusal::Nak(code) => code,
            Refusal::ReceiveTooShort => {
                self.fail_receive(common, WcStatus::LocalLength);
                NakCode::InvalidRequest
            }
            Refusal::ReceiveProtection => {
                self.fail_receive(common, WcStatus::LocalProtection);
                NakCode::RemoteOperation
            }
            Refusal::Invalidation => {
                self.fail_receive(common, WcStatus::RemoteInvalidRequest);
                return Verdict::ResponderFatal(QpEvent::AccessError);
            }
        };
        common.counters.error_naks_sent += 1;
        self.owe_nak(Syndrome::Nak(code));
        Verdict::ResponderFatal(event_of(code))
    }

    fn refuse_for_now(&mut self, common: &mut Common, timer: u8) -> Verdict {
        common.counters.rnr_naks_sent += 1;
        self.nak_out = true;
        self.owe_nak(Syndrome::RnrNak { timer });
        Verdict::Fine
    }

    fn fail_receive(&mut self, common: &mut Common, status: WcStatus) {
        if let Some(Incoming::Send { receive, .. }) = self.incoming.take() {
            let wc = common.receive_error(receive.wr_id, self.srqn, status);
            common.complete_receive(wc);
        }
    }

    /// Completes the receive that a WRITE with immediate would have consumed, had the peer been allowed to write (IBTA volume 1,
    /// 9.9.3, class C). Not while the refusal is postponed: the packet comes again.
    fn fail_receive_of_write(&mut self, common: &mut Common, host: &impl Host) {
        if !self.is_unsettled()
            && let Ok(receive) = self.next_receive(common, host)
        {
            let wc = common.receive_error(receive.wr_id, self.srqn, WcStatus::LocalAccess);
            common.complete_receive(wc);
        }
    }

    /// Carries a request out; one of XRC for the shared receive queue that it names. All packets of a message name the same
    /// (IBTA annex A14).
    fn carry_out_for(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Result<(), Refusal> {
        let Some(srqn) = packet.ext.xrc_srqn else { return self.carry_out(common, packet, host) };
        let is_bound = self.incoming.is_some() || !self.receives.is_empty();
        if is_bound && self.srqn != srqn {
            return Err(INVALID_REQUEST);
        }
        let carried_out = host.with_srq(srqn, |host| {
            self.srqn = srqn;
            self.carry_out(common, packet, host)
        });
        carried_out.unwrap_or(Err(INVALID_REQUEST))
    }

    fn carry_out(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Result<(), Refusal> {
        let info = packet.bth.opcode.info();
        match info.operation {
            Operation::Send => {
                self.check_order(info)?;
                check_payload_len(common, packet, info)?;
                self.receive_send(common, packet, info, host)?;
                self.finish_packet(common, packet, info);
            }
            Operation::Write => {
                self.check_order(info)?;
                check_payload_len(common, packet, info)?;
                let written = self.receive_write(common, packet, info, host);
                if written == Err(Refusal::Nak(NakCode::RemoteAccess)) && info.trailer == Trailer::Immediate {
                    self.fail_receive_of_write(common, host);
                }
                written?;
                self.finish_packet(common, packet, info);
            }
            _ if self.incoming.is_some() => return Err(INVALID_REQUEST),
            Operation::ReadRequest => self.accept_read(common, packet, host)?,
            Operation::CompareSwap | Operation::FetchAdd => self.perform_atomic(common, packet, host)?,
            Operation::AtomicWrite => self.perform_atomic_write(common, packet, host)?,
            Operation::Flush => self.perform_flush(common, packet, host)?,
            _ => return Err(INVALID_REQUEST),
        }
        Ok(())
    }

    /// A message's packets come as first, middle and last of one operation, or as a single one.
    fn check_order(&self, info: &OpcodeInfo) -> Result<(), Refusal> {
        let fits = match (&self.incoming, info.position.is_first()) {
            (None, first) => first,
            (Some(Incoming::Send { .. }), false) => info.operation == Operation::Send,
            (Some(Incoming::Write { .. }), false) => info.operation == Operation::Write,
            (Some(_), true) => false,
        };
        if fits { Ok(()) } else { Err(INVALID_REQUEST) }
    }

    /// Moves on by one packet, and owes an ACK if the peer asked for one.
    fn finish_packet(&mut self, common: &mut Common, packet: &Packet<'_>, info: &OpcodeInfo) {
        self.expected = self.expected.next();
        if info.position.is_last() {
            self.msn = (self.msn + 1) & 0xff_ffff;
            common.counters.requests += 1;
        }
        if packet.bth.ack_request {
            self.owe_ack(self.expected.minus(1));
        }
    }

    /// Owes an ACK for everything up to `psn`. One that still waits to be sent is brought up to date instead: ACKs
    /// coalesce.
    fn owe_ack(&mut self, up_to: Psn) {
        let current_msn = self.msn;
        match self.owed.back_mut() {
            Some(Owed::Ack { psn, syndrome: Syndrome::Ack { .. }, msn }) => {
                if psn.is_before(up_to) {
                    *psn = up_to;
                }
                *msn = current_msn;
            }
            Some(Owed::Settle(settle)) => settle.owe_ack(up_to, current_msn),
            _ => {
                let syndrome = Syndrome::Ack { credits: 31 };
                self.owed.push_back(Owed::Ack { psn: up_to, syndrome, msn: current_msn });
            }
        }
    }

    /// Puts a receive whose message failed back to the front of the queue.
    pub(crate) fn give_back(&mut self, receive: RecvWr) {
        self.receives.push_front(receive);
    }

    /// The oldest receive. With a shared queue, the queue pair's own holds at most one that a message gave back.
    pub(crate) fn next_receive(&mut self, common: &Common, host: &impl Host) -> Result<RecvWr, Refusal> {
        let own = self.receives.pop_front();
        let shares = common.config.has_srq || common.is(QpType::XrcRecv);
        own.or_else(|| if shares { host.take_shared_receive() } else { None }).ok_or(Refusal::NotReady)
    }

    fn receive_send(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        info: &OpcodeInfo,
        host: &impl Host,
    ) -> Result<(), Refusal> {
        if info.position.is_first() {
            self.require_room_to_tell(common)?;
            require_receive(common, host)?;
            let receive = self.next_receive(common, host)?;
            let capacity = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
            self.incoming = Some(Incoming::Send { receive, capacity, offset: 0 });
        }
        let Some(Incoming::Send { receive, capacity, offset }) = &mut self.incoming else {
            return Err(INVALID_REQUEST);
        };
        let end = *offset + packet.payload.len() as u64;
        if end > *capacity {
            return Err(Refusal::ReceiveTooShort);
        }
        if !packet.payload.is_empty() {
            let scattered = host.scatter_to_receive(&receive.sges, *offset, packet.payload);
            scattered.map_err(|_| Refusal::ReceiveProtection)?;
        }
        if !info.position.is_last() {
            *offset = end;
            return Ok(());
        }
        if let Some(rkey) = packet.ext.ieth {
            host.remote_invalidate(rkey).map_err(|_| Refusal::Invalidation)?;
        }
        let wr_id = receive.wr_id;
        self.incoming = None;
        self.tell(common, receive_completion(common, packet, info, wr_id, end, WcOpcode::Recv));
        Ok(())
    }

    fn receive_write(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        info: &OpcodeInfo,
        host: &impl Host,
    ) -> Result<(), Refusal> {
        let (va, rkey, length, offset) = self.write_target(common, packet, host)?;
        let end = offset + packet.payload.len() as u64;
        // The header of the first packet announces the length; every packet but the last leaves something of it.
        if end > length || info.position.is_last() != (end == length) {
            return Err(INVALID_REQUEST);
        }
        // The receive is taken before anything is written: without one the peer sends this packet again.
        let receive = if info.position.is_last() && info.trailer == Trailer::Immediate {
            self.require_room_to_tell(common)?;
            require_receive(common, host)?;
            Some(self.next_receive(common, host)?)
        } else {
            None
        };
        if !packet.payload.is_empty()
            && let Err(refusal) = self.write(common, host, rkey, va.wrapping_add(offset), packet.payload)
        {
            receive.into_iter().for_each(|receive| self.give_back(receive));
            return Err(refusal);
        }
        self.incoming =
            (!info.position.is_last()).then_some(Incoming::Write { va, rkey, length, offset: end });
        if let Some(receive) = receive {
            let opcode = WcOpcode::RecvRdmaWithImm;
            self.tell(common, receive_completion(common, packet, info, receive.wr_id, length, opcode));
        }
        Ok(())
    }

    /// Address, key, length of the WRITE that this packet belongs to, and how much of it has arrived. The whole
    /// range is checked with the first packet; every packet's own range again when it is written.
    fn write_target(
        &self,
        common: &Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Result<(u64, u32, u64, u64), Refusal> {
        if let Some(Incoming::Write { va, rkey, length, offset }) = &self.incoming {
            return Ok((*va, *rkey, *length, *offset));
        }
        let reth = packet.ext.reth.ok_or(INVALID_REQUEST)?;
        require(common, access::REMOTE_WRITE)?;
        if reth.length > MESSAGE_LEN_MAX {
            return Err(INVALID_REQUEST);
        }
        // Without data, address and key need mean nothing (IBTA volume 1, C9-88).
        if reth.length > 0 {
            match host.remote_check(reth.rkey, reth.va, reth.length.into(), RemoteAccess::Write) {
                // Each packet finds out for itself.
                Ok(()) | Err(RemoteError::NotReady) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok((reth.va, reth.rkey, reth.length.into(), 0))
    }
}

/// The queue pair itself must let the peer do this.
fn require(common: &Common, flag: u32) -> Result<(), Refusal> {
    if common.attr.access & flag == flag { Ok(()) } else { Err(INVALID_REQUEST) }
}

/// The host may withhold receives. Only a reliable connection can say so to the peer.
fn require_receive(common: &Common, host: &impl Host) -> Result<(), Refusal> {
    match common.attr.path {
        Some(path) if common.is_reliable() && host.withholds_receive(path.remote.ip()) => {
            Err(Refusal::NotReady)
        }
        _ => Ok(()),
    }
}

/// First and middle packets are full, a last one is not empty (IBTA volume 1, C9-92).
fn check_payload_len(common: &Common, packet: &Packet<'_>, info: &OpcodeInfo) -> Result<(), Refusal> {
    let (len, mtu) = (packet.payload.len() as u64, common.mtu());
    let good = match (info.position.is_first(), info.position.is_last()) {
        (true, true) => len <= mtu,
        (false, true) => (1..=mtu).contains(&len),
        (_, false) => len == mtu,
    };
    if good { Ok(()) } else { Err(INVALID_REQUEST) }
}

#[inline(always)] // Made where it goes.
fn receive_completion(
    common: &Common,
    packet: &Packet<'_>,
    info: &OpcodeInfo,
    wr_id: u64,
    length: u64,
    opcode: WcOpcode,
) -> Wc {
    let (imm, flags) = match info.trailer {
        Trailer::Immediate => (packet.ext.imm.unwrap_or(0), WcFlags::WITH_IMM),
        Trailer::Invalidate => (packet.ext.ieth.unwrap_or(0), WcFlags::WITH_INV),
        Trailer::None => (0, WcFlags::empty()),
    };
    Wc {
        wr_id,
        status: WcStatus::Success,
        opcode,
        byte_len: length.min(u64::from(u32::MAX)) as u32,
        imm,
        qpn: common.config.qpn,
        src_qp: if common.is(QpType::Ud) { 0 } else { common.attr.dest_qpn },
        srqn: packet.ext.xrc_srqn.unwrap_or(0),
        flags,
        solicited: packet.bth.solicited,
        ..Wc::default()
    }
}
