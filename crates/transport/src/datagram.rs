//! Receiving datagrams (UD): one packet a message, no answers, and a GRH in front of the data.

use terrace_wire::{GRH_LEN, Packet, RxMeta, Trailer, grh};

use crate::common::{Call, Verdict};
use crate::data::Data;
use crate::host::{Host, LocalError};
use crate::responder::Responder;
use crate::types::{QpEvent, RecvWr, Wc, WcFlags, WcOpcode, WcStatus};

/// Value of `wc.sl` at which UCX expects an IPv4 header, in bytes 20 to 39.
const GRH_KIND_IPV4: u8 = 2;

impl Responder {
    /// Delivers a datagram to the oldest receive. Datagrams that do not fit are dropped: the sender expects no answer,
    /// and an unknown sender must neither consume receives nor put the queue pair into an error state. Only a
    /// receive whose own memory cannot be written does that.
    pub(crate) fn handle_datagram(
        &mut self,
        call: &mut Call<'_, impl Host>,
        meta: &RxMeta,
        packet: &Packet<'_>,
    ) -> Verdict {
        let Some(deth) = packet.ext.deth.filter(|deth| deth.qkey == call.attr.qkey) else {
            call.counters.dropped += 1;
            return Verdict::Fine;
        };
        let Ok(receive) = self.next_receive(call) else {
            call.counters.dropped += 1;
            return Verdict::Fine;
        };
        let length = GRH_LEN + packet.payload.len();
        let capacity: u64 = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if length as u64 > capacity {
            self.give_back(call, receive);
            call.counters.dropped += 1;
            return Verdict::Fine;
        }
        if place(call.host, &receive, meta, packet).is_err() {
            call.fail_receive(receive.wr_id, 0, WcStatus::LocalProtection);
            return Verdict::ResponderFatal(QpEvent::Fatal);
        }
        let with_imm = packet.bth.opcode.info().trailer == Trailer::Immediate;
        let is_ipv4 = meta.source.ip().to_canonical().is_ipv4();
        call.host.complete_receive(Wc {
            wr_id: receive.wr_id,
            opcode: WcOpcode::Recv,
            byte_len: length as u32,
            imm: packet.ext.imm.unwrap_or(0),
            qpn: call.config.qpn,
            src_qp: deth.source_qpn,
            flags: if with_imm { WcFlags::GRH | WcFlags::WITH_IMM } else { WcFlags::GRH },
            sl: if is_ipv4 { GRH_KIND_IPV4 } else { 0 },
            solicited: packet.bth.solicited,
            ..Wc::default()
        });
        Verdict::Fine
    }
}

/// Writes the GRH and the data.
fn place(host: &impl Host, receive: &RecvWr, meta: &RxMeta, packet: &Packet<'_>) -> Result<(), LocalError> {
    let header_len = packet.bth.opcode.info().header_len;
    let packet_len = header_len + packet.payload.len() + usize::from(packet.bth.pad);
    host.scatter_to_receive(&receive.sges, 0, Data::Bytes(&grh::for_packet(meta, packet_len)))?;
    match packet.payload {
        [] => Ok(()),
        payload => host.scatter_to_receive(&receive.sges, GRH_LEN as u64, Data::Bytes(payload)),
    }
}
