//! Piggybacked ACKs: the sink attaches an ACK to a packet, and the queue pair handles it before the packet.

mod support;

use support::host::{Event, Memory};
use support::sink::Collector;
use support::{bring_up, meta_between, path_to};
use terrace_transport::*;
use terrace_wire::{Opcode, Packet, Psn};

const KEY: u32 = 0x101;

fn node(side: u8, has_srq: bool) -> (Qp, Memory) {
    let cap = QpCap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let mut qp = Qp::new(QpConfig {
        qpn: side.into(),
        qp_type: QpType::Rc,
        cap,
        sq_sig_all: true,
        has_srq,
        window_bytes: 1 << 16,
        rd_atomic_limit: 1,
        mtu_limit: 4096,
    });
    let attr = QpAttr {
        path_mtu: 1024,
        dest_qpn: u32::from(3 - side),
        path: Some(path_to([10, 0, 0, 3 - side].into())),
        port_num: 1,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        access: access::REMOTE_READ,
        ..QpAttr::default()
    };
    bring_up(&mut qp, &attr, QpState::Rts);
    let host = Memory::new(4096);
    host.add_region(KEY, 0, 4096, "lrwag");
    (qp, host)
}

fn send(wr_id: u64, lkey: u32) -> SendWr {
    let payload = Payload::Sges(SgeList::from_slice(&[Sge { addr: 0, length: 8, lkey }]));
    SendWr { wr_id, op: SendOp::Send, payload, flags: SendFlags::SIGNALED, target: None }
}

fn receive(wr_id: u64) -> RecvWr {
    RecvWr { wr_id, sges: SgeList::from_slice(&[Sge { addr: 2048, length: 64, lkey: KEY }]) }
}

/// A queue pair's packets, each with the ACK that it piggybacks.
fn sent(qp: &mut Qp, host: &Memory) -> Vec<(Vec<u8>, Option<Psn>)> {
    let mut sink = Collector { acks: Some(Vec::new()), ..Collector::default() };
    qp.poll_transmit(|| Time(1), host, &mut sink, AckPolicy::Now);
    let acks = sink.acks.unwrap_or_default();
    let ack_of = |at: usize| acks.iter().find(|(carrier, _)| *carrier == at).map(|(_, psn)| *psn);
    sink.packets.into_iter().enumerate().map(|(at, (_, bytes))| (bytes, ack_of(at))).collect()
}

fn hand(packets: &[(Vec<u8>, Option<Psn>)], to: u8, qp: &mut Qp, host: &Memory) {
    let meta = meta_between([10, 0, 0, 3 - to].into(), [10, 0, 0, to].into(), 0);
    for (bytes, ack) in packets {
        let packet = Packet::parse(bytes).expect("a packet");
        qp.handle_packet(|| Time(2), &meta, &packet, *ack, host);
    }
}

fn events(host: &Memory) -> Vec<Event> {
    std::iter::from_fn(|| host.poll_event()).collect()
}

/// The piggybacked ACK completes earlier requests, and a request that cannot be sent then fails. The queue pair
/// is in error by then, and drops the packet itself.
#[test]
fn a_packet_is_dropped_when_its_piggybacked_ack_ends_the_connection() {
    let ((mut a, ours), (mut b, theirs)) = (node(1, true), node(2, false));
    ours.shared_receives.borrow_mut().push_back(receive(7));
    b.post_recv(receive(8), &theirs).expect("posted");
    a.post_send(|| Time(1), &mut send(1, KEY), &ours, &mut ()).expect("posted");
    a.post_send(|| Time(1), &mut send(2, KEY ^ 0x100), &ours, &mut ()).expect("posted");
    let request = sent(&mut a, &ours);
    assert_eq!(request.len(), 1);
    hand(&request, 2, &mut b, &theirs);
    b.post_send(|| Time(1), &mut send(3, KEY), &theirs, &mut ()).expect("posted");
    let reply = sent(&mut b, &theirs);
    assert!(matches!(reply.as_slice(), [(_, Some(_))]), "{reply:?}");
    hand(&reply, 1, &mut a, &ours);
    let events = events(&ours);
    let statuses = events.iter().filter_map(|event| match event {
        Event::SendComplete(wc) => Some((wc.wr_id, wc.status)),
        _ => None,
    });
    assert!(statuses.eq([(1, WcStatus::Success), (2, WcStatus::LocalProtection)]), "{events:?}");
    assert_eq!(events.last(), Some(&Event::Raised(QpEvent::LastWqeReached)));
    assert_eq!((a.state(), ours.shared_receives.borrow().len()), (QpState::Err, 1));
}

/// A packet that is cancelled because its lkey is invalid piggybacks no ACK.
#[test]
fn a_cancelled_packet_piggybacks_no_ack() {
    let ((mut a, ours), (mut b, theirs)) = (node(1, false), node(2, false));
    b.post_recv(receive(8), &theirs).expect("posted");
    a.post_send(|| Time(1), &mut send(1, KEY), &ours, &mut ()).expect("posted");
    hand(&sent(&mut a, &ours), 2, &mut b, &theirs);
    b.post_send(|| Time(1), &mut send(3, KEY), &theirs, &mut ()).expect("posted");
    b.post_send(|| Time(1), &mut send(4, KEY ^ 0x100), &theirs, &mut ()).expect("posted");
    let reply = sent(&mut b, &theirs);
    assert_eq!(reply.len(), 2, "a reply, and the ACK alone: {reply:?}");
    hand(&reply[1..], 1, &mut a, &ours);
    assert!(matches!(events(&ours).as_slice(), [Event::SendComplete(wc)] if wc.wr_id == 1));
}

/// With [`AckPolicy::First`] an ACK is sent before requests, unless READ responses are pending ahead of
/// it: requests do not wait for those.
#[test]
fn the_policy_first_sends_acks_before_requests() {
    for (acks, has_read, expected) in [
        (AckPolicy::Now, false, [Opcode::RcSendOnly, Opcode::RcAcknowledge].as_slice()),
        (AckPolicy::First, false, &[Opcode::RcAcknowledge, Opcode::RcSendOnly]),
        (AckPolicy::First, true, &[Opcode::RcSendOnly, Opcode::RcReadResponseOnly, Opcode::RcAcknowledge]),
    ] {
        let ((mut a, ours), (mut b, theirs)) = (node(1, false), node(2, false));
        b.post_recv(receive(8), &theirs).expect("posted");
        if has_read {
            a.post_send(
                || Time(1),
                &mut SendWr { op: SendOp::Read { va: 0, rkey: KEY }, ..send(1, KEY) },
                &ours,
                &mut (),
            )
            .expect("posted");
        }
        a.post_send(|| Time(1), &mut send(2, KEY), &ours, &mut ()).expect("posted");
        hand(&sent(&mut a, &ours), 2, &mut b, &theirs);
        b.post_send(|| Time(1), &mut send(3, KEY), &theirs, &mut ()).expect("posted");
        let mut sink = Collector::default();
        assert_eq!(b.poll_transmit(|| Time(3), &theirs, &mut sink, acks), Transmit::Idle);
        let opcodes =
            sink.packets.iter().map(|(_, bytes)| Packet::parse(bytes).expect("a packet").bth.opcode);
        assert!(opcodes.eq(expected.iter().copied()), "{acks:?}, READ {has_read}: {:?}", sink.packets);
    }
}

/// A queue pair whose packets are to go another way sends those that wait once nothing is in flight any more.
#[test]
fn a_draining_queue_pair_starts_requests_when_it_is_idle() {
    let ((mut a, ours), (mut b, theirs)) = (node(1, false), node(2, false));
    (0..3).for_each(|id| b.post_recv(receive(id), &theirs).expect("posted"));
    let post = |a: &mut Qp, id| a.post_send(|| Time(1), &mut send(id, KEY), &ours, &mut ()).expect("posted");
    a.set_draining(true);
    post(&mut a, 1);
    let first = sent(&mut a, &ours);
    assert_eq!(first.len(), 1, "nothing was in flight");
    post(&mut a, 2);
    post(&mut a, 3);
    assert!(!a.is_idle() && !a.wants_transmit() && sent(&mut a, &ours).is_empty());
    hand(&first, 2, &mut b, &theirs);
    hand(&sent(&mut b, &theirs), 1, &mut a, &ours);
    assert!(a.is_idle() && a.wants_transmit());
    a.set_draining(false);
    assert_eq!(sent(&mut a, &ours).len(), 2);
}
