//! Sending: one packet at a time, as far as the window, the queue and the sink allow.

use terrace_wire::{
    AppendEth, AppendFlags, AtomicEth, Bth, Deth, Extensions, Feth, Opcode, Operation, Path, Position, Reth,
    Service, Time,
};

use super::Requester;
use super::operations::Row;
use super::wqe::Wqe;
use crate::common::{Call, Common, Verdict, push_packet};
use crate::data::PACKET_BYTES_MAX;
use crate::host::{Host, LocalError, Sink};
use crate::types::{MASK_BYTES, QpState, QpType, SendFlags, SendOp, SendWr, Target, WcStatus};
use crate::window::PACKET_OVERHEAD;

/// A long message requests an ACK this often, so that the window moves while the message is being sent.
const ACK_EVERY_PACKETS: u64 = 16;

/// Result of an attempt to send one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Emitted {
    /// One packet was sent, or one local operation was executed; there may be more.
    Sent,
    /// Nothing can be sent now.
    Nothing,
    /// The sink is full.
    SinkFull,
    /// A request failed.
    Broken,
}

impl Requester {
    /// Whether `emit` would do something.
    pub(crate) fn wants_to_emit(&self, common: &Common) -> bool {
        if self.paused_until.is_some() || !matches!(common.attr.state, QpState::Rts | QpState::Sqd) {
            return false;
        }
        let Some(wqe) = self.queue.next() else { return false };
        if wqe.failed.is_some() || (common.attr.state == QpState::Sqd && !wqe.started) {
            return false;
        }
        if !wqe.started && (self.is_fenced(wqe) || self.is_draining && !self.is_idle()) {
            return false;
        }
        wqe.is_local() || self.room_for(common, wqe).is_some()
    }

    /// Whether a request has to wait for earlier ones. A fence waits for READs and atomics (IBTA volume 1, 10.8.3.3). So do
    /// the ordering bits: the responder executes all else in the order of posting. A local invalidate waits for all earlier requests (10.6.5.1), with or without a fence: they may have to be
    /// retransmitted from the memory whose key it invalidates.
    fn is_fenced(&self, wqe: &Wqe) -> bool {
        match wqe.wr.op {
            SendOp::LocalInvalidate(_) => !self.queue.is_next_oldest(),
            _ => {
                const WAITS: SendFlags = SendFlags::FENCE.union(SendFlags::ORDER_BEFORE);
                let is_held = || {
                    self.queue
                        .previous()
                        .is_some_and(|previous| previous.wr.flags.contains(SendFlags::ORDER_AFTER))
                };
                !self.responses_due.is_empty() && (wqe.wr.flags.intersects(WAITS) || is_held())
            }
        }
    }

    /// How many sequence numbers the next packet of this request may take now: one, or for a READ as many response
    /// packets as fit into the window.
    fn room_for(&self, common: &Common, wqe: &Wqe) -> Option<u64> {
        let from = if wqe.started { self.next } else { self.assigned };
        let left = if wqe.started { wqe.end() - self.next } else { wqe.packets };
        let mtu = common.mtu();
        if wqe.expects_response() && common.attr.max_rd_atomic == 0 {
            // It could never be sent; emit() fails it so that it does not wait forever.
            return Some(1);
        }
        if wqe.expects_response() && self.responses_due.len() >= usize::from(common.attr.max_rd_atomic) {
            return None;
        }
        if !wqe.is_read() {
            let offset = (from - if wqe.started { wqe.first } else { self.assigned }) * mtu;
            let cost = mtu.min(wqe.length.saturating_sub(offset)) + PACKET_OVERHEAD;
            let admitted = self.window.admits(self.in_flight_bytes, cost) || self.no_answer_is_due();
            return (!common.is_reliable() || admitted).then_some(1);
        }
        if self.is_behind_repetition(wqe, from) {
            return None;
        }
        let next_boundary =
            self.read_boundaries.get(self.read_boundaries.partition_point(|boundary| *boundary <= from));
        let left = next_boundary.map_or(left, |boundary| left.min(boundary - from));
        self.packets_to_read(mtu, left, self.window.bytes().saturating_sub(self.in_flight_bytes))
    }

    /// How many of the `left` response packets of a READ are requested next, if so many bytes may come into flight. A
    /// READ is not split into slivers: it waits for a quarter of the window, unless less completes it.
    fn packets_to_read(&self, mtu: u64, left: u64, bytes: u64) -> Option<u64> {
        let packet_cost = mtu + PACKET_OVERHEAD;
        let packets = bytes / packet_cost;
        let whole = self.window.bytes() / packet_cost;
        if packets >= left {
            Some(left)
        } else if self.in_flight_bytes == 0 {
            Some(packets.max(1).min(left))
        } else {
            (packets >= (whole / 4).max(1)).then_some(packets)
        }
    }

    /// How many packets of a started request are sent next, if `room` may be: as many of a SEND, WRITE or APPEND as the window
    /// admits and a run may have, if that is more data than a packet can have.
    fn room_for_run(&self, common: &Common, wqe: &Wqe, room: u64, bytes_max: u64) -> u64 {
        // Of repeated and new packets together the peer would take all as repeated.
        let end = if self.next < self.highest { wqe.end().min(self.highest) } else { wqe.end() };
        let left = end - self.next;
        if left == 1 || wqe.is_read() {
            return room;
        }
        let mtu = common.mtu();
        let budget = self.window.bytes().saturating_sub(self.in_flight_bytes) / (mtu + PACKET_OVERHEAD);
        let packets = left.min(bytes_max / mtu).min(budget);
        let bytes = (packets * mtu).min(wqe.length - (self.next - wqe.first) * mtu);
        if bytes > PACKET_BYTES_MAX { packets } else { room }
    }

    /// Whether the data to request next were first requested together with earlier data that are still missing. Then
    /// they wait for the earlier data. rxe takes a repeated request as all that is left of a READ, and refuses data
    /// before its start from then on: if only the later of two repetitions arrived, the earlier data could never be
    /// read.
    fn is_behind_repetition(&self, wqe: &Wqe, from: u64) -> bool {
        let is_repetition = from < self.highest;
        let begins_a_request = from == wqe.first || self.first_read_boundaries.binary_search(&from).is_ok();
        is_repetition && from > self.acknowledged && !begins_a_request
    }

    /// Whether no packet in flight requests an answer. That happens when the window shrinks in the middle of a message;
    /// one more packet is then sent to request one.
    fn no_answer_is_due(&self) -> bool {
        self.last_ack_request <= self.acknowledged
    }

    /// The fast path of a message: sends a request before it is queued, if it is a SEND of one packet over RC that can
    /// leave now. Otherwise it changes nothing, and [`Requester::emit`] sends the request. The caller queues the request
    /// by [`Requester::queue_sent`] before anything else.
    #[inline(always)]
    pub(crate) fn send_message(&self, call: &Call<'_, impl Host>, wr: &SendWr, sink: &mut impl Sink) -> bool {
        let length = wr.payload.len();
        let is_ordinary = wr.op == SendOp::Send
            && call.is(QpType::Rc)
            && call.attr.state == QpState::Rts
            && length <= call.mtu()
            && self.is_caught_up()
            && self.queue.len() < call.config.cap.max_send_wr as usize
            && self.window.admits(self.in_flight_bytes, length + PACKET_OVERHEAD)
            && call.host.budget(self.in_flight_bytes) > 0;
        let Some(path) = call.attr.path.as_ref().filter(|_| is_ordinary) else { return false };
        let solicited = wr.flags.contains(SendFlags::SOLICITED);
        let bth = Bth { solicited, ack_request: true, ..call.bth(Opcode::RcSendOnly, self.psn(self.next)) };
        let pushed = push_packet(sink, path, bth, &Extensions::default(), length as usize, |out| {
            wr.payload.gather(call.host, 0, out)
        });
        // `emit` finds the error again and reports it.
        matches!(pushed, Ok(Some(_)))
    }

    /// Queues a request that [`Requester::send_message`] has sent.
    #[inline]
    pub(crate) fn queue_sent(&mut self, now: impl Fn() -> Time, common: &mut Common, wr: SendWr) {
        let mut wqe = Wqe::new(wr, common.mtu());
        common.counters.tx_packets += 1;
        common.counters.tx_bytes +=
            Opcode::RcSendOnly.info().header_len as u64 + wqe.length.next_multiple_of(4);
        self.in_flight_bytes += wqe.length + PACKET_OVERHEAD;
        wqe.started = true;
        wqe.first = self.next;
        self.queue.post(wqe);
        self.queue.step();
        self.next += 1;
        self.assigned = self.next;
        self.highest = self.next;
        self.last_ack_request = self.next;
        if self.ack_deadline.is_none() {
            self.restart_ack_timer(now(), common);
        }
    }

    /// Sends one packet of the next entry, or executes it if it is a local operation.
    pub(crate) fn emit<S: Sink>(
        &mut self,
        now: &impl Fn() -> Time,
        call: &mut Call<'_, impl Host>,
        sink: &mut S,
    ) -> Emitted {
        self.blocked_by_budget = false;
        if !self.wants_to_emit(call) {
            return Emitted::Nothing;
        }
        if self.queue.current().is_local() {
            return self.execute_local(call);
        }
        let room = self.room_for(call, self.queue.current());
        let Some(room) = room else { return Emitted::Nothing };
        if call.attr.max_rd_atomic == 0 && self.queue.current().expects_response() {
            return self.fail_unsent(call, WcStatus::LocalQpOperation);
        }
        if call.is(QpType::Ud) && self.queue.current().length > call.mtu() {
            return self.fail_unsent(call, WcStatus::LocalLength);
        }
        let room = if call.is_reliable() { self.room_in_budget(call, room) } else { Some(room) };
        let Some(room) = room else { return Emitted::Nothing };
        if !self.queue.current().started {
            let wqe = self.queue.current_mut();
            wqe.started = true;
            wqe.first = self.assigned;
            self.next = self.assigned;
            self.assigned += wqe.packets;
        }
        let wqe = self.queue.current();
        let room =
            if S::RUN_BYTES_MAX > 0 { self.room_for_run(call, wqe, room, S::RUN_BYTES_MAX) } else { room };
        let ack_request = self.requests_ack(call, wqe, room);
        match self.push(call, sink, room, ack_request) {
            Ok(None) => Emitted::SinkFull,
            Ok(Some(len)) => {
                if ack_request {
                    self.last_ack_request = self.next + room;
                }
                self.record_sent(now, call, room, len)
            }
            Err(LocalError::Protection) => self.fail_unsent(call, WcStatus::LocalProtection),
        }
    }

    /// How many of `room` sequence numbers the host's in-flight budget permits now. If packets in flight request no
    /// answer, one more is sent all the same: without an answer nothing would run this send queue again.
    fn room_in_budget(&mut self, call: &Call<'_, impl Host>, room: u64) -> Option<u64> {
        let is_alone = self.in_flight_bytes == 0;
        let must_send = !is_alone && self.no_answer_is_due();
        let budget = call.host.budget(self.in_flight_bytes);
        if budget == 0 && !must_send {
            self.blocked_by_budget = is_alone;
            if is_alone {
                // An unsent packet cannot be lost.
                self.ack_deadline = None;
            }
            return None;
        }
        match self.queue.current().is_read() {
            false => Some(room),
            true => self.packets_to_read(call.mtu(), room, budget).or(must_send.then_some(1)),
        }
    }

    /// Marks the request that cannot be sent; it completes in error once everything before it is done.
    fn fail_unsent(&mut self, call: &mut Call<'_, impl Host>, status: WcStatus) -> Emitted {
        self.queue.current_mut().failed = Some(status);
        match self.retire(call) {
            Verdict::Fine => Emitted::Nothing,
            _ => Emitted::Broken,
        }
    }

    /// Accounts for a packet that was sent and stands for `taken` sequence numbers.
    fn record_sent(
        &mut self,
        now: &impl Fn() -> Time,
        call: &mut Call<'_, impl Host>,
        taken: u64,
        len: usize,
    ) -> Emitted {
        let wqe = self.queue.current();
        let to = self.next + taken;
        let (is_read, is_complete) = (wqe.is_read(), to == wqe.end());
        let packets = if is_read { 1 } else { taken };
        if self.next < self.highest {
            call.counters.retransmits += packets;
        }
        call.counters.tx_packets += packets;
        call.counters.runs_sent += u64::from(packets > 1);
        call.counters.tx_bytes += len as u64;
        if call.is_reliable() {
            self.in_flight_bytes += wqe.cost(self.next, to, call.mtu());
            if wqe.expects_response() && to > wqe.first_response() {
                self.responses_due.push_back(to);
            }
        }
        if is_read {
            self.record_boundary(to);
            if to > self.highest {
                self.first_read_boundaries.push_back(to);
            }
        }
        self.next = to;
        self.highest = self.highest.max(to);
        if is_complete {
            self.queue.step();
        }
        if !call.is_reliable() {
            // There are no ACKs: a request is done when its last packet was sent.
            self.acknowledged = to;
            self.paused_until = call.host.pace(now(), len);
            return match self.retire(call) {
                Verdict::Fine => Emitted::Sent,
                _ => Emitted::Broken,
            };
        }
        if self.ack_deadline.is_none() {
            self.restart_ack_timer(now(), call);
        }
        Emitted::Sent
    }

    /// Records that a READ request ended before `end`: no later request may span this boundary.
    fn record_boundary(&mut self, end: u64) {
        let index = self.read_boundaries.partition_point(|boundary| *boundary < end);
        if self.read_boundaries.get(index) != Some(&end) {
            self.read_boundaries.insert(index, end);
        }
    }

    fn execute_local(&mut self, call: &mut Call<'_, impl Host>) -> Emitted {
        let wqe = self.queue.current_mut();
        if wqe.executed {
            // Reached again after going back for a loss: a local operation is executed only once.
            self.queue.step();
            return Emitted::Sent;
        }
        let done = match &wqe.wr.op {
            SendOp::LocalInvalidate(rkey) => {
                call.host.local_invalidate(*rkey).map_err(|_| WcStatus::LocalQpOperation)
            }
            SendOp::BindWindow(bind) => call.host.bind_window(bind).map_err(|_| WcStatus::WindowBind),
            _ => Ok(()),
        };
        match done {
            Ok(()) => {
                wqe.executed = true;
                self.queue.step();
            }
            Err(status) => wqe.failed = Some(status),
        }
        match self.retire(call) {
            Verdict::Fine => Emitted::Sent,
            _ => Emitted::Broken,
        }
    }

    fn push(
        &self,
        call: &Call<'_, impl Host>,
        sink: &mut impl Sink,
        room: u64,
        ack_request: bool,
    ) -> Result<Option<usize>, LocalError> {
        let wqe = self.queue.current();
        let mtu = call.mtu();
        let packet = self.next - wqe.first;
        let offset = packet * mtu;
        let row = Row::of(&wqe.wr.op);
        let operation = row.wire.expect("local operations never get here");
        let (position, payload_len) = match operation {
            Operation::Send | Operation::Write | Operation::Append => {
                let position = position_of(packet, packet + room, wqe.packets);
                (position, (room * mtu).min(wqe.length - offset))
            }
            Operation::AtomicWrite => (Position::Only, wqe.length),
            Operation::MaskedCompareSwap => (Position::Only, MASK_BYTES as u64),
            _ => (Position::Only, 0),
        };
        let trailer = if position.is_last() { row.trailer } else { terrace_wire::Trailer::None };
        let (service, path, dest_qpn) = address(call, wqe);
        let Some(path) = path else { return Err(LocalError::Protection) };
        let Some(opcode) = Opcode::for_message(service, operation, position, trailer) else {
            return Err(LocalError::Protection);
        };
        let mut bth = call.bth(opcode, self.psn(self.next));
        bth.qpn = dest_qpn;
        bth.solicited = position.is_last() && wqe.wr.flags.contains(SendFlags::SOLICITED);
        bth.ack_request = service.is_reliable() && ack_request;
        let ext = extensions(call, wqe, position, offset, room * mtu);
        push_packet(sink, &path, bth, &ext, payload_len as usize, |out| {
            wqe.wr.payload.gather(call.host, offset, out)
        })
    }

    /// An ACK is requested by the last packet of a message and every [`ACK_EVERY_PACKETS`] packets of a long one. So
    /// does the packet that fills the window or the host's budget, since nothing more could be sent without an answer. A message that is
    /// [answered later](SendFlags::ANSWERED_LATER) requests none if an answer is due, and leaves most of the window, which a READ needs.
    fn requests_ack(&self, call: &Call<'_, impl Host>, wqe: &Wqe, room: u64) -> bool {
        let packet = self.next - wqe.first;
        let is_last = wqe.is_read() || packet + room == wqe.packets;
        let mtu = call.mtu();
        let this = wqe.cost(self.next, self.next + room, mtu);
        let in_flight = self.in_flight_bytes + this;
        let is_answered_later = wqe.wr.flags.contains(SendFlags::ANSWERED_LATER)
            && !self.no_answer_is_due()
            && in_flight <= self.window.bytes() / 4;
        if is_last && !is_answered_later || packet % ACK_EVERY_PACKETS + room >= ACK_EVERY_PACKETS {
            return true;
        }
        !self.window.admits(in_flight, mtu + PACKET_OVERHEAD) || call.host.budget(in_flight) == 0
    }
}

/// The position in a message of `packets` of those from `first` on up to `end`.
fn position_of(first: u64, end: u64, packets: u64) -> Position {
    match (first == 0, end == packets) {
        (true, true) => Position::Only,
        (true, false) => Position::First,
        (false, true) => Position::Last,
        (false, false) => Position::Middle,
    }
}

fn address(common: &Common, wqe: &Wqe) -> (Service, Option<Path>, u32) {
    let service = common.config.qp_type.service();
    match (service, &wqe.wr.target) {
        (Service::Ud, Some(Target::Datagram(datagram))) => (service, Some(datagram.path), datagram.qpn),
        (Service::Ud, _) => (service, None, 0),
        _ => (service, common.attr.path, common.attr.dest_qpn),
    }
}

fn extensions(common: &Common, wqe: &Wqe, position: Position, offset: u64, room_bytes: u64) -> Extensions {
    let mut ext = Extensions::default();
    match wqe.wr.op {
        SendOp::Send => {}
        SendOp::SendImm(imm) => ext.imm = position.is_last().then_some(imm),
        SendOp::SendInvalidate(rkey) => ext.ieth = position.is_last().then_some(rkey),
        SendOp::Write { va, rkey } | SendOp::WriteImm { va, rkey, .. } => {
            if position.is_first() {
                ext.reth = Some(Reth { va, rkey, length: wqe.length as u32 });
            }
            if let SendOp::WriteImm { imm, .. } = wqe.wr.op {
                ext.imm = position.is_last().then_some(imm);
            }
        }
        SendOp::Read { va, rkey } => {
            let length = room_bytes.min(wqe.length - offset) as u32;
            ext.reth = Some(Reth { va: va.wrapping_add(offset), rkey, length });
        }
        SendOp::CompareSwap { va, rkey, compare, swap } => {
            ext.atomic = Some(AtomicEth { va, rkey, swap_or_add: swap, compare });
        }
        SendOp::FetchAdd { va, rkey, add } => {
            ext.atomic = Some(AtomicEth { va, rkey, swap_or_add: add, compare: 0 });
        }
        SendOp::AtomicWrite { va, rkey } => {
            ext.reth = Some(Reth { va, rkey, length: wqe.length as u32 });
        }
        SendOp::Flush { va, rkey, length, placement, selectivity } => {
            ext.feth = Some(Feth { placement, selectivity });
            ext.reth = Some(Reth { va, rkey, length });
        }
        SendOp::Append { rkey, commit } => {
            let flags = if commit { AppendFlags::COMMIT } else { AppendFlags::empty() };
            ext.append = Some(AppendEth { rkey, length: wqe.length as u32, flags });
        }
        SendOp::MaskedCompareSwap { va, rkey, compare, swap } => {
            ext.atomic = Some(AtomicEth { va, rkey, swap_or_add: swap, compare });
        }
        SendOp::MaskedFetchAdd { va, rkey, add, boundary } => {
            ext.atomic = Some(AtomicEth { va, rkey, swap_or_add: add, compare: boundary });
        }
        SendOp::LocalInvalidate(_) | SendOp::BindWindow(_) | SendOp::Nop => {}
    }
    match (common.config.qp_type, &wqe.wr.target) {
        (QpType::Ud, Some(Target::Datagram(target))) => {
            // The high bit selects the queue pair's own Q_Key; only privileged programs can set a Q_Key with this bit.
            let qkey = if target.qkey & 0x8000_0000 != 0 { common.attr.qkey } else { target.qkey };
            ext.deth = Some(Deth { qkey, source_qpn: common.config.qpn });
        }
        (QpType::XrcSend, Some(Target::SharedQueue(srqn))) => ext.xrc_srqn = Some(*srqn),
        _ => {}
    }
    ext
}
