//! CM datagrams: emitted ones parse to the same message, and no input makes a parse panic.

use std::net::IpAddr;

use proptest::prelude::*;
use terrace_wire::cm::*;

fn array<const N: usize>() -> impl Strategy<Value = [u8; N]> {
    proptest::collection::vec(any::<u8>(), N).prop_map(|bytes| bytes.try_into().unwrap())
}

prop_compose! {
    fn path()(
        lids in any::<(u16, u16)>(),
        gids in (array::<16>(), array::<16>()),
        flow_label in 0u32..1 << 20,
        packet_rate in 0u8..64,
        bytes in any::<(u8, u8)>(),
        service_level in 0u8..16,
        subnet_local in any::<bool>(),
        local_ack_timeout in 0u8..32,
    ) -> ReqPath {
        ReqPath {
            local_lid: lids.0, remote_lid: lids.1, local_gid: gids.0, remote_gid: gids.1, flow_label, packet_rate,
            traffic_class: bytes.0, hop_limit: bytes.1, service_level, subnet_local, local_ack_timeout,
        }
    }
}

prop_compose! {
    fn req()(
        ids in any::<(u32, u64, u64, u32)>(),
        qpn_and_psn in (0u32..1 << 24, 0u32..1 << 24),
        depths in any::<(u8, u8)>(),
        timeouts in (0u8..32, 0u8..32),
        transport in proptest::sample::select(vec![Transport::Rc, Transport::Uc, Transport::Rd, Transport::Xrc, Transport::Extended(5)]),
        flags in any::<(bool, bool)>(),
        retries in (0u8..8, 0u8..8, 0u8..16),
        pkey in any::<u16>(),
        path_mtu in 1u8..6,
        primary in path(),
        private_data in array(),
    ) -> Message {
        Message::Req(Req {
            local_comm_id: ids.0, service_id: ids.1, local_ca_guid: ids.2, local_qkey: ids.3,
            local_qpn: qpn_and_psn.0, starting_psn: qpn_and_psn.1,
            responder_resources: depths.0, initiator_depth: depths.1,
            remote_cm_response_timeout: timeouts.0, local_cm_response_timeout: timeouts.1,
            transport, flow_control: flags.0, srq: flags.1,
            retry_count: retries.0, rnr_retry_count: retries.1, max_cm_retries: retries.2,
            pkey, path_mtu, primary, private_data,
        })
    }
}

prop_compose! {
    fn rep()(
        ids in any::<(u32, u32, u32, u64)>(),
        qpn_and_psn in (0u32..1 << 24, 0u32..1 << 24),
        local_eecn in 0u32..1 << 24,
        depths in any::<(u8, u8)>(),
        target_ack_delay in 0u8..32,
        rnr_retry_count in 0u8..8,
        flags in any::<(bool, bool)>(),
        private_data in array(),
    ) -> Message {
        Message::Rep(Rep {
            local_comm_id: ids.0, remote_comm_id: ids.1, local_qkey: ids.2, local_ca_guid: ids.3,
            local_qpn: qpn_and_psn.0, local_eecn, starting_psn: qpn_and_psn.1,
            responder_resources: depths.0, initiator_depth: depths.1, target_ack_delay, rnr_retry_count,
            flow_control: flags.0, srq: flags.1, private_data,
        })
    }
}

fn answered() -> impl Strategy<Value = Answered> {
    proptest::sample::select(vec![Answered::Req, Answered::Rep, Answered::Other])
}

fn message() -> impl Strategy<Value = Message> {
    let ids = any::<(u32, u32)>;
    prop_oneof![
        req(),
        rep(),
        (ids(), answered(), 0u8..32, array()).prop_map(|(ids, answered, service_timeout, private_data)| {
            Message::Mra(Mra {
                local_comm_id: ids.0,
                remote_comm_id: ids.1,
                answered,
                service_timeout,
                private_data,
            })
        }),
        (ids(), answered(), any::<u16>(), 0u8..73, array(), array()).prop_map(
            |(ids, answered, reason, info_len, info, private_data)| Message::Rej(Rej {
                local_comm_id: ids.0,
                remote_comm_id: ids.1,
                answered,
                reason: RejReason(reason),
                info_len,
                info,
                private_data,
            })
        ),
        (ids(), array()).prop_map(|(ids, private_data)| Message::Rtu(Rtu {
            local_comm_id: ids.0,
            remote_comm_id: ids.1,
            private_data
        })),
        (ids(), 0u32..1 << 24, array()).prop_map(|(ids, remote_qpn, private_data)| Message::Dreq(Dreq {
            local_comm_id: ids.0,
            remote_comm_id: ids.1,
            remote_qpn,
            private_data
        })),
        (ids(), array()).prop_map(|(ids, private_data)| Message::Drep(Drep {
            local_comm_id: ids.0,
            remote_comm_id: ids.1,
            private_data
        })),
        (any::<(u32, u16, u64)>(), array()).prop_map(|(ids, private_data)| Message::SidrReq(SidrReq {
            request_id: ids.0,
            pkey: ids.1,
            service_id: ids.2,
            private_data
        })),
        (any::<(u32, u8, u8, u64, u32)>(), 0u32..1 << 24, array(), array()).prop_map(
            |(ids, qpn, info, private_data)| Message::SidrRep(SidrRep {
                request_id: ids.0,
                status: SidrStatus(ids.1),
                info_len: ids.2,
                qpn,
                service_id: ids.3,
                qkey: ids.4,
                info,
                private_data
            })
        ),
    ]
}

proptest! {
    #[test]
    fn emitted_messages_parse_to_the_same_message(tid in any::<u64>(), message in message()) {
        let mad = Mad { tid, message };
        prop_assert_eq!(Mad::decode(&mad.encode()), Ok(mad));
    }

    #[test]
    fn any_bytes_fail_or_round_trip(
        attribute in 0x0010u16..0x001c,
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = bytes;
        if bytes.len() >= 24 {
            bytes[..4].copy_from_slice(&[1, CM_CLASS, 2, 3]);
            bytes[16..18].copy_from_slice(&attribute.to_be_bytes());
        }
        if let Ok(mad) = Mad::decode(&bytes) {
            prop_assert_eq!(Mad::decode(&mad.encode()), Ok(mad));
        }
    }

    #[test]
    fn addresses_round_trip(source_port in any::<u16>(), v4 in any::<[[u8; 4]; 2]>(), v6 in any::<[[u8; 16]; 2]>()) {
        let headers = [
            IpHeader { source_port, source: v4[0].into(), destination: v4[1].into() },
            IpHeader { source_port, source: v6[0].into(), destination: v6[1].into() },
        ];
        for header in headers {
            prop_assert_eq!(IpHeader::decode(&header.encode()), Ok(header));
        }
    }
}

/// The offsets of a REQ's fields, by hand from table 106 of the specification.
#[test]
fn req_fields_are_at_the_offsets_of_the_standard() {
    let primary = ReqPath {
        local_lid: 0xffff,
        remote_lid: 0xfffe,
        local_gid: [0x11; 16],
        remote_gid: [0x22; 16],
        flow_label: 0xabcde,
        packet_rate: 0x2a,
        traffic_class: 0x60,
        hop_limit: 64,
        service_level: 3,
        subnet_local: true,
        local_ack_timeout: 19,
    };
    let req = Req {
        local_comm_id: 0x0102_0304,
        service_id: service_id(PortSpace::Tcp, 7174),
        local_ca_guid: 0x1122_3344_5566_7788,
        local_qkey: 0,
        local_qpn: 0x0a0b0c,
        responder_resources: 4,
        initiator_depth: 5,
        remote_cm_response_timeout: 20,
        transport: Transport::Uc,
        flow_control: true,
        starting_psn: 0x010203,
        local_cm_response_timeout: 21,
        retry_count: 7,
        pkey: 0xffff,
        path_mtu: 3,
        rnr_retry_count: 6,
        max_cm_retries: 15,
        srq: true,
        primary,
        private_data: [0x77; 92],
    };
    let bytes = Mad { tid: 9, message: Message::Req(req) }.encode();
    assert_eq!(bytes[..18], [1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0x10]);
    let body = &bytes[24..];
    assert_eq!(body[8..16], [0, 0, 0, 0, 0x01, 0x06, 0x1c, 0x06]);
    assert_eq!(body[32..36], [0x0a, 0x0b, 0x0c, 4]);
    assert_eq!((body[39], body[43]), (5, 20 << 3 | 1 << 1 | 1));
    assert_eq!(body[44..52], [1, 2, 3, 21 << 3 | 7, 0xff, 0xff, 3 << 4 | 6, 15 << 4 | 1 << 3]);
    assert_eq!(body[88..96], [0xab, 0xcd, 0xe0, 0x2a, 0x60, 64, 3 << 4 | 1 << 3, 19 << 3]);
    assert_eq!((body[139], body[140], body.len()), (0, 0x77, 232));
}

#[test]
fn datagrams_of_other_classes_fail_to_parse() {
    let drep = Mad {
        tid: 1,
        message: Message::Drep(Drep { local_comm_id: 1, remote_comm_id: 2, private_data: [0; 224] }),
    };
    let bytes = drep.encode();
    assert_eq!(Mad::decode(&bytes[..255]), Err(MadError::Length(255)));
    for (at, field) in [(0, "base version"), (1, "class"), (2, "class version"), (3, "method")] {
        let mut other = bytes;
        other[at] = 0x3d;
        assert_eq!(Mad::decode(&other), Err(MadError::Foreign { field, value: 0x3d }));
    }
    let mut lap = bytes;
    lap[17] = 0x19;
    assert_eq!(Mad::decode(&lap), Err(MadError::Attribute(0x19)));
}

#[test]
fn ports_and_services() {
    assert_eq!(service_id(PortSpace::Udp, 7174), 0x0111_1c06);
    assert_eq!(service_of(0x0106_0001), Some((PortSpace::Tcp, 1)));
    assert_eq!(service_of(0x0002_0106_0001), None);
    assert_eq!(service_of(0x0107_0001), None);
    let mixed = IpHeader {
        source_port: 1,
        source: IpAddr::from([192, 0, 2, 1]),
        destination: "fd00::1".parse().unwrap(),
    };
    let read = IpHeader::decode(&mixed.encode()).unwrap();
    assert_eq!(read.source, "::ffff:192.0.2.1".parse::<IpAddr>().unwrap());
    assert_eq!(IpHeader::decode(&[0; 35]), Err(IpHeaderError::Length(35)));
    assert_eq!(IpHeader::decode(&[0; 36]), Err(IpHeaderError::Family(0)));
    let redirect = Redirect { gid: [9; 16], pkey: 0xffff, qpn: 0x03_0001, qkey: 0x8001_0000 };
    assert_eq!(Redirect::decode(&redirect.encode()), Some(redirect));
    assert_eq!(Redirect::decode(&[0; 72]), None);
}
