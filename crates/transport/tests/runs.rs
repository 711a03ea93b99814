//! Runs: packets of a message that arrive as one. A peer in another process makes them, so any of them may be wrong.

mod support;

use std::net::IpAddr;

use support::host::{Event, Memory};
use support::sink::{Collector, RunCollector};
use support::{bring_up, meta_between, path_to, request_bth};
use terrace_transport::*;
use terrace_wire::{Aeth, AppendEth, AppendFlags, Extensions, Opcode, Operation, Packet, Reth, Syndrome};

const KEY: u32 = 0x101;
const MTU: u64 = 1024;
const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

fn responder(qp_type: QpType) -> (Qp, Memory) {
    let cap = QpCap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let mut qp = Qp::new(QpConfig {
        qpn: 1,
        qp_type,
        cap,
        sq_sig_all: true,
        has_srq: false,
        window_bytes: 1 << 16,
        rd_atomic_limit: 1,
        mtu_limit: 4096,
    });
    let attr = QpAttr {
        path_mtu: MTU as u32,
        dest_qpn: 2,
        path: Some(path_to(PEER)),
        port_num: 1,
        max_dest_rd_atomic: 1,
        access: access::REMOTE_WRITE,
        ..QpAttr::default()
    };
    bring_up(&mut qp, &attr, QpState::Rtr);
    let host = Memory::new(1 << 16);
    host.add_region(KEY, 0, 1 << 16, "lrwe");
    qp.post_recv(RecvWr { wr_id: 7, sges: SgeList::from_slice(&[sge()]) }, &host).expect("posted");
    (qp, host)
}

fn requester() -> (Qp, Memory) {
    let (responder, host) = responder(QpType::Rc);
    let mut qp = Qp::new(*responder.config());
    let attr = QpAttr {
        path_mtu: MTU as u32,
        dest_qpn: 2,
        path: Some(path_to(PEER)),
        port_num: 1,
        timeout: 14,
        retry_cnt: 7,
        ..QpAttr::default()
    };
    bring_up(&mut qp, &attr, QpState::Rts);
    (qp, host)
}

fn sge() -> Sge {
    Sge { addr: 0, length: 1 << 16, lkey: KEY }
}

fn arrive(qp: &mut Qp, host: &Memory, opcode: Opcode, psn: u32, len: u64) {
    arrive_in(qp, host, opcode, psn, len, len);
}

/// The same, in an APPEND of a record of `record_len` bytes.
fn arrive_in(qp: &mut Qp, host: &Memory, opcode: Opcode, psn: u32, len: u64, record_len: u64) {
    let bth = request_bth(opcode, 1, psn);
    let reth = opcode.info().headers.contains(terrace_wire::Headers::RETH);
    let reth = reth.then_some(Reth { va: 0, rkey: KEY, length: len as u32 });
    let append = Some(AppendEth { rkey: KEY, length: record_len as u32, flags: AppendFlags::empty() });
    let packet = Packet { bth, ext: Extensions { reth, append, ..Extensions::default() }, payload: &[] };
    *host.run.borrow_mut() = vec![psn as u8; len as usize];
    qp.handle_run(|| Time(1), &meta_between(PEER, OWN, 0), &packet, len, None, host);
}

fn next_psn(qp: &Qp) -> u32 {
    qp.query().rq_psn
}

#[test]
fn a_run_stands_for_its_packets() {
    for (first, middle, last) in [
        (Opcode::RcSendFirst, Opcode::RcSendMiddle, Opcode::RcSendLast),
        (Opcode::UcSendFirst, Opcode::UcSendMiddle, Opcode::UcSendLast),
    ] {
        let (mut qp, host) = responder(if first == Opcode::RcSendFirst { QpType::Rc } else { QpType::Uc });
        arrive(&mut qp, &host, first, 0, 5 * MTU);
        arrive(&mut qp, &host, middle, 5, 8 * MTU);
        arrive(&mut qp, &host, last, 13, 5 * MTU + 1);
        assert_eq!((next_psn(&qp), qp.counters().rx_packets, qp.counters().runs_received), (19, 19, 3));
        let received = std::iter::from_fn(|| host.poll_event())
            .find_map(|event| if let Event::RecvComplete(wc) = event { Some(wc) } else { None });
        assert_eq!(
            received.map(|wc| (wc.status, wc.byte_len)),
            Some((WcStatus::Success, 18 * MTU as u32 + 1))
        );
        let bytes = host.bytes.borrow();
        assert!(bytes[..5 << 10].iter().all(|byte| *byte == 0) && bytes[18 << 10] == 13);
    }
}

/// A WRITE's run is one access to memory, whatever it stands for.
#[test]
fn a_run_of_a_write_is_written() {
    let (mut qp, host) = responder(QpType::Rc);
    arrive(&mut qp, &host, Opcode::RcWriteOnly, 0, 5 * MTU);
    assert_eq!((next_psn(&qp), qp.state()), (5, QpState::Rtr));
    assert!(host.bytes.borrow()[..5 << 10].iter().all(|byte| *byte == 0));
}

#[test]
fn what_is_no_run_is_dropped() {
    let (mut qp, host) = responder(QpType::Rc);
    for (opcode, len) in [
        (Opcode::RcSendFirst, 0),
        (Opcode::RcSendOnly, 4608),
        (Opcode::RcSendOnly, 16 * MTU + 1),
        (Opcode::RcReadRequest, 5 * MTU),
        (Opcode::RcReadResponseOnly, 5 * MTU),
        (Opcode::UdSendOnly, 5 * MTU),
    ] {
        let before = qp.counters().dropped;
        arrive(&mut qp, &host, opcode, 0, len);
        assert_eq!((qp.counters().dropped, next_psn(&qp)), (before + 1, 0), "{opcode:?} {len}");
    }
    assert_eq!(qp.state(), QpState::Rtr);
}

/// All packets of a message but the last one are full.
#[test]
fn a_run_that_ends_within_a_message_has_full_packets() {
    let (mut qp, host) = responder(QpType::Rc);
    arrive(&mut qp, &host, Opcode::RcSendFirst, 0, 5 * MTU + 1);
    assert_eq!((qp.state(), qp.counters().error_naks_sent), (QpState::Err, 1));
}

#[test]
fn a_run_ahead_of_its_turn_is_refused_and_a_repeated_one_acknowledged() {
    let (mut qp, host) = responder(QpType::Rc);
    arrive(&mut qp, &host, Opcode::RcSendMiddle, 5, 5 * MTU);
    assert_eq!((qp.counters().sequence_naks_sent, next_psn(&qp)), (1, 0));
    arrive(&mut qp, &host, Opcode::RcSendOnly, 0, 5 * MTU);
    arrive(&mut qp, &host, Opcode::RcSendOnly, 0, 5 * MTU);
    assert_eq!((qp.counters().duplicates, qp.counters().requests, next_psn(&qp)), (1, 1, 5));
}

/// The peer has had all packets of the first run, and takes a run of repeated and new ones for a repetition.
#[test]
fn a_run_has_either_repeated_or_new_packets() {
    let (mut qp, host) = requester();
    let sge = Sge { addr: 0, length: 20 * MTU as u32, lkey: KEY };
    let op = SendOp::Write { va: 0, rkey: KEY };
    let payload = Payload::Sges(SgeList::from_slice(&[sge]));
    let mut wr = SendWr { wr_id: 1, op, payload, flags: SendFlags::SIGNALED, target: None };
    qp.post_send(|| Time(1), &mut wr, &host, &mut ()).expect("posted");
    let sent = |qp: &mut Qp, room| {
        let mut sink = RunCollector::<8192> { room, ..RunCollector::default() };
        qp.poll_transmit(|| Time(1), &host, &mut sink, AckPolicy::Now);
        let psn = |(_, bytes): &(_, Vec<u8>)| Packet::parse(bytes).map_or(0, |packet| packet.bth.psn.get());
        sink.packets.iter().map(psn).collect::<Vec<_>>()
    };
    assert_eq!(sent(&mut qp, Some(1)), [0], "eight packets");
    let deadline = qp.deadline().expect("an ACK is due");
    qp.handle_timeout(deadline, &host);
    let aeth = Some(Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn: 0 });
    let ext = Extensions { aeth, ..Extensions::default() };
    let ack = Packet { bth: request_bth(Opcode::RcAcknowledge, 1, 3), ext, payload: &[] };
    qp.handle_packet(|| deadline, &meta_between(PEER, OWN, 0), &ack, None, &host);
    assert_eq!(sent(&mut qp, None)[..5], [4, 5, 6, 7, 8]);
}

/// The answers that the queue pair sends now: their PSNs, and the value of those that have one.
fn answers(qp: &mut Qp, host: &Memory) -> Vec<(u32, Option<u64>)> {
    let mut sink = Collector::default();
    qp.poll_transmit(|| Time(1), host, &mut sink, AckPolicy::Now);
    let answer = |(_, bytes): &(_, Vec<u8>)| {
        let packet = Packet::parse(bytes).expect("a packet");
        assert_ne!(packet.bth.opcode.info().operation, Operation::ReadResponse);
        (packet.bth.psn.get(), packet.ext.atomic_ack)
    };
    sink.packets.iter().map(answer).collect()
}

/// A record is answered with the PSN of its last packet, whether the peer repeats its runs or cuts it otherwise.
#[test]
fn runs_of_a_record_are_appended_once() {
    let (mut qp, host) = responder(QpType::Rc);
    let whole = 6 * MTU + 3;
    arrive(&mut qp, &host, Opcode::RcAppendOnly, 0, whole);
    assert_eq!(answers(&mut qp, &host), [(6, Some(0))]);
    arrive(&mut qp, &host, Opcode::RcAppendOnly, 0, whole);
    assert_eq!(answers(&mut qp, &host), [(6, Some(0))]);
    arrive(&mut qp, &host, Opcode::RcAppendLast, 1, whole - MTU);
    assert_eq!((answers(&mut qp, &host), next_psn(&qp)), (vec![(6, Some(0))], 7));

    let (first, record) = (5 * MTU, 15 * MTU + 1);
    arrive_in(&mut qp, &host, Opcode::RcAppendFirst, 7, first, record);
    // Of the peer's next cut, two packets are repeated: it continues behind the ACK.
    arrive_in(&mut qp, &host, Opcode::RcAppendLast, 10, record - 3 * MTU, record);
    assert_eq!((answers(&mut qp, &host), next_psn(&qp)), (vec![(11, None)], 12));
    arrive_in(&mut qp, &host, Opcode::RcAppendMiddle, 12, 5 * MTU, record);
    arrive_in(&mut qp, &host, Opcode::RcAppendLast, 17, 5 * MTU + 1, record);
    assert_eq!((answers(&mut qp, &host), next_psn(&qp)), (vec![(16, None), (22, Some(whole))], 23));
    let records = &host.records.borrow()[&KEY];
    assert_eq!(records.len() as u64, whole + record);
    let second = &records[whole as usize..];
    let parts = [(0..5, 7), (5..10, 12), (10..15, 17)];
    for (packets, byte) in parts {
        assert!(second[packets.start << 10..packets.end << 10].iter().all(|got| *got == byte));
    }
}
