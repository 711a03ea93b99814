//! The responder: takes request packets in order, acts on memory and on the receive queue, and queues responses.
//!
//! Every NAK of a connected queue pair is decided in this file or in `duplicates.rs`. `emit.rs` only sends pending
//! responses. Every request packet passes the same gates:
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
//!   receive posted? ---- no --> RNR NAK
//!    v
//!   memory, completion, response queued
//!    \- absent --> deferred.rs
//! ```

mod append;
mod deferred;
mod duplicates;
mod emit;
mod one_sided;
mod read;
mod refusal;
mod resource;
mod response;
mod unreliable;

use std::collections::VecDeque;

pub(crate) use emit::Answered;
pub(crate) use refusal::event_of;

use terrace_wire::{NakCode, Opcode, OpcodeInfo, Operation, Packet, Psn, Syndrome, Trailer};

use crate::access;
use crate::common::{Call, Common, Verdict};
use crate::data::Data;
use crate::host::{Completion, Host, RemoteAccess, RemoteError};
use crate::types::{MESSAGE_LEN_MAX, QpEvent, QpType, RecvWr, Wc, WcFlags, WcOpcode, WcStatus};
use append::StagedRecord;
use emit::is_plain_ack;
use refusal::{INVALID_REQUEST, Refusal};
use resource::ResponderResource;
use response::Response;

/// A message of several packets of which some have arrived.
#[derive(Debug)]
enum Incoming {
    Send { receive: RecvWr, capacity: u64, offset: u64 },
    Write { va: u64, rkey: u32, length: u64, offset: u64 },
    Append(StagedRecord),
}

#[derive(Debug, Default)]
pub(crate) struct Responder {
    receives: VecDeque<RecvWr>,
    /// XRC: number of the shared receive queue of the current message, and of the receives that were given back to
    /// `receives`.
    srqn: u32,
    expected: Psn,
    /// Messages completed, modulo 2^24.
    msn: u32,
    incoming: Option<Incoming>,
    /// A NAK for the expected PSN was queued: no other is sent until that PSN arrives.
    nak_out: bool,
    /// Pending responses, sent in order.
    pending: VecDeque<Response>,
    /// Whether the oldest pending response waits for memory, so that nothing can be sent until `wake` is called.
    blocked: bool,
    /// Whether `wake` was called or a READ response was completed since the last `schedule`: waiting READs may fetch
    /// now.
    schedule_due: bool,
    /// Whether READs wait to fetch.
    reads_waiting: bool,
    /// Whether an RNR NAK is due because the peer repeats a deferred operation.
    rnr_due: bool,
    /// The newest READs, atomics, FLUSHes, ATOMIC WRITEs and APPENDs.
    resources: VecDeque<ResponderResource>,
}

/// Most pending responses while nothing can be sent, beside those for each responder resource. Further requests are
/// dropped, as if the network had lost them.
const PENDING_MAX: usize = 64;

impl Responder {
    pub(crate) fn start(&mut self, common: &Common) {
        self.expected = Psn::new(common.attr.rq_psn);
        self.msn = 0;
    }

    pub(crate) fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// Receives in the queue, plus the receive of a partial message, since it may be given back.
    pub(crate) fn receives_len(&self) -> usize {
        self.receives.len() + usize::from(matches!(self.incoming, Some(Incoming::Send { .. })))
    }

    pub(crate) fn post(&mut self, wr: RecvWr) {
        self.receives.push_back(wr);
    }

    /// Drops everything without completions, as RESET does.
    pub(crate) fn clear(&mut self) {
        *self = Responder::default();
    }

    /// Completes all receives as flushed. Pending responses are still sent: one may be the NAK that tells the peer why.
    pub(crate) fn flush(&mut self, call: &mut Call<'_, impl Host>) {
        if let Some(Incoming::Send { receive, .. }) = self.incoming.take() {
            call.fail_receive(receive.wr_id, self.srqn, WcStatus::Flushed);
        }
        while let Some(receive) = self.receives.pop_front() {
            call.fail_receive(receive.wr_id, self.srqn, WcStatus::Flushed);
        }
    }

    /// Drops READ responses and deferred operations when the program or the requester puts the queue pair in error.
    /// Other responses report finished requests, and may be sent.
    pub(crate) fn stop_reading(&mut self, call: &mut Call<'_, impl Host>) {
        let first = self.pending.iter().position(Response::is_pending_change).unwrap_or(self.pending.len());
        self.drop_pending(call, first);
        self.pending.retain(|response| !matches!(response, Response::Read(_)));
        self.blocked = false;
    }

    /// Handles a request packet of a reliable connection.
    pub(crate) fn handle_request(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
    ) -> Verdict {
        let distance = packet.bth.psn.since(self.expected);
        if distance < 0 && self.blocked_psn(call).is_some_and(|waiting| !packet.bth.psn.is_before(waiting)) {
            call.counters.duplicates += 1;
            self.rnr_due = true;
            return Verdict::Fine;
        }
        if self.pending.len() >= PENDING_MAX + 4 * usize::from(call.attr.max_dest_rd_atomic) {
            call.counters.dropped += 1;
            return Verdict::Fine;
        }
        if distance > 0 {
            if !self.nak_out {
                call.counters.sequence_naks_sent += 1;
                self.nak_out = true;
                self.queue_nak(Syndrome::Nak(NakCode::PsnSequence));
            }
            return Verdict::Fine;
        }
        if distance < 0 {
            call.counters.duplicates += 1;
            return self.handle_duplicate(call, packet, data);
        }
        self.nak_out = false;
        match self.carry_out_for(call, packet, data) {
            Ok(()) => Verdict::Fine,
            Err(refusal) => {
                let refusal = self.postpone(call, packet.bth.opcode.info(), refusal);
                self.refuse(call, refusal)
            }
        }
    }

    fn queue_nak(&mut self, syndrome: Syndrome) {
        self.pending.push_back(Response::Ack { psn: self.expected, syndrome, msn: self.msn });
    }

    /// Refuses the request at the expected PSN.
    fn refuse(&mut self, call: &mut Call<'_, impl Host>, refusal: Refusal) -> Verdict {
        let code = match refusal {
            Refusal::NotReady => {
                let timer = call.attr.min_rnr_timer;
                return self.refuse_for_now(call, timer);
            }
            Refusal::Rnr { timer } => return self.refuse_for_now(call, timer),
            Refusal::Nak(code) => code,
            Refusal::ReceiveTooShort => {
                self.fail_receive(call, WcStatus::LocalLength);
                NakCode::InvalidRequest
            }
            Refusal::ReceiveProtection => {
                self.fail_receive(call, WcStatus::LocalProtection);
                NakCode::RemoteOperation
            }
            Refusal::Invalidation => {
                self.fail_receive(call, WcStatus::RemoteInvalidRequest);
                return Verdict::ResponderFatal(QpEvent::AccessError);
            }
        };
        call.counters.error_naks_sent += 1;
        self.queue_nak(Syndrome::Nak(code));
        Verdict::ResponderFatal(event_of(code))
    }

    fn refuse_for_now(&mut self, common: &mut Common, timer: u8) -> Verdict {
        common.counters.rnr_naks_sent += 1;
        self.nak_out = true;
        self.queue_nak(Syndrome::RnrNak { timer });
        Verdict::Fine
    }

    fn fail_receive(&mut self, call: &mut Call<'_, impl Host>, status: WcStatus) {
        if let Some(Incoming::Send { receive, .. }) = self.incoming.take() {
            call.fail_receive(receive.wr_id, self.srqn, status);
        }
    }

    /// Completes in error the receive that a WRITE with immediate would have consumed, had the peer been allowed to
    /// write (IBTA volume 1, 9.9.3, class C). Not while the refusal is postponed: the peer sends the packet again.
    fn fail_receive_of_write(&mut self, call: &mut Call<'_, impl Host>) {
        if !self.has_pending_changes()
            && let Ok(receive) = self.next_receive(call)
        {
            call.fail_receive(receive.wr_id, self.srqn, WcStatus::LocalAccess);
        }
    }

    /// Executes a request; an XRC request with the shared receive queue that it names. All packets of a message name
    /// the same one (IBTA annex A14).
    fn carry_out_for(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
    ) -> Result<(), Refusal> {
        let Some(srqn) = packet.ext.xrc_srqn else { return self.carry_out(call, packet, data) };
        let is_bound = self.incoming.is_some() || !self.receives.is_empty();
        if is_bound && self.srqn != srqn {
            return Err(INVALID_REQUEST);
        }
        let carried_out = call.host.with_srq(srqn, |host| {
            self.srqn = srqn;
            self.carry_out(&mut Call { common: call.common, host }, packet, data)
        });
        carried_out.unwrap_or(Err(INVALID_REQUEST))
    }

    fn carry_out(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
    ) -> Result<(), Refusal> {
        let info = packet.bth.opcode.info();
        match info.operation {
            Operation::Send | Operation::Write => {
                let received = self.receive_data(call, packet, data, info);
                if received == Err(Refusal::Nak(NakCode::RemoteAccess)) && info.trailer == Trailer::Immediate
                {
                    self.fail_receive_of_write(call);
                }
                received?;
                let packets = data.packets(call.mtu());
                self.finish_packet(call, packet, packets, info);
            }
            Operation::Append => self.receive_append(call, packet, data, info)?,
            _ if self.incoming.is_some() => return Err(INVALID_REQUEST),
            Operation::ReadRequest => self.accept_read(call, packet)?,
            Operation::CompareSwap
            | Operation::FetchAdd
            | Operation::MaskedCompareSwap
            | Operation::MaskedFetchAdd => self.perform_atomic(call, packet)?,
            Operation::AtomicWrite => self.perform_atomic_write(call, packet)?,
            Operation::Flush => self.perform_flush(call, packet)?,
            _ => return Err(INVALID_REQUEST),
        }
        Ok(())
    }

    /// Takes a packet or run of a SEND or WRITE.
    fn receive_data(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
        info: &OpcodeInfo,
    ) -> Result<(), Refusal> {
        self.check_order(info)?;
        check_payload_len(call, data, info)?;
        match info.operation {
            Operation::Send => self.receive_send(call, packet, data, info),
            _ => self.receive_write(call, packet, data, info),
        }
    }

    /// The packets of a message are first, middle and last of one operation, or a single "only".
    fn check_order(&self, info: &OpcodeInfo) -> Result<(), Refusal> {
        let fits = match (&self.incoming, info.position.is_first()) {
            (None, first) => first,
            (Some(Incoming::Send { .. }), false) => info.operation == Operation::Send,
            (Some(Incoming::Write { .. }), false) => info.operation == Operation::Write,
            (Some(Incoming::Append(_)), false) => info.operation == Operation::Append,
            (Some(_), true) => false,
        };
        if fits { Ok(()) } else { Err(INVALID_REQUEST) }
    }

    /// Advances by one packet or a run, and queues an ACK if the peer requested one. An ACK that has not left covers later packets, too.
    fn finish_packet(&mut self, common: &mut Common, packet: &Packet<'_>, packets: u32, info: &OpcodeInfo) {
        self.expected = self.expected.plus(packets);
        if info.position.is_last() {
            self.msn = (self.msn + 1) & 0xff_ffff;
            common.counters.requests += 1;
        }
        if packet.bth.ack_request || self.pending.back().is_some_and(is_plain_ack) {
            self.queue_ack(self.expected.minus(1));
        }
    }

    /// Queues an ACK for everything up to `psn`. An ACK at the end of the queue is updated instead: ACKs coalesce.
    fn queue_ack(&mut self, up_to: Psn) {
        let current_msn = self.msn;
        match self.pending.back_mut() {
            Some(Response::Ack { psn, syndrome: Syndrome::Ack { .. }, msn }) => {
                if psn.is_before(up_to) {
                    *psn = up_to;
                }
                *msn = current_msn;
            }
            Some(Response::Writes(writes)) => writes.defer_ack(up_to, current_msn),
            _ => {
                let syndrome = Syndrome::Ack { credits: 31 };
                self.pending.push_back(Response::Ack { psn: up_to, syndrome, msn: current_msn });
            }
        }
    }

    /// Puts a receive whose message failed back at the front of its queue: a shared one serves other queue pairs, too.
    pub(crate) fn give_back(&mut self, call: &Call<'_, impl Host>, receive: RecvWr) {
        let own = if shares(call) { call.host.return_shared_receive(receive) } else { Some(receive) };
        own.into_iter().for_each(|receive| self.receives.push_front(receive));
    }

    /// The oldest receive. With a shared queue, the queue pair's own queue holds at most one receive, given back by a
    /// message.
    pub(crate) fn next_receive(&mut self, call: &Call<'_, impl Host>) -> Result<RecvWr, Refusal> {
        let own = self.receives.pop_front();
        let shared = || if shares(call) { call.host.take_shared_receive() } else { None };
        own.or_else(shared).ok_or(Refusal::NotReady)
    }

    fn receive_send(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
        info: &OpcodeInfo,
    ) -> Result<(), Refusal> {
        if info.position.is_first() {
            self.require_completion_room(call)?;
            require_receive(call)?;
            let receive = self.next_receive(call)?;
            let capacity = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
            self.incoming = Some(Incoming::Send { receive, capacity, offset: 0 });
        }
        let Some(Incoming::Send { receive, capacity, offset }) = &mut self.incoming else {
            return Err(INVALID_REQUEST);
        };
        let end = *offset + data.len();
        if end > *capacity {
            return Err(Refusal::ReceiveTooShort);
        }
        if data.len() > 0 {
            let scattered = call.host.scatter_to_receive(&receive.sges, *offset, data);
            scattered.map_err(|_| Refusal::ReceiveProtection)?;
        }
        if !info.position.is_last() {
            *offset = end;
            return Ok(());
        }
        if let Some(rkey) = packet.ext.ieth {
            call.host.remote_invalidate(rkey).map_err(|_| Refusal::Invalidation)?;
        }
        let wr_id = receive.wr_id;
        self.incoming = None;
        self.complete_receive(
            call,
            Received { common: call, packet, wr_id, length: end, opcode: WcOpcode::Recv },
        );
        Ok(())
    }

    /// The fast path of [`Responder::handle_request`]: takes a predicted message for a receive of the queue pair's own
    /// queue. Otherwise, and when the receive does not take the message, it changes nothing but the receive's memory.
    #[inline(always)]
    pub(crate) fn receive_message(&mut self, call: &mut Call<'_, impl Host>, packet: &Packet<'_>) -> bool {
        let len = packet.payload.len() as u64;
        let is_next = packet.bth.psn == self.expected
            && self.incoming.is_none()
            && self.pending.len() <= 1
            && !self.has_pending_changes()
            && !call.config.has_srq
            && len <= call.mtu()
            && !call.host.may_withhold_receives();
        let Some(receive) = self.receives.front().filter(|_| is_next) else { return false };
        let capacity: u64 = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
        let is_placed = len <= capacity
            && (len == 0
                || call.host.scatter_to_receive(&receive.sges, 0, Data::Bytes(packet.payload)).is_ok());
        if is_placed {
            let (wr_id, opcode) = (receive.wr_id, WcOpcode::Recv);
            self.receives.pop_front();
            self.nak_out = false;
            self.finish_packet(call, packet, 1, Opcode::RcSendOnly.info());
            call.host.complete_receive(Received { common: call, packet, wr_id, length: len, opcode });
        }
        is_placed
    }

    fn receive_write(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
        info: &OpcodeInfo,
    ) -> Result<(), Refusal> {
        let (va, rkey, length, offset) = self.write_target(call, packet)?;
        let end = offset + data.len();
        // The first packet's header announces the length; every packet but the last leaves a remainder.
        if end > length || info.position.is_last() != (end == length) {
            return Err(INVALID_REQUEST);
        }
        // The receive is taken before the write: without a receive the peer sends this packet again.
        let receive = if info.position.is_last() && info.trailer == Trailer::Immediate {
            self.require_completion_room(call)?;
            require_receive(call)?;
            Some(self.next_receive(call)?)
        } else {
            None
        };
        if data.len() > 0
            && let Err(refusal) = self.write(call, rkey, va.wrapping_add(offset), data)
        {
            receive.into_iter().for_each(|receive| self.give_back(call, receive));
            return Err(refusal);
        }
        self.incoming =
            (!info.position.is_last()).then_some(Incoming::Write { va, rkey, length, offset: end });
        if let Some(receive) = receive {
            let (wr_id, opcode) = (receive.wr_id, WcOpcode::RecvRdmaWithImm);
            self.complete_receive(call, Received { common: call, packet, wr_id, length, opcode });
        }
        Ok(())
    }

    /// Address, key and length of the WRITE of this packet, and how much of it has arrived. The whole
    /// range is checked with the first packet; every packet's own range again when it is written.
    fn write_target(
        &self,
        call: &Call<'_, impl Host>,
        packet: &Packet<'_>,
    ) -> Result<(u64, u32, u64, u64), Refusal> {
        if let Some(Incoming::Write { va, rkey, length, offset }) = &self.incoming {
            return Ok((*va, *rkey, *length, *offset));
        }
        let reth = packet.ext.reth.ok_or(INVALID_REQUEST)?;
        require(call, access::REMOTE_WRITE)?;
        if reth.length > MESSAGE_LEN_MAX {
            return Err(INVALID_REQUEST);
        }
        // Without data, address and key need not be valid (IBTA volume 1, C9-88).
        if reth.length > 0 {
            match call.host.remote_check(reth.rkey, reth.va, reth.length.into(), RemoteAccess::Write) {
                // Absence is handled for each packet.
                Ok(()) | Err(RemoteError::NotReady) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok((reth.va, reth.rkey, reth.length.into(), 0))
    }
}

/// Checks the queue pair's own access flags.
fn require(common: &Common, flag: u32) -> Result<(), Refusal> {
    if common.attr.access & flag == flag { Ok(()) } else { Err(INVALID_REQUEST) }
}

/// Whether its receives are in a queue that the host keeps.
fn shares(common: &Common) -> bool {
    common.config.has_srq || common.is(QpType::XrcRecv)
}

/// Checks whether the host withholds receives. Only a reliable connection can report that to the peer.
#[inline(always)]
fn require_receive(call: &Call<'_, impl Host>) -> Result<(), Refusal> {
    match &call.attr.path {
        Some(path) if call.is_reliable() && call.host.withholds_receive(&path.remote) => {
            Err(Refusal::NotReady)
        }
        _ => Ok(()),
    }
}

/// First and middle packets are full, a last one is not empty (IBTA volume 1, C9-92).
fn check_payload_len(common: &Common, data: Data<'_>, info: &OpcodeInfo) -> Result<(), Refusal> {
    let (len, full) = (data.len(), common.mtu() * u64::from(data.packets(common.mtu())));
    let good = match (info.position.is_first(), info.position.is_last()) {
        (true, true) => len <= full,
        (false, true) => (1..=full).contains(&len),
        (_, false) => len == full,
    };
    if good { Ok(()) } else { Err(INVALID_REQUEST) }
}

/// The successful completion of a receive by this packet.
struct Received<'a> {
    common: &'a Common,
    packet: &'a Packet<'a>,
    wr_id: u64,
    length: u64,
    opcode: WcOpcode,
}

impl Completion for Received<'_> {
    #[inline(always)]
    fn entry(self) -> Wc {
        let Received { common, packet, wr_id, length, opcode } = self;
        let (imm, flags) = match packet.bth.opcode.info().trailer {
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
}
