//! A queue pair: requester, responder, their state machine, and the calls by which the
//! NIC drives them.

use std::net::SocketAddr;

use terrace_wire::{Extensions, Opcode, Operation, Packet, Psn, ROCE_PORT, RxMeta, Service, Time};

use crate::common::{Call, Common, DEFAULT_PKEY, Verdict, push_packet};
use crate::data::{Data, PACKET_BYTES_MAX};
use crate::host::{Host, RemoteError, Sink};
use crate::requester::{self, Emitted, Requester, Row};
use crate::responder::{Answered, Responder, event_of};
use crate::state;
use crate::types::{
    ModifyError, PostError, QpAttr, QpAttrMask, QpConfig, QpCounters, QpEvent, QpState, QpType, RecvWr,
    SendWr, WcStatus,
};

/// Shortest interval between CNPs to a peer (the usual interval of a notification point).
const CNP_INTERVAL_NS: u64 = 50_000;

/// Longest run, in bytes of data, that is accepted. A host may hold as many to absent memory as packets.
pub const RUN_DATA_MAX: u64 = 16 << 10;

/// The partition number within a partition key.
const PKEY_NUMBER_MASK: u16 = 0x7fff;

/// The ECN code point "congestion experienced".
const ECN_CONGESTED: u8 = 3;

/// When to send an ACK that is the only pending response. A caller that defers it does not call [`Qp::poll_transmit`] while
/// [`Qp::wants_only_to_acknowledge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckPolicy {
    /// After requests, so that both leave in one system call. A sink that can ([`Sink::carry_ack`]) piggybacks it on a
    /// request: the peer then gets the ACK of its message together with the reply.
    Now,
    /// Before requests, as an RNIC does that acknowledges a message before its program sees it. The peer then gets the
    /// ACK of its message before the reply.
    First,
}

/// Why `poll_transmit` stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// There is nothing more to send now.
    Idle,
    /// The sink is full; call again once it was drained.
    SinkFull,
}

/// A queue pair. Call it under one lock, in any order; completions and events go to the [`Host`] of the call. After each
/// call that may have changed something, call [`Qp::poll_transmit`], and keep a timer for [`Qp::deadline`].
#[derive(Debug)]
pub struct Qp {
    common: Common,
    requester: Requester,
    responder: Responder,
    established: bool,
    cnp_due: bool,
    /// Time of the last congestion that led to a CNP.
    congestion_noted_at: Option<Time>,
}

impl Qp {
    /// A queue pair in RESET.
    pub fn new(config: QpConfig) -> Qp {
        let requester = Requester::new(config.window_bytes);
        let common = Common { config, attr: QpAttr::default(), counters: QpCounters::default() };
        Qp {
            common,
            requester,
            responder: Responder::default(),
            established: false,
            cnp_due: false,
            congestion_noted_at: None,
        }
    }

    /// The current state.
    pub fn state(&self) -> QpState {
        self.common.attr.state
    }

    /// Its counters.
    pub fn counters(&self) -> &QpCounters {
        &self.common.counters
    }

    /// Its creation parameters.
    pub fn config(&self) -> &QpConfig {
        &self.common.config
    }

    /// The attributes as set, except for the current state.
    pub fn attr(&self) -> &QpAttr {
        &self.common.attr
    }

    /// The current attributes; the PSNs are the next ones.
    pub fn query(&self) -> QpAttr {
        let mut attr = self.common.attr;
        attr.cur_state = attr.state;
        attr.rq_psn = self.responder.expected_psn().get();
        attr.sq_psn = self.requester.next_psn().get();
        attr.sq_draining = attr.state == QpState::Sqd && !self.requester.is_idle();
        attr
    }

    /// Changes attributes and state; on error it changes nothing.
    ///
    /// # Errors
    /// If the transition table has no such change, or a value is out of range.
    pub fn modify(&mut self, attr: &QpAttr, mask: QpAttrMask, host: &impl Host) -> Result<(), ModifyError> {
        let from = self.common.attr.state;
        let to = state::check(&self.common.config, from, attr, mask)?;
        state::apply(&mut self.common.attr, attr, mask);
        self.common.attr.state = to;
        match (from, to) {
            (_, QpState::Reset) => self.reset(),
            (QpState::Err, QpState::Err) => {}
            (_, QpState::Err) => {
                self.responder.stop_reading(&mut Call { common: &mut self.common, host });
                self.enter_error(host);
            }
            (QpState::Init, QpState::Rtr) => self.responder.start(&self.common),
            (QpState::Rtr, QpState::Rts) => self.requester.start(&self.common),
            (QpState::Sqd, QpState::Sqd) => self.requester.reset_retries(&self.common),
            (QpState::Rts, QpState::Sqd) => {
                self.common.attr.sq_draining = true;
                self.common.attr.en_sqd_async_notify &= mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY);
                self.note_drained(host);
            }
            _ => {}
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.requester.clear(&self.common);
        self.responder.clear();
        self.common.attr = QpAttr::default();
        self.established = false;
        self.cnp_due = false;
        self.congestion_noted_at = None;
    }

    /// Ends the connection as the responder does when it refuses a request for this reason: a protocol above the queue pair
    /// has refused one.
    pub fn refuse(&mut self, reason: RemoteError, host: &impl Host) {
        if !matches!(self.common.attr.state, QpState::Reset | QpState::Init) {
            self.apply(Verdict::ResponderFatal(event_of(reason.into())), host);
        }
    }

    fn enter_error(&mut self, host: &impl Host) {
        self.common.attr.state = QpState::Err;
        host.withdraw();
        let call = &mut Call { common: &mut self.common, host };
        self.requester.flush(call);
        self.responder.flush(call);
        self.cnp_due = false;
        if self.common.config.has_srq {
            host.raise(QpEvent::LastWqeReached);
        }
    }

    /// Changes the state as a call into the requester or responder requires.
    fn apply(&mut self, verdict: Verdict, host: &impl Host) {
        match verdict {
            Verdict::Fine => self.note_drained(host),
            Verdict::RequesterFatal if self.common.is_reliable() => {
                self.responder.stop_reading(&mut Call { common: &mut self.common, host });
                self.enter_error(host);
            }
            Verdict::RequesterFatal => self.common.attr.state = QpState::Sqe,
            // Responses that were pending when the queue pair failed may fail, too: no second event.
            Verdict::ResponderFatal(_) if self.common.attr.state == QpState::Err => {}
            Verdict::ResponderFatal(event) => {
                host.withdraw();
                host.raise(event);
                self.enter_error(host);
            }
        }
    }

    /// Ends the draining of the send queue once all started requests are acknowledged.
    fn note_drained(&mut self, host: &impl Host) {
        let attr = &mut self.common.attr;
        if attr.state == QpState::Sqd && attr.sq_draining && self.requester.is_idle() {
            attr.sq_draining = false;
            if attr.en_sqd_async_notify {
                host.raise(QpEvent::SqDrained);
            }
        }
    }

    /// Queues a send work request. [`Qp::poll_transmit`] sends it, but for an ordinary message that can leave now: with a
    /// pending ACK, if that can be piggybacked, it goes to `sink` at once. In an error state the request completes as
    /// flushed at once. Takes the request ([`SendWr::take`]) unless it fails. By value it would be copied before the
    /// message has left, and the copy would wait for the stores that made the request.
    ///
    /// # Errors
    /// If the queue is full, or the request does not fit the queue pair.
    #[inline]
    pub fn post_send<H: Host>(
        &mut self,
        now: impl Fn() -> Time,
        wr: &mut SendWr,
        host: &H,
        sink: &mut impl Sink,
    ) -> Result<(), PostError> {
        Requester::validate(&self.common, wr)?;
        let call = &mut Call { common: &mut self.common, host };
        if H::HAS_FAST_PATHS && self.requester.send_message(call, wr, sink) {
            self.responder.piggyback_ack(|psn| sink.carry_ack(psn));
            sink.flush();
            self.requester.queue_sent(now, call, wr.take());
            return Ok(());
        }
        self.queue_send(wr, host)
    }

    #[inline(never)]
    fn queue_send(&mut self, wr: &mut SendWr, host: &impl Host) -> Result<(), PostError> {
        if self.check_state()? {
            let call = &mut Call { common: &mut self.common, host };
            requester::complete(call, wr, WcStatus::Flushed, 0);
        } else if self.requester.len() >= self.common.config.cap.max_send_wr as usize {
            return Err(PostError::QueueFull);
        } else {
            self.requester.post(&self.common, wr.take());
        }
        Ok(())
    }

    /// Checks whether these work requests can all be queued.
    ///
    /// # Errors
    /// As for [`Qp::post_send`].
    pub fn check_sends(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        self.validate_sends(wrs)?;
        let flushes = self.check_state()?;
        let room = self.common.config.cap.max_send_wr as usize;
        if !flushes && wrs.len() > room.saturating_sub(self.requester.len()) {
            return Err(PostError::QueueFull);
        }
        Ok(())
    }

    /// Checks that each of these send work requests could be posted in this state, in an empty send queue.
    ///
    /// # Errors
    /// As for [`Qp::post_send`], without `QueueFull`.
    pub fn validate_sends(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        self.check_state()?;
        wrs.iter().try_for_each(|wr| Requester::validate(&self.common, wr))
    }

    /// Whether send work requests are flushed when they are posted in this state.
    #[inline]
    fn check_state(&self) -> Result<bool, PostError> {
        match self.common.attr.state {
            QpState::Reset | QpState::Init | QpState::Rtr => Err(PostError::BadState),
            QpState::Rts | QpState::Sqd => Ok(false),
            QpState::Err | QpState::Sqe => Ok(true),
        }
    }

    /// Whether no request is in flight in RTS: those that are queued may go another way than those before.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.common.attr.state == QpState::Rts && self.requester.is_idle()
    }

    /// Sets whether no request may start while others are in flight. Once none is, the queue pair wants to transmit.
    pub fn set_draining(&mut self, is_draining: bool) {
        self.requester.set_draining(is_draining);
    }

    /// Whether this work request is valid and may be executed without packets: it is a READ, a WRITE or an atomic, and
    /// [`Qp::may_access_direct`].
    #[inline(always)]
    pub fn may_go_direct(&self, wr: &SendWr) -> bool {
        let row = Row::of(&wr.op);
        row.is_direct
            && self.may_access_direct(row.expects_response())
            && Requester::validate(&self.common, wr).is_ok()
    }

    /// Whether an access to the peer's memory that is made now without packets takes effect in order, and a work request
    /// could make it: the queue pair is of RC, its send queue exists and is empty in RTS. READs and atomics, which expect
    /// responses, need a queue pair that may have some outstanding.
    #[inline(always)]
    pub fn may_access_direct(&self, expects_response: bool) -> bool {
        let Common { config, attr, .. } = &self.common;
        attr.state == QpState::Rts
            && self.requester.len() == 0
            && config.qp_type == QpType::Rc
            && (!expects_response || attr.max_rd_atomic > 0)
            && config.cap.max_send_wr > 0
    }

    /// Counts and completes a send work request that the caller has executed without packets, as
    /// [`Qp::may_go_direct`] permits.
    #[inline(always)]
    pub fn complete_direct(&mut self, wr: &SendWr, host: &impl Host) {
        self.count_direct(wr.payload.len());
        requester::complete_success(&self.common, wr, host);
    }

    /// Counts an access of `len` bytes that was made without packets.
    #[inline]
    pub fn count_direct(&mut self, len: u64) {
        self.common.counters.direct += 1;
        self.common.counters.direct_bytes += len;
    }

    /// Completes in error a request whose result could not be stored: the queue pair enters the error state.
    pub fn fail_direct(&mut self, wr: &SendWr, host: &impl Host) {
        let call = &mut Call { common: &mut self.common, host };
        requester::complete(call, wr, WcStatus::LocalProtection, 0);
        self.apply(Verdict::RequesterFatal, host);
    }

    /// Queues a NOP, for which the caller has found room; completes it here and now if nothing is queued. In an error
    /// state it completes as flushed.
    pub fn post_nop(&mut self, wr: &mut SendWr, host: &impl Host) {
        let call = &mut Call { common: &mut self.common, host };
        match call.attr.state {
            QpState::Rts | QpState::Sqd if self.requester.len() == 0 => {
                requester::complete(call, wr, WcStatus::Success, 0);
            }
            QpState::Rts | QpState::Sqd => self.requester.post(call, wr.take()),
            _ => requester::complete(call, wr, WcStatus::Flushed, 0),
        }
    }

    /// Queues a request that fails with this status, when all before it are complete.
    pub fn post_failed(&mut self, wr: &mut SendWr, status: WcStatus, host: &impl Host) {
        let call = &mut Call { common: &mut self.common, host };
        let verdict = self.requester.post_failed(call, wr.take(), status);
        self.apply(verdict, host);
    }

    /// Completes as flushed a receive work request that the host keeps, and does not give out any more.
    pub fn flush_receive(&mut self, wr_id: u64, host: &impl Host) {
        Call { common: &mut self.common, host }.fail_receive(wr_id, 0, WcStatus::Flushed);
    }

    /// Queues a receive work request. In the error state it completes as flushed at once.
    ///
    /// # Errors
    /// If the queue is full, the queue pair has no receive queue of its own, or it is in RESET.
    #[inline]
    pub fn post_recv(&mut self, wr: RecvWr, host: &impl Host) -> Result<(), PostError> {
        let has_queue = self.common.config.qp_type.has_receives() && !self.common.config.has_srq;
        if !has_queue || self.common.attr.state == QpState::Reset {
            return Err(PostError::BadState);
        }
        if wr.sges.len() > self.common.config.cap.max_recv_sge as usize {
            return Err(PostError::TooManySges);
        }
        if self.common.attr.state == QpState::Err {
            Call { common: &mut self.common, host }.fail_receive(wr.wr_id, 0, WcStatus::Flushed);
            return Ok(());
        }
        if self.responder.receives_len() >= self.common.config.cap.max_recv_wr as usize {
            return Err(PostError::QueueFull);
        }
        self.responder.post(wr);
        Ok(())
    }

    #[inline(always)]
    fn count_received(&mut self, packet: &Packet<'_>, data: Data<'_>) {
        let packets = u64::from(data.packets(self.common.mtu()));
        let counters = &mut self.common.counters;
        counters.rx_packets += packets;
        counters.runs_received += u64::from(data.is_run());
        counters.rx_bytes += packets * packet.bth.opcode.info().header_len as u64 + data.len();
    }

    /// Handles a packet that was addressed to this queue pair. Whatever its content, it can at most do what the
    /// protocol lets the connected peer do; packets from other sources are dropped. A piggybacked ACK of everything up
    /// to a PSN takes effect before the packet. Reads the clock only if needed.
    #[inline]
    pub fn handle_packet<H: Host>(
        &mut self,
        now: impl Fn() -> Time,
        meta: &RxMeta,
        packet: &Packet<'_>,
        ack: Option<Psn>,
        host: &H,
    ) {
        self.handle_arrival(now, meta, packet, Data::Bytes(packet.payload), ack, host);
    }

    /// Handles a run ([`Sink::RUN_BYTES_MAX`]) with `len` bytes of data, of which `packet` has the headers, and the host
    /// the data.
    #[inline(never)]
    pub fn handle_run(
        &mut self,
        now: impl Fn() -> Time,
        meta: &RxMeta,
        packet: &Packet<'_>,
        len: u64,
        ack: Option<Psn>,
        host: &impl Host,
    ) {
        let is_run = Data::may_be_run(packet) && (PACKET_BYTES_MAX + 1..=RUN_DATA_MAX).contains(&len);
        if is_run {
            self.handle_arrival(now, meta, packet, Data::Run(len), ack, host);
        } else {
            self.common.counters.dropped += 1;
        }
    }

    #[inline(always)]
    fn handle_arrival<H: Host>(
        &mut self,
        now: impl Fn() -> Time,
        meta: &RxMeta,
        packet: &Packet<'_>,
        data: Data<'_>,
        ack: Option<Psn>,
        host: &H,
    ) {
        let info = packet.bth.opcode.info();
        let is_predicted = H::HAS_FAST_PATHS && !data.is_run() && self.predicts(meta, packet);
        if !is_predicted && !self.accepts(meta, packet) {
            self.common.counters.dropped += 1;
            return;
        }
        self.count_received(packet, data);
        if meta.traffic_class & 3 == ECN_CONGESTED && info.service.is_reliable() {
            self.note_congestion(now(), info.operation);
        }
        if let Some(psn) = ack.filter(|_| is_predicted || info.service.is_reliable()) {
            let call = &mut Call { common: &mut self.common, host };
            if !self.requester.acknowledge_all(call, psn) {
                let verdict = self.requester.handle_ack(&now, call, psn);
                self.apply(verdict, host);
            }
            if self.common.attr.state == QpState::Err {
                // A separate packet behind such an ACK would be dropped, too.
                self.common.counters.dropped += 1;
                return;
            }
        }
        if is_predicted
            && self.responder.receive_message(&mut Call { common: &mut self.common, host }, packet)
        {
            return;
        }
        let verdict = match info.service {
            Service::Cnp => {
                self.common.counters.cnps_received += 1;
                self.requester.on_congestion(&self.common);
                Verdict::Fine
            }
            Service::Ud => {
                self.responder.handle_datagram(&mut Call { common: &mut self.common, host }, meta, packet)
            }
            Service::Uc => {
                self.note_established(host);
                self.responder.handle_unreliable(&mut Call { common: &mut self.common, host }, packet, data)
            }
            Service::Rc | Service::Xrc if is_answer(info.operation) => {
                self.requester.handle_answer(&now, &mut Call { common: &mut self.common, host }, packet)
            }
            Service::Rc | Service::Xrc => {
                self.note_established(host);
                self.responder.handle_request(&mut Call { common: &mut self.common, host }, packet, data)
            }
        };
        self.apply(verdict, host);
    }

    /// Header prediction: whether this is the next ordinary message of the peer, and changes nothing else (established,
    /// congestion).
    #[inline(always)]
    fn predicts(&self, meta: &RxMeta, packet: &Packet<'_>) -> bool {
        packet.bth.opcode == Opcode::RcSendOnly
            && self.common.is(QpType::Rc)
            && self.common.attr.state == QpState::Rts
            && self.established
            && self.common.attr.path.as_ref().is_some_and(|path| path.remote == meta.source)
            && packet.bth.pkey == DEFAULT_PKEY
            && meta.traffic_class & 3 != ECN_CONGESTED
    }

    /// Handles a congestion-experienced mark. A CNP is sent to the peer at most once in each interval. READ data
    /// arrive as fast as they are requested, so the window for requesting them shrinks, too.
    fn note_congestion(&mut self, now: Time, operation: Operation) {
        if self.congestion_noted_at.is_some_and(|sent| now < sent.after_ns(CNP_INTERVAL_NS)) {
            return;
        }
        self.congestion_noted_at = Some(now);
        self.cnp_due = true;
        if operation == Operation::ReadResponse {
            self.requester.on_congestion(&self.common);
        }
    }

    /// Whether a packet has this queue pair's service, comes from its peer, and suits the state.
    fn accepts(&self, meta: &RxMeta, packet: &Packet<'_>) -> bool {
        let attr = &self.common.attr;
        let info = packet.bth.opcode.info();
        let service_fits = match (info.service, self.common.config.qp_type) {
            (Service::Cnp, qp_type) => qp_type != QpType::Ud,
            // In an extended reliable connection, one end requests and the other responds.
            (Service::Xrc, QpType::XrcSend) => is_answer(info.operation),
            (Service::Xrc, QpType::XrcRecv) => !is_answer(info.operation),
            (service, qp_type) => service == qp_type.service(),
        };
        let state_fits = match attr.state {
            QpState::Reset | QpState::Init | QpState::Err => false,
            QpState::Rtr => !is_answer(info.operation),
            QpState::Rts | QpState::Sqd | QpState::Sqe => true,
        };
        let from_peer = self.common.is(QpType::Ud)
            || attr.path.is_some_and(|path| may_come_from(meta.source, path.remote));
        service_fits && state_fits && from_peer && is_default_partition(packet.bth.pkey)
    }

    #[inline]
    fn note_established(&mut self, host: &impl Host) {
        if !self.established {
            self.established = true;
            if self.common.attr.state == QpState::Rtr {
                host.raise(QpEvent::CommunicationEstablished);
            }
        }
    }

    /// When [`Qp::handle_timeout`] is due next.
    pub fn deadline(&self) -> Option<Time> {
        self.requester.deadline()
    }

    /// Handles the timers that have expired by `now`; harmless when none has.
    pub fn handle_timeout(&mut self, now: Time, host: &impl Host) {
        let verdict = self.requester.handle_timeout(now, &mut Call { common: &mut self.common, host });
        self.apply(verdict, host);
    }

    /// A deferred access may have ended, or a buffer may be free for one: the next [`Qp::poll_transmit`]
    /// checks the deferred operations again.
    pub fn wake(&mut self) {
        self.responder.wake();
    }

    /// Whether [`Qp::poll_transmit`] has something to do: packets to send, or deferred operations to check.
    #[inline]
    pub fn wants_transmit(&self) -> bool {
        self.cnp_due || self.responder.wants_to_emit() || self.requester.wants_to_emit(&self.common)
    }

    /// Whether the only packet to send now is an ACK.
    #[inline]
    pub fn wants_only_to_acknowledge(&self) -> bool {
        self.holds_ack() && !self.cnp_due && !self.requester.wants_to_emit(&self.common)
    }

    /// Whether an ACK is the only pending response.
    #[inline]
    pub fn holds_ack(&self) -> bool {
        self.responder.wants_to_emit() && !self.responder.wants_to_emit_more_than_ack()
    }

    /// Request packets (for READs, response packets) that the peer has not answered.
    pub fn unacknowledged_packets(&self) -> u32 {
        self.requester.unacknowledged_packets()
    }

    /// Cost of the request packets in flight, including their overhead in a receive buffer.
    pub fn in_flight_bytes(&self) -> u64 {
        self.requester.in_flight_bytes()
    }

    /// Whether [`Host::admits`] blocks requests while nothing is in flight.
    pub fn is_blocked_by_budget(&self) -> bool {
        self.requester.is_blocked_by_budget()
    }

    /// Send work requests with packets still to send.
    pub fn queued_requests(&self) -> usize {
        self.requester.queued_requests()
    }

    /// Work requests in the send queue, and in the queue pair's own receive queue.
    pub fn queue_lengths(&self) -> (usize, usize) {
        (self.requester.len(), self.responder.receives_len())
    }

    /// Whether a request in the send queue has failed and waits for those before it. The queue pair enters an error state
    /// then, and flushes what is posted behind it.
    pub fn is_failing(&self) -> bool {
        self.requester.is_failing()
    }

    /// Sends what can be sent: requests and pending responses. Reads the clock only if needed.
    #[inline]
    pub fn poll_transmit(
        &mut self,
        now: impl Fn() -> Time,
        host: &impl Host,
        sink: &mut impl Sink,
        acks: AckPolicy,
    ) -> Transmit {
        if acks == AckPolicy::First && self.holds_ack() && !self.emit_responses(host, sink) {
            return Transmit::SinkFull;
        }
        if !self.emit_requests(&now, host, sink) {
            return Transmit::SinkFull;
        }
        if acks == AckPolicy::Now {
            self.responder.piggyback_ack(|psn| sink.carry_ack(psn));
        }
        if !self.emit_responses(host, sink) {
            return Transmit::SinkFull;
        }
        self.note_drained(host);
        if self.cnp_due { self.emit_cnp(sink) } else { Transmit::Idle }
    }

    /// False when the sink is full.
    fn emit_requests(&mut self, now: &impl Fn() -> Time, host: &impl Host, sink: &mut impl Sink) -> bool {
        loop {
            match self.requester.emit(now, &mut Call { common: &mut self.common, host }, sink) {
                Emitted::Sent => {}
                Emitted::Nothing => return true,
                Emitted::SinkFull => return false,
                Emitted::Broken => {
                    self.apply(Verdict::RequesterFatal, host);
                    return true;
                }
            }
        }
    }

    /// False when the sink is full.
    fn emit_responses(&mut self, host: &impl Host, sink: &mut impl Sink) -> bool {
        loop {
            if !self.responder.wants_to_emit() {
                return true;
            }
            match self.responder.emit(&mut Call { common: &mut self.common, host }, sink) {
                Answered::Sent => {}
                Answered::Nothing => return true,
                Answered::SinkFull => return false,
                Answered::Broken(event) => self.apply(Verdict::ResponderFatal(event), host),
            }
        }
    }

    fn emit_cnp(&mut self, sink: &mut impl Sink) -> Transmit {
        let Some(path) = self.common.attr.path else { return Transmit::Idle };
        let mut bth = self.common.bth(Opcode::Cnp, Psn::default());
        bth.becn = true;
        let Ok(pushed): Result<_, std::convert::Infallible> =
            push_packet(sink, &path, bth, &Extensions::default(), 0, |_| Ok(()));
        let Some(len) = pushed else { return Transmit::SinkFull };
        self.cnp_due = false;
        self.common.counters.cnps_sent += 1;
        self.common.counters.tx_packets += 1;
        self.common.counters.tx_bytes += len as u64;
        Transmit::Idle
    }
}

/// Whether a partition key is of the only partition. Its top bit distinguishes full members, of which this is one,
/// from limited ones; the two may communicate.
fn is_default_partition(pkey: u16) -> bool {
    (pkey ^ DEFAULT_PKEY) & PKEY_NUMBER_MASK == 0
}

/// Whether a packet with this source can come from the peer at `remote`. A NIC sends from a port that its peers cannot
/// know (IBTA annex A17 leaves it to the sender). But a process with its own instance index, which means a port beyond
/// the first, sends from that port: then no other program on the peer's host can impersonate it.
#[inline]
pub fn may_come_from(source: SocketAddr, remote: SocketAddr) -> bool {
    source.ip().to_canonical() == remote.ip().to_canonical()
        && (remote.port() == ROCE_PORT || remote.port() == source.port())
}

/// Whether an operation answers a request.
fn is_answer(operation: Operation) -> bool {
    matches!(operation, Operation::Acknowledge | Operation::ReadResponse | Operation::AtomicAcknowledge)
}
