//! What has come to an address's standard port and is for another process of the host.
//!
//! A peer that knows nothing of slots sends everything to UDP port 4791: the port of slot 0. Whoever has that slot of an
//! address passes on what is for the other slots of it, by the upper bits of the queue pair number; management datagrams, which
//! all of them get at number 1, are passed on by whoever reads them ([`Device::pass_on_management`]).
//!
//! ```text
//!   peer, anywhere --- packet for slot 3 ---> A:4791  process with slot 0
//!                                                |    a datagram from A:4791 to A:4794, around the packet and where it came from
//!                                                v
//!                                             A:4794  process with slot 3 --- answers --> peer
//! ```
//!
//! It travels as a datagram between the queue pairs 0 of the two slots, a number that RoCE does not use. It is believed only
//! when it comes from the own address and the standard port there. The system lets nobody but the owner of that port send from
//! it, and a host that forges the own address over the network could as well forge the peer's.
//!
//! The process with slot 0 listens at its first address, and at others as far as it needs them itself; a process with another
//! slot that uses such an address asks it to listen there, too.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::Ordering;

use terrace_fabric::TxBatch;
use terrace_wire::{Deth, Opcode, Packet, Path, Psn, QPN_SLOT_SHIFT, ROCE_PORT, RxMeta, emit_headers};

use crate::device::Device;
use crate::error::Error;
use crate::management::{self, INDEX_MASK, MANAGEMENT_QKEY};

/// Index of the queue pair that such datagrams are between.
const PASSING_INDEX: u32 = 0;

/// In front of what is passed on: what it is, the traffic class, and the source's port and address.
const PREFIX_BYTES: usize = 20;

const A_PACKET: u8 = 1;
const LISTEN_EVERYWHERE: u8 = 2;

/// Whether a packet's destination is the queue pair for what is passed on.
#[inline]
pub(crate) fn is_passed_on(qpn: u32) -> bool {
    qpn & INDEX_MASK == PASSING_INDEX
}

impl Device {
    /// Whether this is the one that passes on what is for others.
    fn is_in_front(&self) -> bool {
        self.port.slot() == 0 && self.is_sibling()
    }

    /// Whether a number is another slot's, and this is the one to pass on what is for it.
    pub(crate) fn is_for_other_slot(&self, qpn: u32) -> bool {
        qpn >> QPN_SLOT_SHIFT != 0 && self.is_in_front()
    }

    /// Passes a packet on to the process that has its queue pair number's slot. False if that is not for this one to do.
    #[cold]
    pub(crate) fn pass_on_to_process(&self, meta: &RxMeta, bytes: &[u8], qpn: u32, tx: &mut TxBatch) -> bool {
        let slot = (qpn >> QPN_SLOT_SHIFT) as u8;
        if slot == 0 || !self.is_in_front() {
            return false;
        }
        self.counters.passed_on.fetch_add(1, Ordering::Relaxed);
        if !push(tx, A_PACKET, slot, meta, bytes) {
            // What the network does not take now is lost, as it is in any network.
            if !self.port.transmit(tx) {
                return true;
            }
            push(tx, A_PACKET, slot, meta, bytes);
        }
        true
    }

    /// Passes a management datagram on to the process with that slot, as if it had come there: for those that read such
    /// datagrams and find that they are for somebody else. False if that is not for this device to do.
    ///
    /// # Errors
    /// Those of [`Device::send_management`].
    pub fn pass_on_management(&self, slot: u8, from: &Path, payload: &[u8]) -> Result<bool, Error> {
        if slot == 0 || !self.is_in_front() {
            return Ok(false);
        }
        self.check_open()?;
        let gid = self.gids().get(usize::from(from.source_gid_index));
        let gid = gid.ok_or(Error::Invalid("no GID at source_gid_index"))?;
        let mut packet = TxBatch::new(0);
        management::write(
            &mut packet,
            from,
            Psn::new(0),
            [slot, management::slot_of(from.remote.port())?],
            payload,
        )?;
        let meta = RxMeta {
            source: from.remote,
            destination: gid.addr,
            gid_index: from.source_gid_index,
            traffic_class: 0,
        };
        let mut unit = self.tx.take();
        for inner in packet.packets() {
            push(&mut unit.batch, A_PACKET, slot, &meta, inner.bytes);
        }
        self.counters.passed_on.fetch_add(1, Ordering::Relaxed);
        self.flush(unit, self.clock.now());
        Ok(true)
    }

    /// Asks whoever has slot 0 of the addresses of this device to listen at all of its own: peers may use any of them.
    pub fn ask_front_to_listen(&self) {
        if self.port.slot() == 0 || !self.is_sibling() {
            return;
        }
        let mut unit = self.tx.take();
        for (gid_index, gid) in (0u8..).zip(self.gids()) {
            let source = SocketAddr::new(gid.addr, self.port.udp_port());
            let meta = RxMeta { source, destination: gid.addr, gid_index, traffic_class: 0 };
            push(&mut unit.batch, LISTEN_EVERYWHERE, 0, &meta, &[]);
        }
        self.flush(unit, self.clock.now());
    }

    /// What a datagram holds that another process of this host has sent to be believed.
    #[cold]
    pub(crate) fn unpack<'a>(&self, meta: &RxMeta, packet: &Packet<'a>) -> Unpacked<'a> {
        let is_own = meta.source.ip().to_canonical() == meta.destination.to_canonical();
        let fits = packet.bth.opcode == Opcode::UdSendOnly
            && packet.bth.qpn >> QPN_SLOT_SHIFT == u32::from(self.port.slot())
            && packet.ext.deth.is_some_and(|deth| deth.qkey == MANAGEMENT_QKEY);
        let split = packet.payload.split_first_chunk::<PREFIX_BYTES>();
        let Some((prefix, inner)) = split.filter(|_| is_own && fits && self.is_sibling()) else {
            return Unpacked::NotBelieved;
        };
        let [kind, traffic_class, port_high, port_low, address @ ..] = *prefix;
        match kind {
            LISTEN_EVERYWHERE if self.is_in_front() => {
                self.activate_all_gids();
                Unpacked::Done
            }
            A_PACKET if meta.source.port() == ROCE_PORT && self.port.slot() != 0 => {
                let ip = IpAddr::V6(Ipv6Addr::from(address)).to_canonical();
                let ifindex = self.gids().get(usize::from(meta.gid_index)).map_or(0, |gid| gid.ifindex);
                let port = u16::from_be_bytes([port_high, port_low]);
                let source = crate::address::socket_address(ip, port, ifindex);
                Unpacked::Packet(RxMeta { source, traffic_class, ..*meta }, inner)
            }
            _ => Unpacked::NotBelieved,
        }
    }
}

/// What came of a datagram between processes.
pub(crate) enum Unpacked<'a> {
    /// A packet, and where it came from.
    Packet(RxMeta, &'a [u8]),
    /// A request that was fulfilled.
    Done,
    /// It does not come from where such datagrams come from, or makes no sense here.
    NotBelieved,
}

/// Wraps a packet and adds it to those that leave, from the address that it came to. False if there is no room.
fn push(tx: &mut TxBatch, kind: u8, slot: u8, meta: &RxMeta, bytes: &[u8]) -> bool {
    let mut remote = meta.source;
    remote.set_ip(meta.destination);
    remote.set_port(ROCE_PORT + u16::from(slot));
    let path =
        Path { remote, source_gid_index: meta.gid_index, traffic_class: 0, hop_limit: 0, flow_label: 0 };
    let payload_len = PREFIX_BYTES + bytes.len();
    let (mut bth, mut ext) = management::headers(payload_len, Psn::new(0), slot, 0);
    bth.qpn = u32::from(slot) << QPN_SLOT_SHIFT | PASSING_INDEX;
    ext.deth = Some(Deth { qkey: MANAGEMENT_QKEY, source_qpn: PASSING_INDEX });
    let header_len = bth.opcode.info().header_len;
    let Some(room) = tx.push(&path, header_len + payload_len + usize::from(bth.pad)) else { return false };
    let (head, rest) = room.split_at_mut(header_len);
    emit_headers(&bth, &ext, head).expect("the room is exactly the opcode's header length");
    let (prefix, rest) = rest.split_at_mut(PREFIX_BYTES);
    let source = match meta.source.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    (prefix[0], prefix[1]) = (kind, meta.traffic_class);
    prefix[2..4].copy_from_slice(&meta.source.port().to_be_bytes());
    prefix[4..].copy_from_slice(&source.octets());
    let (data, pad) = rest.split_at_mut(bytes.len());
    data.copy_from_slice(bytes);
    pad.fill(0);
    true
}
