//! A peer's packets take a bounded amount of memory, even while the TX sink is full.

mod support;

use std::net::IpAddr;

use support::host::Memory;
use support::sink::Collector;
use support::{bring_up, meta_between, path_to, request_bth};
use terrace_transport::{AckPolicy, Qp, QpAttr, QpCap, QpConfig, QpState, QpType, Time};
use terrace_wire::{Extensions, Opcode, Packet, Reth};

const PEER: [u8; 4] = [10, 0, 0, 2];

fn queue_pair() -> Qp {
    let mut qp = Qp::new(QpConfig {
        qpn: 0x11,
        qp_type: QpType::Rc,
        cap: QpCap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 },
        sq_sig_all: true,
        has_srq: false,
        window_bytes: 1 << 20,
        rd_atomic_limit: 16,
        mtu_limit: 4096,
    });
    let attr = QpAttr {
        path_mtu: 256,
        access: 0x30e,
        path: Some(path_to(IpAddr::from(PEER))),
        dest_qpn: 0x22,
        port_num: 1,
        max_rd_atomic: 16,
        max_dest_rd_atomic: 16,
        ..QpAttr::default()
    };
    bring_up(&mut qp, &attr, QpState::Rts);
    qp
}

fn request(opcode: Opcode, psn: u32, reth: Option<Reth>) -> Packet<'static> {
    let bth = request_bth(opcode, 0x11, psn);
    Packet { bth, ext: Extensions { reth, ..Extensions::default() }, payload: &[] }
}

/// Lets a peer send `packets` while the TX sink is full; returns how many responses leave once it is not.
fn answers_to(packets: impl Iterator<Item = Packet<'static>>) -> usize {
    let (mut qp, host) = (queue_pair(), Memory::new(1 << 16));
    host.add_region(1, 0, 1 << 16, "lrw");
    let meta = meta_between(IpAddr::from(PEER), IpAddr::from([10, 0, 0, 1]), 0);
    let mut sink = Collector { room: Some(0), ..Collector::default() };
    for packet in packets {
        qp.handle_packet(|| Time(1), &meta, &packet, None, &host);
        qp.poll_transmit(|| Time(1), &host, &mut sink, AckPolicy::Now);
        host.events.borrow_mut().clear()
    }
    sink.room = None;
    qp.poll_transmit(|| Time(2), &host, &mut sink, AckPolicy::Now);
    sink.packets.len()
}

#[test]
fn alternating_naks_and_acks_are_bounded() {
    let write = Some(Reth { va: 0, rkey: 0, length: 0 });
    let first = request(Opcode::RcWriteOnly, 0, write);
    let in_turn = (0..100_000).map(|step| match step % 2 {
        0 => request(Opcode::RcSendOnly, 1, None),
        _ => request(Opcode::RcWriteOnly, 0, write),
    });
    assert!(answers_to(std::iter::once(first).chain(in_turn)) < 200);
}

#[test]
fn repeated_reads_are_bounded() {
    let read = |psn: u32| {
        let left = 1024 - psn * 256;
        request(Opcode::RcReadRequest, psn, Some(Reth { va: u64::from(psn) * 256, rkey: 1, length: left }))
    };
    assert!(answers_to((0..100_000).map(move |step| read(step % 4))) < 200);
}

/// All memory is absent and no access ends: a peer's accesses in progress are bounded.
#[test]
fn deferred_operations_are_bounded() {
    let (mut qp, host) = (queue_pair(), Memory::new(1 << 16));
    host.add_region(1, 0, 1 << 16, "lrwa");
    host.absent.borrow_mut().push(0..1 << 16);
    let meta = meta_between(IpAddr::from(PEER), IpAddr::from([10, 0, 0, 1]), 0);
    let mut sink = Collector::default();
    for step in 0..100_000u32 {
        let psn = qp.query().rq_psn;
        let packet = match step % 3 {
            0 => request(Opcode::RcReadRequest, psn, Some(Reth { va: 0, rkey: 1, length: 256 })),
            _ => Packet {
                payload: &[0; 4],
                ..request(Opcode::RcWriteOnly, psn, Some(Reth { va: 0, rkey: 1, length: 4 }))
            },
        };
        qp.handle_packet(|| Time(1), &meta, &packet, None, &host);
        qp.poll_transmit(|| Time(1), &host, &mut sink, AckPolicy::Now);
        if qp.state() == QpState::Err {
            break;
        }
    }
    assert!(host.under_way.borrow().len() < 600, "{}", host.under_way.borrow().len());
    assert!(format!("{qp:?}").len() < 200_000);
}
