//! Packets, and runs of packets, that have arrived for the queue pair.

use std::net::SocketAddr;

use terrace_wire::{Opcode, Operation, Packet, Psn, ROCE_PORT, RxMeta, Service, Time};

use super::Qp;
use crate::common::{Call, DEFAULT_PKEY, Verdict};
use crate::data::{Data, PACKET_BYTES_MAX};
use crate::host::Host;
use crate::types::{QpEvent, QpState, QpType};

/// Shortest interval between CNPs to a peer (the usual interval of a notification point).
const CNP_INTERVAL_NS: u64 = 50_000;

/// Longest run, in bytes of data, that is accepted. A host may hold as many to absent memory as packets.
pub const RUN_DATA_MAX: u64 = 16 << 10;

/// The partition number within a partition key.
const PKEY_NUMBER_MASK: u16 = 0x7fff;

/// The ECN code point "congestion experienced".
const ECN_CONGESTED: u8 = 3;

impl Qp {
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
