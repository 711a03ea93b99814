//! Receiving datagrams (UD): one packet a message, no answers, and a routing header in front of the data.

use std::net::SocketAddr;

use terrace_wire::{GRH_LEN, Packet, RxMeta, Trailer, grh};

use crate::common::Common;
use crate::host::Host;
use crate::responder::Responder;
use crate::types::{Wc, WcFlags, WcOpcode, WcStatus};

/// Value of `wc.sl` for which UCX takes the header for IPv4's, in bytes 20 to 39.
const GRH_KIND_IPV4: u8 = 2;

impl Responder {
    /// Delivers a datagram to the oldest receive. What nobody can take is dropped: the sender expects no answer,
    /// and a stranger must not be able to bring the queue pair into an error state.
    pub(crate) fn handle_datagram(
        &mut self,
        common: &mut Common,
        meta: &RxMeta,
        packet: &Packet<'_>,
        host: &impl Host,
    ) {
        let Some(deth) = packet.ext.deth.filter(|deth| deth.qkey == common.attr.qkey) else {
            common.counters.dropped += 1;
            return;
        };
        if packet.payload.len() as u64 > common.mtu() {
            common.counters.dropped += 1;
            return;
        }
        let Ok(receive) = self.next_receive(common, host) else {
            common.counters.dropped += 1;
            return;
        };
        let length = (GRH_LEN + packet.payload.len()) as u64;
        let capacity: u64 = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
        let is_ipv4 = matches!(meta.source, SocketAddr::V4(_));
        let status = if length > capacity {
            WcStatus::LocalLength
        } else {
            let info = packet.bth.opcode.info();
            let packet_len = info.header_len + packet.payload.len() + usize::from(packet.bth.pad);
            host.scatter(&receive.sges, 0, &grh::for_packet(meta, packet_len))
                .and_then(|()| match packet.payload {
                    [] => Ok(()),
                    payload => host.scatter(&receive.sges, GRH_LEN as u64, payload),
                })
                .map_or(WcStatus::LocalProtection, |()| WcStatus::Success)
        };
        let with_imm = packet.bth.opcode.info().trailer == Trailer::Immediate;
        common.complete_receive(Wc {
            wr_id: receive.wr_id,
            status,
            opcode: WcOpcode::Recv,
            byte_len: length as u32,
            imm: packet.ext.imm.unwrap_or(0),
            qpn: common.config.qpn,
            src_qp: deth.source_qpn,
            flags: if with_imm { WcFlags::GRH | WcFlags::WITH_IMM } else { WcFlags::GRH },
            sl: if is_ipv4 { GRH_KIND_IPV4 } else { 0 },
            solicited: packet.bth.solicited || status != WcStatus::Success,
            ..Wc::default()
        });
    }
}
