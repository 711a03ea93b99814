//! The protocol's rules, one at a time.

mod common;

use common::*;
use terrace_cm::*;
use terrace_wire::Time;
use terrace_wire::cm::*;

fn fair() -> World {
    World::new(1, Weather::default())
}

fn everything_lost() -> Weather {
    Weather { lost: 100, ..Weather::default() }
}

#[test]
fn both_ends_agree() {
    let mut world = fair();
    let [active, passive] = world.connected();
    let (a, to_b) = world.ends[0].agreed(active).expect("known");
    let (b, to_a) = world.ends[1].agreed(passive).expect("known");
    assert_eq!((a.local_qpn, a.remote_qpn, b.local_qpn, b.remote_qpn), (11, 22, 22, 11));
    assert_eq!((a.rq_psn, a.sq_psn), (b.sq_psn, b.rq_psn));
    assert_ne!(a.rq_psn, b.rq_psn);
    // One end's responder resources are the other's initiator depth.
    assert_eq!((a.responder_resources, a.initiator_depth), (3, 2));
    assert_eq!((b.responder_resources, b.initiator_depth), (2, 3));
    assert_eq!((a.retry_count, a.rnr_retry_count, b.retry_count, b.rnr_retry_count), (7, 5, 7, 6));
    // The smaller of both path MTUs.
    assert_eq!((a.path_mtu, b.path_mtu), (3, 3));
    assert_eq!((to_b.remote.ip(), to_a.remote.ip()), (address(1), address(0)));
}

#[test]
fn a_request_says_what_the_program_said() {
    let mut world = fair();
    world.ends[1].listen(ListenerId(5), service(), Some(address(1)), 1).expect("free");
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let EventKind::Request { listener, header, req } = world.take_only(1).kind else { panic!("no request") };
    assert_eq!(listener, ListenerId(5));
    assert_eq!((header.source, header.source_port, header.destination), (address(0), 40000, address(1)));
    assert_eq!(req.private_data[IP_HEADER_BYTES..][..6], *b"hello\0");
}

#[test]
fn nobody_listens() {
    let mut world = fair();
    // A listener at another address does not match.
    world.ends[1].listen(ListenerId(1), service(), Some([10, 9, 9, 9].into()), 1).expect("free");
    let conn = world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let event = world.take_only(0);
    assert_eq!((event.conn, event.owner), (conn, Some(7)));
    let EventKind::Rejected { reason, .. } = event.kind else { panic!("{event:?}") };
    assert_eq!(reason, RejReason::INVALID_SERVICE_ID);
    assert_eq!(world.ends[1].connection_count(), 0);
}

#[test]
fn a_listener_that_was_just_left_may_be_back_in_time() {
    let mut world = fair();
    world.ends[1].listen(ListenerId(1), service(), None, 1).expect("free");
    world.ends[1].stop_listening(ListenerId(1), world.now);
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    assert_eq!(world.take_heard(0), []);
    world.ends[1].listen(ListenerId(2), service(), None, 1).expect("free");
    world.run_for(SECOND_NS / 2);
    assert!(matches!(world.take_only(1).kind, EventKind::Request { .. }));
    // The REQ is not held for ever.
    world.ends[1].stop_listening(ListenerId(2), world.now);
    world.run_for(8 * SECOND_NS);
    world.take_heard(0);
    world.ends[0].connect(world.now, 8, &connect_from(0, 12)).expect("sent");
    world.run_for(1000);
    assert!(matches!(world.take_only(0).kind, EventKind::Rejected { .. }));
}

#[test]
fn a_service_that_had_a_connection_is_asked_again() {
    let mut world = fair();
    world.connected();
    world.ends[1].stop_listening(ListenerId(0), world.now);
    // Longer than a REQ is held for a listener that was just closed.
    world.run_for(8 * SECOND_NS);
    world.ends[0].connect(world.now, 8, &connect_from(0, 12)).expect("sent");
    world.run_for(1000);
    assert_eq!(world.take_heard(0), []);
    world.ends[1].listen(ListenerId(2), service(), None, 1).expect("free");
    world.run_for(SECOND_NS);
    let next = world.take_only(1);
    assert!(matches!(next.kind, EventKind::Request { .. }));
    // The active end does not repeat it for long.
    world.ends[1].reject(world.now, next.conn, RejReason::CONSUMER_DEFINED, &[]).expect("refused");
    world.ends[1].stop_listening(ListenerId(2), world.now);
    world.run_for(8 * SECOND_NS);
    world.take_heard(0);
    world.ends[0].connect(world.now, 9, &connect_from(0, 13)).expect("sent");
    world.run_for(8 * SECOND_NS);
    let refused = world.take_only(0);
    assert!(matches!(refused.kind, EventKind::Rejected { reason: RejReason::INVALID_SERVICE_ID, .. }));
}

#[test]
fn a_request_that_nobody_has_heard_of_is_for_the_next_listener() {
    for told_to_wait in [false, true] {
        let mut world = fair();
        world.ends[1].listen(ListenerId(1), service(), None, 1).expect("free");
        world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
        // A request that is repeated while it waits for the program is answered with an MRA.
        world.run_for(if told_to_wait { SECOND_NS } else { 1000 });
        assert!(matches!(world.take_only(1).kind, EventKind::Request { .. }));
        world.ends[1].stop_listening(ListenerId(1), world.now);
        world.ends[1].listen(ListenerId(2), service(), None, 1).expect("free");
        world.run_for(SECOND_NS);
        match told_to_wait {
            false => assert!(matches!(world.take_only(1).kind, EventKind::Request { .. })),
            true => assert!(matches!(world.take_only(0).kind, EventKind::Rejected { .. })),
        }
    }
}

#[test]
fn a_program_refuses() {
    let mut world = fair();
    world.ends[1].listen(ListenerId(1), service(), None, 1).expect("free");
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let passive = world.take_only(1).conn;
    world.ends[1].reject(world.now, passive, RejReason::CONSUMER_DEFINED, b"no").expect("refused");
    // The REJ is lost; the repeated REQ is rejected again, without a second event.
    world.set_weather(everything_lost());
    world.run_for(1);
    world.set_weather(Weather::default());
    world.run_for(SECOND_NS);
    let EventKind::Rejected { reason, private_data } = world.take_only(0).kind else { panic!("not refused") };
    assert_eq!((reason, &private_data[..3]), (RejReason::CONSUMER_DEFINED, &b"no\0"[..]));
    assert_eq!(world.take_heard(1), []);
}

#[test]
fn a_peer_that_does_not_answer_is_given_up() {
    let mut world = World::new(1, everything_lost());
    let started = world.now;
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(100 * SECOND_NS);
    assert_eq!(world.take_only(0).kind, EventKind::Unreachable);
    let timing = Timing::default();
    // All REQs, and a REJ for the timeout.
    assert_eq!(world.sent, u64::from(timing.attempts) + 1);
    assert!(world.now > started);
}

#[test]
fn a_program_that_thinks_is_waited_for() {
    let mut world = fair();
    world.ends[1].listen(ListenerId(1), service(), None, 1).expect("free");
    let active = world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(50 * SECOND_NS);
    let passive = world.take_only(1).conn;
    world.ends[1].take_request(passive, 8);
    assert_eq!(world.take_heard(0), []);
    // The REQ, its one repetition, and the MRA in response.
    assert_eq!(world.sent, 3);
    world.ends[1].accept(world.now, passive, &accept_with(22)).expect("accepted");
    world.run_for(1000);
    assert!(matches!(world.take_only(0).kind, EventKind::Response(_)));
    world.ends[0].establish(world.now, active).expect("established");
}

#[test]
fn an_rtu_that_is_lost_is_sent_again() {
    let mut world = fair();
    let [active, _passive] = world.accepted();
    world.ends[0].establish(world.now, active).expect("established");
    world.set_weather(everything_lost());
    world.run_for(1);
    world.set_weather(Weather::default());
    assert_eq!(world.take_heard(1), []);
    world.run_for(SECOND_NS);
    assert_eq!(world.take_only(1).kind, EventKind::Established);
}

#[test]
fn traffic_stands_for_an_rtu() {
    let mut world = fair();
    let [_, passive] = world.connected();
    assert_eq!(world.ends[1].note_traffic(world.now, passive), Ok(()));
    world.run_for(1000);
    assert_eq!(world.take_heard(1), []);
    assert_eq!(world.ends[1].note_traffic(world.now, ConnId(1)), Err(Error::Unknown));
}

#[test]
fn either_side_ends_it_and_both_hear_of_it_once() {
    for first in 0..2 {
        let mut world = fair();
        let conns = world.connected();
        world.ends[first].disconnect(world.now, conns[first]).expect("said");
        world.run_for(1000);
        assert_eq!(world.take_only(1 - first).kind, EventKind::Disconnected { timed_out: false });
        assert_eq!(world.take_heard(first), []);
        world.ends[1 - first].disconnect(world.now, conns[1 - first]).expect("agreed");
        world.run_for(1000);
        assert_eq!(world.take_only(first).kind, EventKind::Disconnected { timed_out: false });
        world.run_for(10 * SECOND_NS);
        for (end, conn) in conns.into_iter().enumerate() {
            assert_eq!(world.take_only(end).kind, EventKind::TimeWaitExit);
            world.ends[end].destroy(conn, world.now);
            assert_eq!(world.ends[end].connection_count(), 0);
        }
    }
}

#[test]
fn both_at_once_end_it() {
    let mut world = fair();
    let conns = world.connected();
    for (end, conn) in conns.into_iter().enumerate() {
        world.ends[end].disconnect(world.now, conn).expect("said");
    }
    world.run_for(1000);
    for end in 0..2 {
        assert_eq!(world.take_only(end).kind, EventKind::Disconnected { timed_out: false });
    }
}

#[test]
fn a_peer_that_is_gone_does_not_agree() {
    let mut world = fair();
    let [active, _] = world.connected();
    world.set_weather(everything_lost());
    world.ends[0].disconnect(world.now, active).expect("said");
    world.run_for(100 * SECOND_NS);
    let heard: Vec<_> = world.take_heard(0).into_iter().map(|event| event.kind).collect();
    assert_eq!(heard, [EventKind::Disconnected { timed_out: true }, EventKind::TimeWaitExit]);
}

#[test]
fn a_process_that_exits_says_goodbye() {
    let mut world = fair();
    world.connected();
    world.ends[0].destroy_all(world.now);
    world.run_for(1000);
    assert_eq!(world.take_only(1).kind, EventKind::Disconnected { timed_out: false });
    assert_eq!(world.take_heard(0), []);
}

#[test]
fn a_goodbye_that_was_lost_can_be_repeated_at_once() {
    let mut world = fair();
    let [_, passive] = world.connected();
    world.set_weather(everything_lost());
    world.ends[0].destroy_all(world.now);
    world.run_for(1000);
    assert_eq!(world.take_heard(1), []);
    assert!(world.ends[0].awaits_goodbyes());
    world.set_weather(Weather::default());
    // Long before the retransmission timer.
    world.ends[0].repeat_goodbyes();
    world.run_for(1000);
    assert_eq!(world.take_only(1).kind, EventKind::Disconnected { timed_out: false });
    world.ends[1].disconnect(world.now, passive).expect("agreed");
    world.run_for(1000);
    assert!(!world.ends[0].awaits_goodbyes());
}

#[test]
fn a_stranger_cannot_end_it() {
    let mut world = fair();
    let [active, passive] = world.connected();
    let mut elsewhere = path_to(0);
    elsewhere.remote.set_ip([10, 0, 0, 66].into());
    let names = (active.0, passive.0);
    let private_data = [0; 220];
    let dreq = Dreq { local_comm_id: names.0, remote_comm_id: names.1, remote_qpn: 22, private_data };
    let dreq = Mad { tid: 1, message: Message::Dreq(dreq) }.encode();
    world.ends[1].handle_mad(world.now, &elsewhere, &dreq, &|_, _| None);
    assert_eq!(world.ends[1].counters().unknown, 1);
    world.run_for(1000);
    assert_eq!(world.take_heard(1), []);
    // A DREQ with another queue pair number belongs to another connection.
    let other = Dreq { local_comm_id: names.0, remote_comm_id: names.1, remote_qpn: 23, private_data };
    let other = Mad { tid: 1, message: Message::Dreq(other) }.encode();
    world.ends[1].handle_mad(world.now, &path_to(0), &other, &|_, _| None);
    world.ends[1].handle_mad(world.now, &path_to(0), &[0; 256], &|_, _| None);
    assert_eq!(world.ends[1].counters().malformed, 1);
    world.run_for(1000);
    assert_eq!(world.take_heard(1), []);
    world.ends[1].handle_mad(world.now, &path_to(0), &dreq, &|_, _| None);
    world.run_for(1000);
    assert_eq!(world.take_only(1).kind, EventKind::Disconnected { timed_out: false });
}

#[test]
fn strangers_take_no_more_than_their_share() {
    let limits = Limits { half_open_max: 8, half_open_per_peer_max: 5, ..Limits::default() };
    let mut cm = Cm::new(Config { limits, ..config(3) });
    cm.listen(ListenerId(1), service(), None, 1000).expect("free");
    let mut other = Cm::new(config(4));
    let now = Time(1);
    for peer in 0..3u8 {
        for attempt in 0..10 {
            let mut connect = connect_from(0, 100 + attempt);
            connect.header.source = [10, 1, 1, peer].into();
            other.connect(now, 1, &connect).expect("sent");
            let bytes = other.poll_transmit().expect("a REQ").bytes;
            let mut from = path_to(0);
            from.remote.set_ip([10, 1, 1, peer].into());
            cm.handle_mad(now, &from, &bytes, &|_, _| None);
        }
    }
    assert_eq!((cm.connection_count(), cm.counters().beyond_limits), (8, 22));
    assert_eq!(cm.poll_transmit(), None);
    // Destroying a request frees its entry.
    let first = cm.poll_event().expect("a request").conn;
    cm.destroy(first, now);
    let mut from = path_to(0);
    from.remote.set_ip([10, 1, 1, 9].into());
    other.connect(now, 1, &connect_from(0, 999)).expect("sent");
    let bytes = other.poll_transmit().expect("a REQ").bytes;
    cm.handle_mad(now, &from, &bytes, &|_, _| None);
    assert_eq!(cm.counters().beyond_limits, 22);
}

#[test]
fn a_backlog_is_what_waits_for_the_program() {
    let mut world = fair();
    world.ends[1].listen(ListenerId(1), service(), None, 2).expect("free");
    for qpn in 1..=3 {
        world.ends[0].connect(world.now, qpn.into(), &connect_from(0, qpn)).expect("sent");
    }
    world.run_for(1000);
    let heard = world.take_heard(1);
    assert_eq!((heard.len(), world.ends[1].counters().beyond_limits), (2, 1));
    world.ends[1].take_request(heard[0].conn, 1);
    world.run_for(SECOND_NS);
    assert_eq!(world.take_heard(1).len(), 1, "the third one asked again");
}

#[test]
fn another_process_of_the_host_is_asked_instead() {
    let mut cm = Cm::new(config(1));
    let conn = cm.connect(Time(1), 7, &connect_from(0, 11)).expect("sent");
    let req = cm.poll_transmit().expect("a REQ");
    // Instance 3 has the listener, instance 0 does not.
    let mut first = Cm::new(config(2));
    first.handle_mad(Time(1), &path_to(0), &req.bytes, &|service, address| {
        assert_eq!((service, address), (common::service(), common::address(1)));
        Some(3)
    });
    let rej = first.poll_transmit().expect("a REJ");
    assert_eq!(first.connection_count(), 0);
    cm.handle_mad(Time(1), &path_to(1), &rej.bytes, &|_, _| None);
    let again = cm.poll_transmit().expect("the REQ again");
    assert_eq!((again.path.remote.port(), again.bytes), (4794, req.bytes));
    assert_eq!(cm.poll_event(), None);
    // The connection is with instance 3 now; datagrams from instance 0 are ignored.
    let (agreed, path) = cm.agreed(conn).expect("known");
    assert_eq!((agreed.remote_qpn, path.remote.port()), (0, 4794));
    cm.handle_mad(Time(1), &path_to(1), &rej.bytes, &|_, _| None);
    assert_eq!((cm.poll_event(), cm.counters().unknown), (None, 1));
}

/// `asker`'s REQ, and the managers of instances 0 and 3 of the peer's host; instance 3 has the service.
fn behind_another(asker: &mut Cm) -> ([Cm; 2], Transmit) {
    let mut home = Cm::new(Config { slot: 3, ..config(3) });
    home.listen(ListenerId(1), service(), None, 1).expect("free");
    asker.connect(Time(1), 7, &connect_from(0, 11)).expect("sent");
    ([Cm::new(config(2)), home], asker.poll_transmit().expect("a REQ"))
}

#[test]
fn a_request_that_came_to_the_standard_port_is_for_whoever_listens() {
    let mut asker = Cm::new(config(1));
    let ([mut front, mut home], req) = behind_another(&mut asker);
    assert_eq!(front.meant_for(&path_to(0), &req.bytes, &|_, _| Some(3)), Some(3));
    assert_eq!(front.meant_for(&path_to(0), &req.bytes, &|_, _| None), None);
    assert_eq!(home.meant_for(&path_to(0), &req.bytes, &|_, _| Some(0)), None);
    // An instance that has the request keeps it, even without a listener.
    home.handle_mad(Time(1), &path_to(0), &req.bytes, &|_, _| None);
    let conn = home.poll_event().expect("a request").conn;
    home.take_request(conn, 8);
    home.stop_listening(ListenerId(1), Time(1));
    assert_eq!(home.meant_for(&path_to(0), &req.bytes, &|_, _| Some(0)), None);
}

#[test]
fn names_say_whose_a_connection_is() {
    let mut asker = Cm::new(config(1));
    let ([mut front, mut home], req) = behind_another(&mut asker);
    home.handle_mad(Time(1), &path_to(0), &req.bytes, &|_, _| None);
    let conn = home.poll_event().expect("a request").conn;
    home.take_request(conn, 8);
    home.accept(Time(1), conn, &accept_with(22)).expect("accepted");
    let rep = home.poll_transmit().expect("a REP");
    // The REP comes from the listening process, which is the peer from then on.
    let mut from_home = path_to(1);
    from_home.remote.set_port(4794);
    asker.handle_mad(Time(1), &from_home, &rep.bytes, &|_, _| None);
    let asked = asker.poll_event().expect("a response").conn;
    asker.establish(Time(1), asked).expect("established");
    let rtu = asker.poll_transmit().expect("an RTU");
    assert_eq!(rtu.path.remote.port(), 4794);
    assert_eq!(asker.meant_for(&from_home, &rep.bytes, &|_, _| None), None);
    // A standard peer would have sent it to instance 0.
    assert_eq!(front.meant_for(&path_to(0), &rtu.bytes, &|_, _| None), Some(3));
    assert_eq!(home.meant_for(&path_to(0), &rtu.bytes, &|_, _| None), None);
    home.handle_mad(Time(1), &path_to(0), &rtu.bytes, &|_, _| None);
    assert_eq!(home.poll_event().map(|event| event.kind), Some(EventKind::Established));
    // Datagrams of the host's other processes are ignored now.
    asker.disconnect(Time(1), asked).expect("said");
    let dreq = asker.poll_transmit().expect("a DREQ");
    home.handle_mad(Time(1), &path_to(0), &dreq.bytes, &|_, _| None);
    home.disconnect(Time(1), conn).expect("agreed");
    let drep = home.poll_transmit().expect("a DREP");
    asker.handle_mad(Time(1), &path_to(1), &drep.bytes, &|_, _| None);
    assert_eq!((asker.poll_event(), asker.counters().unknown), (None, 1));
    asker.handle_mad(Time(1), &from_home, &drep.bytes, &|_, _| None);
    assert!(matches!(asker.poll_event().map(|event| event.kind), Some(EventKind::Disconnected { .. })));
}

#[test]
fn a_queue_pair_that_is_used_again_ends_its_old_connection() {
    let mut world = fair();
    world.connected();
    // The peer has lost its state.
    let guid = config(1).guid;
    world.ends[0] = Cm::new(Config { guid, ..config(99) });
    let conn = world.ends[0].connect(world.now, 9, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let EventKind::Rejected { reason, .. } = world.take_only(0).kind else { panic!("not refused") };
    assert_eq!(reason, RejReason::STALE_CONNECTION);
    assert_eq!(world.take_only(1).kind, EventKind::Disconnected { timed_out: false });
    world.ends[0].destroy(conn, world.now);
    world.ends[0].connect(world.now, 9, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    assert!(world.take_heard(1).iter().any(|event| matches!(event.kind, EventKind::Request { .. })));
}

/// A REQ forged with the address and queue pair of end 0, and with its GUID or another one.
fn forged_request(guid: u64) -> Vec<u8> {
    let mut forger = Cm::new(Config { guid, ..config(666) });
    forger.connect(Time(1), 1, &connect_from(0, 11)).expect("sent");
    forger.poll_transmit().expect("a REQ").bytes.to_vec()
}

#[test]
fn a_forged_request_for_a_queue_pair_in_use_ends_no_connection() {
    for guid in [config(1).guid, 0x666] {
        let mut world = fair();
        let conns = world.connected();
        let request = forged_request(guid);
        for _ in 0..3 {
            world.ends[1].handle_mad(world.now, &path_to(0), &request, &|_, _| None);
            world.run_for(SECOND_NS);
        }
        let ended = |event: &Event| conns.contains(&event.conn);
        assert!(!world.take_heard(1).iter().any(ended), "with GUID {guid:#x}");
        assert!(!world.take_heard(0).iter().any(ended), "with GUID {guid:#x}");
        // The connection still works.
        world.ends[1].disconnect(world.now, conns[1]).expect("it stands");
        world.run_for(1000);
        assert_eq!(world.take_only(0).kind, EventKind::Disconnected { timed_out: false });
    }
}

#[test]
fn a_forged_acceptance_of_a_queue_pair_in_use_ends_no_connection() {
    let mut world = fair();
    let conns = world.connected();
    // Another program of the same host accepts with the queue pair of the established connection.
    world.ends[0].connect(world.now, 9, &connect_from(0, 12)).expect("sent");
    world.run_for(1000);
    let asked = world.take_only(1).conn;
    world.ends[1].take_request(asked, 9);
    world.ends[1].accept(world.now, asked, &accept_with(22)).expect("accepted");
    world.run_for(SECOND_NS / 5);
    let ended = |event: &Event| conns.contains(&event.conn);
    assert!(!world.take_heard(0).iter().any(ended) && !world.take_heard(1).iter().any(ended));
}

#[test]
fn a_peer_that_has_forgotten_an_idle_connection_is_missed() {
    for end in 0..2 {
        let mut world = fair();
        let conns = world.connected();
        // The process was killed, and another process of its host answers.
        world.ends[end] = Cm::new(config(99));
        world.run_for(Timing::default().keepalive_ns + SECOND_NS);
        let kinds: Vec<_> =
            world.take_heard(1 - end).into_iter().map(|event| (event.conn, event.kind)).collect();
        assert_eq!(kinds.first(), Some(&(conns[1 - end], EventKind::Disconnected { timed_out: false })));
    }
}

#[test]
fn a_peer_that_has_an_idle_connection_is_asked_seldom() {
    let mut world = fair();
    world.connected();
    let (before, minutes) = (world.sent, 10);
    world.run_for(minutes * 60 * SECOND_NS);
    assert_eq!((world.take_heard(0), world.take_heard(1)), (vec![], vec![]));
    let seldom = 2 * minutes * 60 * SECOND_NS / (Timing::default().keepalive_ns * 3 / 4) + 2;
    assert!((1..=seldom).contains(&(world.sent - before)), "{} datagrams", world.sent - before);
    // No answer and no refusal: the host is off, or the process is stopped.
    world.set_weather(everything_lost());
    world.run_for(minutes * 60 * SECOND_NS);
    assert_eq!((world.take_heard(0), world.take_heard(1)), (vec![], vec![]));
}

#[test]
fn a_peer_whose_host_refuses_its_datagrams_is_missed() {
    let mut world = fair();
    let [_, passive] = world.connected();
    world.set_weather(everything_lost());
    world.run_for(Timing::default().keepalive_ns);
    world.ends[1].note_refused(world.now, address(0), 4792);
    assert_eq!(world.take_heard(1), [], "that is another process");
    // A refusal may be forged, so each one triggers another keepalive.
    for _ in 0..2 {
        let sent = world.sent;
        world.ends[1].note_refused(world.now, address(0), 4791);
        world.run_for(SECOND_NS / 2);
        assert!(world.sent > sent);
        assert_eq!(world.take_heard(1), []);
    }
    world.ends[1].note_refused(world.now, address(0), 4791);
    world.run_for(1000);
    let event = world.take_only(1);
    assert_eq!((event.conn, event.kind), (passive, EventKind::Disconnected { timed_out: false }));
}

#[test]
fn a_peer_that_may_be_gone_is_asked_at_once() {
    let mut world = fair();
    world.connected();
    world.ends[0] = Cm::new(config(99));
    world.ends[1].suspect_host(world.now, address(0));
    world.run_for(1000);
    assert_eq!(world.take_only(1).kind, EventKind::Disconnected { timed_out: false });
}

#[test]
fn what_is_too_much_or_too_late_is_refused() {
    let mut world = fair();
    let mut connect = connect_from(0, 11);
    connect.private_data = vec![0; 57];
    assert_eq!(world.ends[0].connect(world.now, 1, &connect), Err(Error::PrivateData));
    let [active, passive] = world.connected();
    assert_eq!(world.ends[0].establish(world.now, active), Err(Error::State));
    assert_eq!(world.ends[1].accept(world.now, passive, &accept_with(1)), Err(Error::State));
    let reason = RejReason::CONSUMER_DEFINED;
    assert_eq!(world.ends[1].reject(world.now, passive, reason, &[]), Err(Error::State));
    assert_eq!(world.ends[1].reject(world.now, passive, reason, &[0; 149]), Err(Error::PrivateData));
    assert_eq!(world.ends[0].disconnect(world.now, ConnId(3)), Err(Error::Unknown));
    let busy = world.ends[1].listen(ListenerId(77), service(), Some(address(1)), 1);
    assert_eq!(busy, Err(Error::InUse));
}

#[test]
fn a_question_about_datagrams_is_answered() {
    let mut world = fair();
    let service_id = service_id(PortSpace::Udp, SERVICE);
    world.ends[1].listen(ListenerId(1), service_id, None, 4).expect("free");
    let header = connect_from(0, 1).header;
    let ask = Ask { service_id, header, path: path_to(1), private_data: b"who?".to_vec() };
    world.ends[0].ask(world.now, 7, &ask).expect("sent");
    world.run_for(1000);
    let event = world.take_only(1);
    let EventKind::Question { private_data, .. } = &event.kind else { panic!("{event:?}") };
    assert_eq!(private_data[..5], *b"who?\0");
    world.ends[1].take_request(event.conn, 8);
    let answer = Answer { qpn: 33, qkey: 44, private_data: b"me".to_vec() };
    world.ends[1].answer(world.now, event.conn, &answer).expect("said");
    assert_eq!(world.ends[1].answer(world.now, event.conn, &answer), Err(Error::State));
    world.run_for(1000);
    let EventKind::Answered(rep) = world.take_only(0).kind else { panic!("no answer") };
    assert_eq!(
        (rep.status, rep.qpn, rep.qkey, &rep.private_data[..3]),
        (SidrStatus::VALID, 33, 44, &b"me\0"[..])
    );
    // That service takes no SIDR requests.
    let other = Ask { service_id: service(), ..ask };
    world.ends[0].ask(world.now, 7, &other).expect("sent");
    world.run_for(1000);
    let EventKind::Answered(rep) = world.take_only(0).kind else { panic!("no answer") };
    assert_eq!(rep.status, SidrStatus::UNSUPPORTED);
}
