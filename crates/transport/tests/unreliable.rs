//! Unreliable connections and datagrams over a bad link: messages that arrive are whole, and a lost message does not
//! damage later ones. Loss alone does not change the order either.

#[path = "link/random.rs"]
mod random;
mod support;

use std::collections::BTreeMap;
use std::net::IpAddr;

use random::Random;
use smallvec::smallvec;
use support::host::{Event, Memory};
use support::sink::Collector;
use support::{bring_up, meta_between, path_to};
use terrace_transport::{
    AckPolicy, Datagram, Payload, Qp, QpAttr, QpCap, QpConfig, QpState, QpType, RecvWr, SendFlags, SendOp,
    SendWr, Sge, Target, Time, WcFlags, WcStatus,
};
use terrace_wire::{GRH_LEN, Packet};

const MTU: u32 = 256;
const MESSAGES: u32 = 120;
/// Bytes for each message, in the memory of either side.
const SLOT_LEN: u64 = 2048;
const KEY: u32 = 1;
const QKEY: u32 = 0x1234;
const SEEDS: u64 = 300;

fn address(side: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, side])
}

fn queue_pair(qp_type: QpType, side: u8) -> Qp {
    queue_pair_with(qp_type, side, false)
}

fn queue_pair_with(qp_type: QpType, side: u8, has_srq: bool) -> Qp {
    let mut qp = Qp::new(QpConfig {
        qpn: u32::from(side),
        qp_type,
        cap: QpCap {
            max_send_wr: MESSAGES,
            max_recv_wr: MESSAGES,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        },
        sq_sig_all: true,
        has_srq,
        window_bytes: 1 << 16,
        rd_atomic_limit: 0,
        mtu_limit: MTU,
    });
    let attr = QpAttr {
        path_mtu: MTU,
        sq_psn: 0xff_fff0,
        rq_psn: 0xff_fff0,
        dest_qpn: u32::from(3 - side),
        access: 0xe,
        path: Some(path_to(address(3 - side))),
        qkey: QKEY,
        port_num: 1,
        ..QpAttr::default()
    };
    bring_up(&mut qp, &attr, QpState::Rts);
    qp
}

fn memory() -> Memory {
    let len = SLOT_LEN * u64::from(MESSAGES);
    let memory = Memory::new(len as usize);
    memory.add_region(KEY, 0, len, "lrw");
    memory
}

/// The message of this number: its data lies in the slot of this number.
fn message(qp_type: QpType, number: u32, random: &mut Random) -> SendWr {
    let slot = SLOT_LEN * u64::from(number);
    let longest = if qp_type == QpType::Ud { u64::from(MTU) } else { SLOT_LEN - 64 };
    let length = random.below(longest + 1) as u32;
    let op = match qp_type {
        QpType::Uc if random.percent(40) => SendOp::WriteImm { va: slot, rkey: KEY, imm: number },
        _ => SendOp::SendImm(number),
    };
    SendWr {
        wr_id: number.into(),
        op,
        payload: Payload::Sges(smallvec![Sge { addr: slot, length, lkey: KEY }]),
        flags: SendFlags::SIGNALED,
        target: Some(Target::Datagram(Box::new(Datagram { path: path_to(address(2)), qpn: 2, qkey: QKEY }))),
    }
}

/// Sends all messages through a link; returns the numbers of those that arrived, in order.
fn run(qp_type: QpType, seed: u64, reorders: bool) -> Vec<u32> {
    let mut random = Random::new(seed);
    let (mut sender, mut receiver) = (queue_pair(qp_type, 1), queue_pair(qp_type, 2));
    let (ours, theirs) = (memory(), memory());
    theirs.write(0, &vec![0; (SLOT_LEN * u64::from(MESSAGES)) as usize]);
    for slot in 0..u64::from(MESSAGES) {
        let sge = Sge { addr: slot * SLOT_LEN, length: SLOT_LEN as u32, lkey: KEY };
        receiver.post_recv(RecvWr { wr_id: slot, sges: smallvec![sge] }, &theirs).expect("there is room");
    }
    let messages: Vec<SendWr> = (0..MESSAGES).map(|number| message(qp_type, number, &mut random)).collect();
    for wr in &messages {
        sender.post_send(|| Time(1), &mut wr.clone(), &ours, &mut ()).expect("there is room");
    }
    let mut sink = Collector::default();
    sender.poll_transmit(|| Time(1), &ours, &mut sink, AckPolicy::Now);
    let mut link = BTreeMap::new();
    for (order, (_, bytes)) in (0u64..).zip(sink.packets) {
        let copies = if random.percent(5) { 0 } else { 1 + usize::from(reorders && random.percent(5)) };
        for _ in 0..copies {
            let late = if reorders && random.percent(5) { random.below(20) } else { 0 };
            link.insert((order + late, random.next()), bytes.clone());
        }
    }
    let meta = meta_between(address(1), address(2), 0);
    let mut arrived = Vec::new();
    for bytes in link.values() {
        let packet = Packet::parse(bytes).expect("well-formed");
        receiver.handle_packet(|| Time(2), &meta, &packet, None, &theirs);
        while let Some(event) = theirs.poll_event() {
            let Event::RecvComplete(wc) = event else { panic!("{event:?}") };
            assert_eq!((wc.status, wc.flags.contains(WcFlags::WITH_IMM)), (WcStatus::Success, true));
            check_content(&messages[wc.imm as usize], wc.wr_id, wc.byte_len, &ours, &theirs, qp_type);
            arrived.push(wc.imm);
        }
    }
    let mut silent = Collector::default();
    receiver.poll_transmit(|| Time(3), &theirs, &mut silent, AckPolicy::Now);
    assert!(silent.packets.is_empty(), "an unreliable queue pair answers");
    assert_eq!(receiver.state(), QpState::Rts);
    arrived
}

fn check_content(wr: &SendWr, receive: u64, len: u32, ours: &Memory, theirs: &Memory, qp_type: QpType) {
    let header_len = if qp_type == QpType::Ud { GRH_LEN as u32 } else { 0 };
    assert_eq!(u64::from(len - header_len), wr.payload.len());
    let place = match wr.op {
        SendOp::WriteImm { va, .. } => va,
        _ => receive * SLOT_LEN + u64::from(header_len),
    };
    let data_len = wr.payload.len() as usize;
    assert_eq!(theirs.read(place, data_len), ours.read(wr.wr_id * SLOT_LEN, data_len));
}

#[test]
fn connections_deliver_whole_messages_in_order_under_loss() {
    let mut arrived = 0;
    for seed in 0..SEEDS {
        let numbers = run(QpType::Uc, seed, false);
        assert!(numbers.is_sorted_by(|one, next| one < next), "seed {seed}: {numbers:?}");
        arrived += numbers.len() as u64;
    }
    let share = arrived * 100 / (SEEDS * u64::from(MESSAGES));
    assert!((60..95).contains(&share), "{share} % arrived");
}

#[test]
fn connections_deliver_whole_messages_under_all_faults() {
    // A receive whose message was cut short keeps the data of the start; a WRITE may be repeated into its own slot.
    for seed in 0..SEEDS {
        assert!(!run(QpType::Uc, seed, true).is_empty(), "seed {seed}");
    }
}

#[test]
fn datagrams_are_delivered_whole() {
    for seed in 0..SEEDS {
        assert!(!run(QpType::Ud, seed, true).is_empty(), "seed {seed}");
    }
}

#[test]
fn receives_behind_a_pending_write_complete_when_it_is_done() {
    let (mut sender, mut receiver) = (queue_pair(QpType::Uc, 1), queue_pair(QpType::Uc, 2));
    let (ours, theirs) = (memory(), memory());
    theirs.absent.borrow_mut().push(0..SLOT_LEN);
    for number in 0..MESSAGES {
        let op = match number {
            0 => SendOp::WriteImm { va: 0, rkey: KEY, imm: 0 },
            number => SendOp::SendImm(number),
        };
        let payload = Payload::Sges(smallvec![Sge { addr: 0, length: 8, lkey: KEY }]);
        let (wr_id, flags) = (number.into(), SendFlags::SIGNALED);
        sender
            .post_send(|| Time(1), &mut SendWr { wr_id, op, payload, flags, target: None }, &ours, &mut ())
            .expect("there is room");
        let sges = smallvec![Sge { addr: SLOT_LEN, length: 8, lkey: KEY }];
        receiver.post_recv(RecvWr { wr_id, sges }, &theirs).expect("there is room");
    }
    let mut sink = Collector::default();
    sender.poll_transmit(|| Time(1), &ours, &mut sink, AckPolicy::Now);
    let meta = meta_between(address(1), address(2), 0);
    for (_, bytes) in std::mem::take(&mut sink.packets) {
        let packet = Packet::parse(&bytes).expect("well-formed");
        receiver.handle_packet(|| Time(2), &meta, &packet, None, &theirs);
        receiver.poll_transmit(|| Time(2), &theirs, &mut sink, AckPolicy::Now);
    }
    assert_eq!(theirs.poll_event(), None);
    assert!(theirs.complete(0, Ok(())));
    receiver.wake();
    receiver.poll_transmit(|| Time(3), &theirs, &mut sink, AckPolicy::Now);
    for number in 0..MESSAGES {
        let event = theirs.poll_event();
        assert!(matches!(event, Some(Event::RecvComplete(wc)) if wc.imm == number), "{number}: {event:?}");
    }
    assert!(sink.packets.is_empty());
}

/// The memory of a receive is no longer registered while earlier messages wait for the memory of a WRITE.
#[test]
fn receives_end_in_order_when_one_of_them_fails() {
    let (mut sender, mut receiver) = (queue_pair(QpType::Uc, 1), queue_pair(QpType::Uc, 2));
    let (ours, theirs) = (memory(), memory());
    theirs.absent.borrow_mut().push(0..SLOT_LEN);
    for (wr_id, op) in (0..).zip([SendOp::Write { va: 0, rkey: KEY }, SendOp::Send, SendOp::Send]) {
        let payload = Payload::Sges(smallvec![Sge { addr: 0, length: 8, lkey: KEY }]);
        let mut wr = SendWr { wr_id, op, payload, flags: SendFlags::SIGNALED, target: None };
        sender.post_send(|| Time(1), &mut wr, &ours, &mut ()).expect("there is room");
    }
    for (wr_id, lkey) in [(1, KEY), (2, KEY + 1), (3, KEY)] {
        let sges = smallvec![Sge { addr: SLOT_LEN, length: 8, lkey }];
        receiver.post_recv(RecvWr { wr_id, sges }, &theirs).expect("there is room");
    }
    let mut sink = Collector::default();
    sender.poll_transmit(|| Time(1), &ours, &mut sink, AckPolicy::Now);
    let meta = meta_between(address(1), address(2), 0);
    for (_, bytes) in std::mem::take(&mut sink.packets) {
        let packet = Packet::parse(&bytes).expect("well-formed");
        receiver.handle_packet(|| Time(2), &meta, &packet, None, &theirs);
    }
    assert_eq!(receiver.state(), QpState::Err);
    theirs.complete(0, Ok(()));
    receiver.wake();
    receiver.poll_transmit(|| Time(3), &theirs, &mut sink, AckPolicy::Now);
    let events = std::iter::from_fn(|| theirs.poll_event());
    let ended: Vec<_> = events
        .filter_map(|event| match event {
            Event::RecvComplete(wc) => Some((wc.wr_id, wc.status)),
            _ => None,
        })
        .collect();
    assert_eq!(ended, [(1, WcStatus::Flushed), (2, WcStatus::LocalProtection), (3, WcStatus::Flushed)]);
}

/// Otherwise the queue pair would keep it from the others.
#[test]
fn a_receive_that_no_message_used_returns_to_the_shared_queue() {
    // A datagram that is too long for the receive, and a message without its middle.
    for (qp_type, len) in [(QpType::Ud, MTU), (QpType::Uc, 3 * MTU)] {
        let (mut sender, mut receiver) = (queue_pair(qp_type, 1), queue_pair_with(qp_type, 2, true));
        let (ours, theirs) = (memory(), memory());
        let sges = smallvec![Sge { addr: 0, length: len, lkey: KEY }];
        theirs.shared_receives.borrow_mut().push_back(RecvWr { wr_id: 7, sges: sges.clone() });
        let wr = message(qp_type, 1, &mut Random::new(1));
        let mut wr = SendWr { op: SendOp::Send, payload: Payload::Sges(sges), ..wr };
        sender.post_send(|| Time(1), &mut wr, &ours, &mut ()).expect("there is room");
        let mut sink = Collector::default();
        sender.poll_transmit(|| Time(1), &ours, &mut sink, AckPolicy::Now);
        let (meta, last) = (meta_between(address(1), address(2), 0), sink.packets.len() - 1);
        for (_, bytes) in [&sink.packets[0], &sink.packets[last]] {
            let packet = Packet::parse(bytes).expect("well-formed");
            receiver.handle_packet(|| Time(2), &meta, &packet, None, &theirs);
        }
        assert_eq!(theirs.poll_event(), None, "{qp_type:?}");
        assert_eq!(theirs.shared_receives.borrow().len(), 1, "{qp_type:?}");
    }
}
