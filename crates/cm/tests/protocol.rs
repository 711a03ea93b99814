//! The protocol's rules, one per test.

mod common;

use common::*;
use terrace_cm::*;
use terrace_wire::Time;
use terrace_wire::cm::*;

fn lossless() -> World {
    World::new(1, NetworkFaults::default())
}

fn all_lost() -> NetworkFaults {
    NetworkFaults { lost: 100, ..NetworkFaults::default() }
}

#[test]
fn both_ends_have_matching_parameters() {
    let mut world = lossless();
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
fn an_xrc_initiator_connects_to_a_target() {
    let mut world = lossless();
    world.ends[1].listen(ListenerId(5), service(), Addresses::All, 16).expect("free");
    let connect = Connect { transport: Transport::Xrc, srq: true, ..connect_from(0, 11) };
    let active = world.ends[0].connect(world.now, 7, &connect).expect("sent");
    world.run_for(1000);
    let Event { conn: passive, kind: EventKind::Request { req, .. }, .. } = world.take_event(1) else {
        panic!("no request")
    };
    // An initiator has neither responder resources nor receives.
    assert_eq!((req.transport, req.responder_resources, req.srq), (Transport::Xrc, 0, false));
    world.ends[1].assign_request(passive, 8);
    world.ends[1].accept(world.now, passive, &Accept { srq: false, ..accept_with(22) }).expect("accepted");
    world.run_for(1000);
    let EventKind::Response(rep) = world.take_event(0).kind else { panic!("no response") };
    assert_eq!((rep.local_qpn, rep.local_eecn, rep.srq), (22, 22, true));
    let [(a, _), (b, _)] =
        [(0, active), (1, passive)].map(|(end, conn)| world.ends[end].agreed(conn).expect("known"));
    assert_eq!((a.local_qpn, a.remote_qpn, b.local_qpn, b.remote_qpn), (11, 22, 22, 11));
    // The target serves what the initiator requests, and requests nothing.
    assert_eq!((a.initiator_depth, b.responder_resources, a.responder_resources), (2, 2, 3));
}

#[test]
fn a_request_carries_the_addresses_and_private_data() {
    let mut world = lossless();
    world.ends[1].listen(ListenerId(5), service(), Addresses::One(address(1)), 1).expect("free");
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let EventKind::Request { listener, header, req } = world.take_event(1).kind else { panic!("no request") };
    assert_eq!(listener, ListenerId(5));
    assert_eq!((header.source, header.source_port, header.destination), (address(0), 40000, address(1)));
    assert_eq!(req.private_data[IP_HEADER_BYTES..][..6], *b"hello\0");
}

#[test]
fn listeners_of_both_families_share_a_service() {
    let mut world = lossless();
    let mut listen = |id, addresses| world.ends[1].listen(ListenerId(id), service(), addresses, 1);
    assert_eq!(listen(1, Addresses::V6), Ok(()));
    assert_eq!(listen(2, Addresses::V4), Ok(()));
    let mapped = "::ffff:10.0.0.9".parse().expect("an address");
    for (id, overlapping) in (3..).zip([Addresses::All, Addresses::V4, Addresses::One(mapped)]) {
        assert_eq!(listen(id, overlapping), Err(Error::InUse));
    }
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let EventKind::Request { listener, .. } = world.take_event(1).kind else { panic!("no request") };
    assert_eq!(listener, ListenerId(2));
}

#[test]
fn a_request_without_a_listener_is_rejected() {
    let mut world = lossless();
    // A listener at another address does not match.
    world.ends[1].listen(ListenerId(1), service(), Addresses::One([10, 9, 9, 9].into()), 1).expect("free");
    let conn = world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let event = world.take_event(0);
    assert_eq!((event.conn, event.owner), (conn, Some(7)));
    let EventKind::Rejected { reason, .. } = event.kind else { panic!("{event:?}") };
    assert_eq!(reason, RejReason::INVALID_SERVICE_ID);
    assert_eq!(world.ends[1].connection_count(), 0);
}

#[test]
fn a_request_soon_after_its_listener_closed_is_dropped_not_rejected() {
    let mut world = lossless();
    world.ends[1].listen(ListenerId(1), service(), Addresses::All, 1).expect("free");
    world.ends[1].stop_listening(ListenerId(1), world.now);
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    assert_eq!(world.take_events(0), []);
    world.ends[1].listen(ListenerId(2), service(), Addresses::All, 1).expect("free");
    world.run_for(SECOND_NS / 2);
    assert!(matches!(world.take_event(1).kind, EventKind::Request { .. }));
    // Later a REQ is rejected.
    world.ends[1].stop_listening(ListenerId(2), world.now);
    world.run_for(8 * SECOND_NS);
    world.take_events(0);
    world.ends[0].connect(world.now, 8, &connect_from(0, 12)).expect("sent");
    world.run_for(1000);
    assert!(matches!(world.take_event(0).kind, EventKind::Rejected { .. }));
}

#[test]
fn many_closed_listeners_do_not_hide_the_latest() {
    let mut world = lossless();
    for port in 0..64 {
        let id = ListenerId(100 + u64::from(port));
        world.ends[1].listen(id, service_id(PortSpace::Tcp, 1000 + port), Addresses::All, 1).expect("free");
        world.ends[1].stop_listening(id, world.now);
    }
    world.ends[1].listen(ListenerId(1), service(), Addresses::All, 1).expect("free");
    world.ends[1].stop_listening(ListenerId(1), world.now);
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    assert_eq!(world.take_events(0), []);
}

#[test]
fn a_rejected_request_to_a_service_with_a_connection_is_repeated() {
    let mut world = lossless();
    world.connected();
    world.ends[1].stop_listening(ListenerId(0), world.now);
    // This is longer than requests are dropped after a listener was closed.
    world.run_for(8 * SECOND_NS);
    world.ends[0].connect(world.now, 8, &connect_from(0, 12)).expect("sent");
    world.run_for(1000);
    assert_eq!(world.take_events(0), []);
    world.ends[1].listen(ListenerId(2), service(), Addresses::All, 1).expect("free");
    world.run_for(SECOND_NS);
    let next = world.take_event(1);
    assert!(matches!(next.kind, EventKind::Request { .. }));
    // The active end stops repeating it after a while.
    world.ends[1].reject(world.now, next.conn, RejReason::CONSUMER_DEFINED, &[]).expect("refused");
    world.ends[1].stop_listening(ListenerId(2), world.now);
    world.run_for(8 * SECOND_NS);
    world.take_events(0);
    world.ends[0].connect(world.now, 9, &connect_from(0, 13)).expect("sent");
    world.run_for(8 * SECOND_NS);
    let refused = world.take_event(0);
    assert!(matches!(refused.kind, EventKind::Rejected { reason: RejReason::INVALID_SERVICE_ID, .. }));
}

#[test]
fn a_request_in_the_backlog_of_a_closed_listener_is_for_the_next_listener() {
    for was_mra_sent in [false, true] {
        let mut world = lossless();
        world.ends[1].listen(ListenerId(1), service(), Addresses::All, 1).expect("free");
        world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
        // A duplicate of a request in the backlog is answered with an MRA.
        world.run_for(if was_mra_sent { SECOND_NS } else { 1000 });
        assert!(matches!(world.take_event(1).kind, EventKind::Request { .. }));
        world.ends[1].stop_listening(ListenerId(1), world.now);
        world.ends[1].listen(ListenerId(2), service(), Addresses::All, 1).expect("free");
        world.run_for(SECOND_NS);
        match was_mra_sent {
            false => assert!(matches!(world.take_event(1).kind, EventKind::Request { .. })),
            true => assert!(matches!(world.take_event(0).kind, EventKind::Rejected { .. })),
        }
    }
}

#[test]
fn a_rejection_is_repeated_without_a_second_event() {
    let mut world = lossless();
    world.ends[1].listen(ListenerId(1), service(), Addresses::All, 1).expect("free");
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let passive = world.take_event(1).conn;
    world.ends[1].reject(world.now, passive, RejReason::CONSUMER_DEFINED, b"no").expect("refused");
    // The REJ is lost; the repeated REQ is rejected again, without a second event.
    world.set_faults(all_lost());
    world.run_for(1);
    world.set_faults(NetworkFaults::default());
    world.run_for(SECOND_NS);
    let EventKind::Rejected { reason, private_data } = world.take_event(0).kind else {
        panic!("not refused")
    };
    assert_eq!((reason, &private_data[..3]), (RejReason::CONSUMER_DEFINED, &b"no\0"[..]));
    assert_eq!(world.take_events(1), []);
}

#[test]
fn an_unresponsive_peer_is_unreachable_after_all_attempts() {
    let mut world = World::new(1, all_lost());
    let started = world.now;
    world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(100 * SECOND_NS);
    assert_eq!(world.take_event(0).kind, EventKind::Unreachable);
    let timing = Timing::default();
    // All REQs and a REJ for the timeout are counted.
    assert_eq!(world.sent, u64::from(timing.attempts) + 1);
    assert!(world.now > started);
}

#[test]
fn an_mra_extends_the_timeout_for_a_slow_program() {
    let mut world = lossless();
    world.ends[1].listen(ListenerId(1), service(), Addresses::All, 1).expect("free");
    let active = world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
    world.run_for(50 * SECOND_NS);
    let passive = world.take_event(1).conn;
    world.ends[1].assign_request(passive, 8);
    assert_eq!(world.take_events(0), []);
    // The datagrams are the REQ, one retransmission and the MRA.
    assert_eq!(world.sent, 3);
    world.ends[1].accept(world.now, passive, &accept_with(22)).expect("accepted");
    world.run_for(1000);
    assert!(matches!(world.take_event(0).kind, EventKind::Response(_)));
    world.ends[0].establish(world.now, active).expect("established");
}

#[test]
fn a_lost_rtu_is_sent_again() {
    let mut world = lossless();
    let [active, _passive] = world.accepted();
    world.ends[0].establish(world.now, active).expect("established");
    world.set_faults(all_lost());
    world.run_for(1);
    world.set_faults(NetworkFaults::default());
    assert_eq!(world.take_events(1), []);
    world.run_for(SECOND_NS);
    assert_eq!(world.take_event(1).kind, EventKind::Established);
}

#[test]
fn the_first_packet_replaces_a_lost_rtu() {
    let mut world = lossless();
    let [_, passive] = world.connected();
    assert_eq!(world.ends[1].notify_comm_est(world.now, passive), Ok(()));
    world.run_for(1000);
    assert_eq!(world.take_events(1), []);
    assert_eq!(world.ends[1].notify_comm_est(world.now, ConnId(1)), Err(Error::Unknown));
}

#[test]
fn either_side_disconnects_and_each_end_gets_one_event() {
    for first in 0..2 {
        let mut world = lossless();
        let conns = world.connected();
        world.ends[first].disconnect(world.now, conns[first]).expect("sent");
        world.run_for(1000);
        assert_eq!(world.take_event(1 - first).kind, EventKind::Disconnected { timed_out: false });
        assert_eq!(world.take_events(first), []);
        world.ends[1 - first].disconnect(world.now, conns[1 - first]).expect("DREP sent");
        world.run_for(1000);
        assert_eq!(world.take_event(first).kind, EventKind::Disconnected { timed_out: false });
        world.run_for(10 * SECOND_NS);
        for (end, conn) in conns.into_iter().enumerate() {
            assert_eq!(world.take_event(end).kind, EventKind::TimeWaitExit);
            world.ends[end].destroy(conn, world.now);
            assert_eq!(world.ends[end].connection_count(), 0);
        }
    }
}

#[test]
fn simultaneous_disconnects_end_the_connection() {
    let mut world = lossless();
    let conns = world.connected();
    for (end, conn) in conns.into_iter().enumerate() {
        world.ends[end].disconnect(world.now, conn).expect("sent");
    }
    world.run_for(1000);
    for end in 0..2 {
        assert_eq!(world.take_event(end).kind, EventKind::Disconnected { timed_out: false });
    }
}

#[test]
fn a_disconnect_of_an_unresponsive_peer_times_out() {
    let mut world = lossless();
    let [active, _] = world.connected();
    world.set_faults(all_lost());
    world.ends[0].disconnect(world.now, active).expect("sent");
    world.run_for(100 * SECOND_NS);
    let events: Vec<_> = world.take_events(0).into_iter().map(|event| event.kind).collect();
    assert_eq!(events, [EventKind::Disconnected { timed_out: true }, EventKind::TimeWaitExit]);
}

#[test]
fn a_dreq_repeated_after_time_wait_is_answered() {
    let mut world = lossless();
    let [active, passive] = world.connected();
    world.ends[0].disconnect(world.now, active).expect("sent");
    world.run_for(1000);
    assert_eq!(world.take_event(1).kind, EventKind::Disconnected { timed_out: false });
    world.set_faults(all_lost());
    world.ends[1].disconnect(world.now, passive).expect("DREP sent");
    // The program keeps the connection's ID.
    world.run_for(SECOND_NS + SECOND_NS / 10);
    assert_eq!(world.take_event(1).kind, EventKind::TimeWaitExit);
    assert_eq!(world.take_events(0), []);
    world.set_faults(NetworkFaults::default());
    // All attempts take longer.
    world.run_for(2 * SECOND_NS);
    let events: Vec<_> = world.take_events(0).into_iter().map(|event| event.kind).collect();
    assert_eq!(events.first(), Some(&EventKind::Disconnected { timed_out: false }));
}

#[test]
fn destroy_all_sends_dreqs() {
    let mut world = lossless();
    world.connected();
    world.ends[0].destroy_all(world.now);
    world.run_for(1000);
    assert_eq!(world.take_event(1).kind, EventKind::Disconnected { timed_out: false });
    assert_eq!(world.take_events(0), []);
}

#[test]
fn a_lost_dreq_can_be_resent_before_its_timer() {
    let mut world = lossless();
    let [_, passive] = world.connected();
    world.set_faults(all_lost());
    world.ends[0].destroy_all(world.now);
    world.run_for(1000);
    assert_eq!(world.take_events(1), []);
    assert!(world.ends[0].has_unanswered_dreqs());
    world.set_faults(NetworkFaults::default());
    // The retransmission timer has not expired.
    world.ends[0].resend_dreqs();
    world.run_for(1000);
    assert_eq!(world.take_event(1).kind, EventKind::Disconnected { timed_out: false });
    world.ends[1].disconnect(world.now, passive).expect("DREP sent");
    world.run_for(1000);
    assert!(!world.ends[0].has_unanswered_dreqs());
}

#[test]
fn a_dreq_from_another_host_ends_no_connection() {
    let mut world = lossless();
    let [active, passive] = world.connected();
    let mut find_instance = path_to(0);
    find_instance.remote.set_ip([10, 0, 0, 66].into());
    let names = (active.0, passive.0);
    let private_data = [0; 220];
    let dreq = Dreq { local_comm_id: names.0, remote_comm_id: names.1, remote_qpn: 22, private_data };
    let dreq = Mad { tid: 1, message: Message::Dreq(dreq) }.encode();
    world.ends[1].handle_mad(world.now, &find_instance, &dreq, &|_, _| None);
    assert_eq!(world.ends[1].counters().unknown, 1);
    world.run_for(1000);
    assert_eq!(world.take_events(1), []);
    // A DREQ with another queue pair number belongs to another connection.
    let other = Dreq { local_comm_id: names.0, remote_comm_id: names.1, remote_qpn: 23, private_data };
    let other = Mad { tid: 1, message: Message::Dreq(other) }.encode();
    world.ends[1].handle_mad(world.now, &path_to(0), &other, &|_, _| None);
    world.ends[1].handle_mad(world.now, &path_to(0), &[0; 256], &|_, _| None);
    assert_eq!(world.ends[1].counters().malformed, 1);
    world.run_for(1000);
    assert_eq!(world.take_events(1), []);
    world.ends[1].handle_mad(world.now, &path_to(0), &dreq, &|_, _| None);
    world.run_for(1000);
    assert_eq!(world.take_event(1).kind, EventKind::Disconnected { timed_out: false });
}

/// A REJ of a client that knows only its own communication ID: it has had no REP.
fn rej_without_remote_id(local_comm_id: u32) -> [u8; MAD_BYTES] {
    let rej = Rej {
        local_comm_id,
        remote_comm_id: 0,
        answered: Answered::Req,
        reason: RejReason::TIMEOUT,
        info_len: 0,
        info: [0; Rej::INFO_BYTES],
        private_data: [0; Rej::PRIVATE_BYTES],
    };
    Mad { tid: 1, message: Message::Rej(rej) }.encode()
}

#[test]
fn a_rej_without_this_ends_id_ends_no_established_connection() {
    let mut world = lossless();
    let conns = world.connected();
    // Both ends: the passive one knows the active one's ID since the REQ.
    for end in 0..2 {
        let forged = rej_without_remote_id(conns[1 - end].0);
        world.ends[end].handle_mad(world.now, &path_to(1 - end), &forged, &|_, _| None);
        world.run_for(1000);
        assert_eq!(world.take_events(end), []);
    }
    assert_eq!(world.ends[1].counters().unknown, 1);
}

#[test]
fn a_client_that_has_had_no_answer_withdraws_its_request() {
    for is_answer_lost in [false, true] {
        let mut world = lossless();
        world.ends[1].listen(ListenerId(1), service(), Addresses::All, 1).expect("free");
        let active = world.ends[0].connect(world.now, 7, &connect_from(0, 11)).expect("sent");
        world.run_for(1000);
        let passive = world.take_event(1).conn;
        world.ends[1].assign_request(passive, 8);
        if is_answer_lost {
            world.set_faults(all_lost());
            world.ends[1].accept(world.now, passive, &accept_with(22)).expect("accepted");
            world.run_for(1);
            world.set_faults(NetworkFaults::default());
        }
        world.ends[0].destroy(active, world.now);
        world.run_for(1000);
        assert!(matches!(world.take_event(1).kind, EventKind::Rejected { reason: RejReason::TIMEOUT, .. }));
    }
}

#[test]
fn half_open_connections_are_limited_per_peer_and_in_total() {
    let limits = Limits { half_open_max: 8, half_open_per_peer_max: 5, ..Limits::default() };
    let mut cm = Cm::new(Config { limits, ..config(3) });
    cm.listen(ListenerId(1), service(), Addresses::All, 1000).expect("free");
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
fn a_full_backlog_drops_requests_until_the_program_takes_one() {
    let mut world = lossless();
    world.ends[1].listen(ListenerId(1), service(), Addresses::All, 2).expect("free");
    for qpn in 1..=3 {
        world.ends[0].connect(world.now, qpn.into(), &connect_from(0, qpn)).expect("sent");
    }
    world.run_for(1000);
    let events = world.take_events(1);
    assert_eq!((events.len(), world.ends[1].counters().beyond_limits), (2, 1));
    world.ends[1].assign_request(events[0].conn, 1);
    world.run_for(SECOND_NS);
    assert_eq!(world.take_events(1).len(), 1, "the third REQ is repeated");
}

#[test]
fn a_redirect_leads_to_the_listening_instance() {
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

/// `client`'s REQ, and the managers of instances 0 and 3 of the peer's host; instance 3 has the service.
fn request_to_another_instance(client: &mut Cm) -> ([Cm; 2], Transmit) {
    let mut listening = Cm::new(Config { instance: 3, ..config(3) });
    listening.listen(ListenerId(1), service(), Addresses::All, 1).expect("free");
    client.connect(Time(1), 7, &connect_from(0, 11)).expect("sent");
    ([Cm::new(config(2)), listening], client.poll_transmit().expect("a REQ"))
}

#[test]
fn a_request_at_the_standard_port_belongs_to_the_listening_instance() {
    let mut client = Cm::new(config(1));
    let ([mut instance_0, mut listening], req) = request_to_another_instance(&mut client);
    assert_eq!(instance_0.instance_of_datagram(&path_to(0), &req.bytes, &|_, _| Some(3)), Some(3));
    assert_eq!(instance_0.instance_of_datagram(&path_to(0), &req.bytes, &|_, _| None), None);
    assert_eq!(listening.instance_of_datagram(&path_to(0), &req.bytes, &|_, _| Some(0)), None);
    // An instance that has the request keeps it, even without a listener.
    listening.handle_mad(Time(1), &path_to(0), &req.bytes, &|_, _| None);
    let conn = listening.poll_event().expect("a request").conn;
    listening.assign_request(conn, 8);
    listening.stop_listening(ListenerId(1), Time(1));
    assert_eq!(listening.instance_of_datagram(&path_to(0), &req.bytes, &|_, _| Some(0)), None);
}

#[test]
fn a_withdrawn_request_belongs_to_the_instance_that_it_was_forwarded_to() {
    let mut client = Cm::new(config(1));
    let ([mut instance_0, mut listening], req) = request_to_another_instance(&mut client);
    assert_eq!(instance_0.instance_of_datagram(&path_to(0), &req.bytes, &|_, _| Some(3)), Some(3));
    listening.handle_mad(Time(1), &path_to(0), &req.bytes, &|_, _| None);
    listening.poll_event().expect("a request");
    client.destroy_all(Time(1));
    let rej = client.poll_transmit().expect("a REJ");
    assert_eq!(instance_0.instance_of_datagram(&path_to(0), &rej.bytes, &|_, _| None), Some(3));
    assert_eq!(instance_0.instance_of_datagram(&path_to(1), &rej.bytes, &|_, _| None), None);
    assert_eq!(listening.instance_of_datagram(&path_to(0), &rej.bytes, &|_, _| None), None);
    // However many requests are forwarded, the memory for them is bounded, and the latest is known.
    for qpn in 100..1000 {
        client.connect(Time(1), 7, &connect_from(0, qpn)).expect("sent");
        let req = client.poll_transmit().expect("a REQ");
        assert_eq!(instance_0.instance_of_datagram(&path_to(0), &req.bytes, &|_, _| Some(2)), Some(2));
    }
    assert_eq!(instance_0.instance_of_datagram(&path_to(0), &rej.bytes, &|_, _| None), None);
}

#[test]
fn communication_ids_name_the_instance_of_a_connection() {
    let mut client = Cm::new(config(1));
    let ([mut instance_0, mut listening], req) = request_to_another_instance(&mut client);
    listening.handle_mad(Time(1), &path_to(0), &req.bytes, &|_, _| None);
    let conn = listening.poll_event().expect("a request").conn;
    listening.assign_request(conn, 8);
    listening.accept(Time(1), conn, &accept_with(22)).expect("accepted");
    let rep = listening.poll_transmit().expect("a REP");
    // The REP comes from the listening process. That process is the peer from then on.
    let mut from_listening = path_to(1);
    from_listening.remote.set_port(4794);
    client.handle_mad(Time(1), &from_listening, &rep.bytes, &|_, _| None);
    let active = client.poll_event().expect("a response").conn;
    client.establish(Time(1), active).expect("established");
    let rtu = client.poll_transmit().expect("an RTU");
    assert_eq!(rtu.path.remote.port(), 4794);
    assert_eq!(client.instance_of_datagram(&from_listening, &rep.bytes, &|_, _| None), None);
    // A standard peer sends the RTU to instance 0.
    assert_eq!(instance_0.instance_of_datagram(&path_to(0), &rtu.bytes, &|_, _| None), Some(3));
    assert_eq!(listening.instance_of_datagram(&path_to(0), &rtu.bytes, &|_, _| None), None);
    listening.handle_mad(Time(1), &path_to(0), &rtu.bytes, &|_, _| None);
    assert_eq!(listening.poll_event().map(|event| event.kind), Some(EventKind::Established));
    // Datagrams of the host's other processes are now ignored.
    client.disconnect(Time(1), active).expect("sent");
    let dreq = client.poll_transmit().expect("a DREQ");
    listening.handle_mad(Time(1), &path_to(0), &dreq.bytes, &|_, _| None);
    listening.disconnect(Time(1), conn).expect("DREP sent");
    let drep = listening.poll_transmit().expect("a DREP");
    client.handle_mad(Time(1), &path_to(1), &drep.bytes, &|_, _| None);
    assert_eq!((client.poll_event(), client.counters().unknown), (None, 1));
    client.handle_mad(Time(1), &from_listening, &drep.bytes, &|_, _| None);
    assert!(matches!(client.poll_event().map(|event| event.kind), Some(EventKind::Disconnected { .. })));
}

#[test]
fn reuse_of_a_queue_pair_ends_its_stale_connection() {
    let mut world = lossless();
    world.connected();
    // The peer has lost its state.
    let guid = config(1).guid;
    world.ends[0] = Cm::new(Config { guid, ..config(99) });
    let conn = world.ends[0].connect(world.now, 9, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    let EventKind::Rejected { reason, .. } = world.take_event(0).kind else { panic!("not refused") };
    assert_eq!(reason, RejReason::STALE_CONNECTION);
    assert_eq!(world.take_event(1).kind, EventKind::Disconnected { timed_out: false });
    world.ends[0].destroy(conn, world.now);
    world.ends[0].connect(world.now, 9, &connect_from(0, 11)).expect("sent");
    world.run_for(1000);
    assert!(world.take_events(1).iter().any(|event| matches!(event.kind, EventKind::Request { .. })));
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
        let mut world = lossless();
        let conns = world.connected();
        let request = forged_request(guid);
        for _ in 0..3 {
            world.ends[1].handle_mad(world.now, &path_to(0), &request, &|_, _| None);
            world.run_for(SECOND_NS);
        }
        let ended = |event: &Event| conns.contains(&event.conn);
        assert!(!world.take_events(1).iter().any(ended), "with GUID {guid:#x}");
        assert!(!world.take_events(0).iter().any(ended), "with GUID {guid:#x}");
        // The connection still works.
        world.ends[1].disconnect(world.now, conns[1]).expect("established");
        world.run_for(1000);
        assert_eq!(world.take_event(0).kind, EventKind::Disconnected { timed_out: false });
    }
}

#[test]
fn a_forged_acceptance_of_a_queue_pair_in_use_ends_no_connection() {
    let mut world = lossless();
    let conns = world.connected();
    // Another program of the same host accepts with the queue pair of the established connection.
    world.ends[0].connect(world.now, 9, &connect_from(0, 12)).expect("sent");
    world.run_for(1000);
    let second = world.take_event(1).conn;
    world.ends[1].assign_request(second, 9);
    world.ends[1].accept(world.now, second, &accept_with(22)).expect("accepted");
    world.run_for(SECOND_NS / 5);
    let ended = |event: &Event| conns.contains(&event.conn);
    assert!(!world.take_events(0).iter().any(ended) && !world.take_events(1).iter().any(ended));
}

#[test]
fn a_keepalive_finds_a_peer_that_lost_an_idle_connection() {
    for end in 0..2 {
        let mut world = lossless();
        let conns = world.connected();
        // The process was killed, and another process of its host answers the probe.
        world.ends[end] = Cm::new(config(99));
        world.run_for(Timing::default().keepalive_ns + SECOND_NS);
        let kinds: Vec<_> =
            world.take_events(1 - end).into_iter().map(|event| (event.conn, event.kind)).collect();
        assert_eq!(kinds.first(), Some(&(conns[1 - end], EventKind::Disconnected { timed_out: false })));
    }
}

#[test]
fn keepalives_are_infrequent_and_silence_ends_nothing() {
    let mut world = lossless();
    world.connected();
    let (before, minutes) = (world.sent, 10);
    world.run_for(minutes * 60 * SECOND_NS);
    assert_eq!((world.take_events(0), world.take_events(1)), (vec![], vec![]));
    let probes_max = 2 * minutes * 60 * SECOND_NS / (Timing::default().keepalive_ns * 3 / 4) + 2;
    assert!((1..=probes_max).contains(&(world.sent - before)), "{} datagrams", world.sent - before);
    // Without answers and ICMP errors the host is off, or the process is stopped.
    world.set_faults(all_lost());
    world.run_for(minutes * 60 * SECOND_NS);
    assert_eq!((world.take_events(0), world.take_events(1)), (vec![], vec![]));
}

#[test]
fn repeated_port_unreachable_errors_end_a_connection() {
    let mut world = lossless();
    let [_, passive] = world.connected();
    world.set_faults(all_lost());
    world.run_for(Timing::default().keepalive_ns);
    world.ends[1].handle_port_unreachable(world.now, address(0), 4792);
    assert_eq!(world.take_events(1), [], "the port belongs to another process");
    // An ICMP error may be forged, so each one triggers another keepalive.
    for _ in 0..2 {
        let sent = world.sent;
        world.ends[1].handle_port_unreachable(world.now, address(0), 4791);
        world.run_for(SECOND_NS / 2);
        assert!(world.sent > sent);
        assert_eq!(world.take_events(1), []);
    }
    world.ends[1].handle_port_unreachable(world.now, address(0), 4791);
    world.run_for(1000);
    let event = world.take_event(1);
    assert_eq!((event.conn, event.kind), (passive, EventKind::Disconnected { timed_out: false }));
}

#[test]
fn a_port_that_is_closed_late_is_found_closed_as_fast() {
    let mut world = lossless();
    let [_, passive] = world.connected();
    world.set_faults(all_lost());
    world.ends[1].suspect_host(world.now, address(0));
    world.run_for(1000);
    let interval_ns = Timing::default().first_interval_ns;
    // The first probe has arrived before the port was closed. Each later one brings an error.
    for _ in 0..3 {
        let sent = world.sent;
        world.run_for(interval_ns);
        assert_eq!(world.sent, sent + 1, "the next probe is sent an interval later");
        world.ends[1].handle_port_unreachable(world.now, address(0), 4791);
    }
    world.run_for(1000);
    let event = world.take_event(1);
    assert_eq!((event.conn, event.kind), (passive, EventKind::Disconnected { timed_out: false }));
}

#[test]
fn a_suspected_host_is_probed_immediately() {
    let mut world = lossless();
    world.connected();
    world.ends[0] = Cm::new(config(99));
    world.ends[1].suspect_host(world.now, address(0));
    world.run_for(1000);
    assert_eq!(world.take_event(1).kind, EventKind::Disconnected { timed_out: false });
}

#[test]
fn invalid_commands_fail() {
    let mut world = lossless();
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
    let busy = world.ends[1].listen(ListenerId(77), service(), Addresses::One(address(1)), 1);
    assert_eq!(busy, Err(Error::InUse));
}

#[test]
fn a_sidr_req_is_answered() {
    let mut world = lossless();
    let service_id = service_id(PortSpace::Udp, SERVICE);
    world.ends[1].listen(ListenerId(1), service_id, Addresses::All, 4).expect("free");
    let header = connect_from(0, 1).header;
    let request = SidrRequest { service_id, header, path: path_to(1), private_data: b"who?".to_vec() };
    world.ends[0].send_sidr_req(world.now, 7, &request).expect("sent");
    world.run_for(1000);
    let event = world.take_event(1);
    let EventKind::SidrRequest { private_data, .. } = &event.kind else { panic!("{event:?}") };
    assert_eq!(private_data[..5], *b"who?\0");
    world.ends[1].assign_request(event.conn, 8);
    let reply = SidrReply { qpn: 33, qkey: 44, private_data: b"me".to_vec() };
    world.ends[1].send_sidr_rep(world.now, event.conn, &reply).expect("sent");
    assert_eq!(world.ends[1].send_sidr_rep(world.now, event.conn, &reply), Err(Error::State));
    world.run_for(1000);
    let EventKind::SidrResponse(rep) = world.take_event(0).kind else { panic!("no answer") };
    assert_eq!(
        (rep.status, rep.qpn, rep.qkey, &rep.private_data[..3]),
        (SidrStatus::VALID, 33, 44, &b"me\0"[..])
    );
    // The service takes no SIDR requests.
    let other = SidrRequest { service_id: service(), ..request };
    world.ends[0].send_sidr_req(world.now, 7, &other).expect("sent");
    world.run_for(1000);
    let EventKind::SidrResponse(rep) = world.take_event(0).kind else { panic!("no answer") };
    assert_eq!(rep.status, SidrStatus::UNSUPPORTED);
}
