//! The bytes of every header, written out by hand from the figures of IBTA volume 1, chapter 9, and annexes A17 and
//! A19. tshark 4.0.17's InfiniBand dissector finds the same values in these packets, except FLUSH, which it does not
//! know. There the order of the headers and the bits of the FETH are those of the Linux kernel's rxe. Of XRC (annex
//! A14) tshark knows the opcodes but not the header; its position is that of the patches that gave rxe XRC.

use terrace_wire::{
    Aeth, AppendEth, AppendFlags, AtomicEth, Bth, Deth, Extensions, Feth, MAX_HEADER_LEN, NakCode, Opcode,
    Packet, ParseError, Psn, Reth, Syndrome, emit_headers,
};

const RETH: Reth = Reth { va: 0x1122_3344_5566_7788, rkey: 0x99aa_bbcc, length: 0x0102_0304 };

fn bth(opcode: Opcode) -> Bth {
    Bth {
        opcode,
        solicited: false,
        migrated: false,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        qpn: 0x00_0011,
        ack_request: false,
        psn: Psn::new(0x22_3344),
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let byte =
        |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("hex digits");
    digits.chunks(2).map(byte).collect()
}

/// Checks that these headers are emitted as these bytes and parsed back.
fn check(bth: Bth, ext: Extensions, bytes: &str) {
    let mut buf = [0xee; MAX_HEADER_LEN];
    let len = emit_headers(&bth, &ext, &mut buf).expect("the buffer suffices");
    let expected = hex(bytes);
    assert_eq!(buf[..len], expected, "{:?}", bth.opcode);
    assert!(buf[len..].iter().all(|&byte| byte == 0xee), "{:?} wrote behind its headers", bth.opcode);
    assert_eq!(Packet::parse(&expected), Ok(Packet { bth, ext, payload: &[] }));
}

#[test]
fn base_transport_header_alone() {
    check(bth(Opcode::RcSendMiddle), Extensions::default(), "01 00 ffff 00 000011 00 223344");
}

#[test]
fn each_bit_of_the_base_transport_header() {
    let base = bth(Opcode::RcSendOnly);
    let none = Extensions::default();
    check(Bth { solicited: true, ..base }, none, "04 80 ffff 00 000011 00 223344");
    check(Bth { migrated: true, ..base }, none, "04 40 ffff 00 000011 00 223344");
    check(Bth { pkey: 0x8001, ..base }, none, "04 00 8001 00 000011 00 223344");
    check(Bth { fecn: true, ..base }, none, "04 00 ffff 80 000011 00 223344");
    check(Bth { becn: true, ..base }, none, "04 00 ffff 40 000011 00 223344");
    check(Bth { qpn: 0xff_fffe, ..base }, none, "04 00 ffff 00 fffffe 00 223344");
    check(Bth { ack_request: true, ..base }, none, "04 00 ffff 00 000011 80 223344");
    check(Bth { psn: Psn::new(0xff_ffff), ..base }, none, "04 00 ffff 00 000011 00 ffffff");
}

#[test]
fn padding_is_counted_and_stripped() {
    let bytes = hex("04 30 ffff 00 000011 00 223344 61 000000");
    let packet = Packet::parse(&bytes).expect("a valid packet");
    assert_eq!((packet.bth.pad, packet.payload), (3, &b"a"[..]));
}

#[test]
fn rdma_header_and_immediate() {
    let ext = Extensions { reth: Some(RETH), ..Extensions::default() };
    check(
        bth(Opcode::RcReadRequest),
        ext,
        "0c 00 ffff 00 000011 00 223344 1122334455667788 99aabbcc 01020304",
    );
    // The program's value is already in network order: its bytes are sent as they are in memory.
    let imm = Some(u32::from_ne_bytes([0xde, 0xad, 0xbe, 0xef]));
    check(
        bth(Opcode::RcWriteOnlyImm),
        Extensions { imm, ..ext },
        "0b 00 ffff 00 000011 00 223344 1122334455667788 99aabbcc 01020304 deadbeef",
    );
    check(
        bth(Opcode::UcWriteLastImm),
        Extensions { imm, ..Extensions::default() },
        "29 00 ffff 00 000011 00 223344 deadbeef",
    );
}

#[test]
fn invalidated_key() {
    let ext = Extensions { ieth: Some(0x0102_0304), ..Extensions::default() };
    let named = Extensions { xrc_srqn: Some(0x00ab_cdef), ..ext };
    check(bth(Opcode::XrcSendOnlyInvalidate), named, "b7 00 ffff 00 000011 00 223344 00abcdef 01020304");
    check(bth(Opcode::RcSendOnlyInvalidate), ext, "17 00 ffff 00 000011 00 223344 01020304");
}

#[test]
fn acknowledgements() {
    let syndromes = [
        (Syndrome::Ack { credits: 31 }, "1f"),
        (Syndrome::RnrNak { timer: 12 }, "2c"),
        (Syndrome::Nak(NakCode::PsnSequence), "60"),
        (Syndrome::Nak(NakCode::InvalidRequest), "61"),
        (Syndrome::Nak(NakCode::RemoteAccess), "62"),
        (Syndrome::Nak(NakCode::RemoteOperation), "63"),
        (Syndrome::Nak(NakCode::InvalidRdRequest), "64"),
    ];
    for (syndrome, byte) in syndromes {
        let ext = Extensions { aeth: Some(Aeth { syndrome, msn: 0xab_cdef }), ..Extensions::default() };
        check(bth(Opcode::RcAcknowledge), ext, &format!("11 00 ffff 00 000011 00 223344 {byte} abcdef"));
    }
}

#[test]
fn atomics() {
    let atomic = AtomicEth {
        va: 0x1122_3344_5566_7788,
        rkey: 0x99aa_bbcc,
        swap_or_add: 0x0102_0304_0506_0708,
        compare: 0x1112_1314_1516_1718,
    };
    let body = "00 ffff 00 000011 00 223344 1122334455667788 99aabbcc 0102030405060708 1112131415161718";
    let ext = Extensions { atomic: Some(atomic), ..Extensions::default() };
    check(bth(Opcode::RcCompareSwap), ext, &format!("13 {body}"));
    check(bth(Opcode::RcFetchAdd), ext, &format!("14 {body}"));
    let ext = Extensions {
        aeth: Some(Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn: 1 }),
        atomic_ack: Some(0x0102_0304_0506_0708),
        ..Extensions::default()
    };
    check(bth(Opcode::RcAtomicAcknowledge), ext, "12 00 ffff 00 000011 00 223344 1f 000001 0102030405060708");
}

#[test]
fn append_has_key_length_and_flags() {
    let append = AppendEth { rkey: 0x99aa_bbcc, length: 0x0102_0304, flags: AppendFlags::COMMIT };
    let ext = Extensions { append: Some(append), ..Extensions::default() };
    let body = "00 ffff 00 000011 00 223344 99aabbcc 01020304";
    check(bth(Opcode::RcAppendFirst), ext, &format!("c0 {body} 00000001"));
    check(bth(Opcode::RcAppendOnly), ext, &format!("c4 {body} 00000001"));
    // Unknown flags are kept: the responder refuses them.
    let unknown = AppendEth { flags: AppendFlags::from_bits_retain(0x8000_0002), ..append };
    check(
        bth(Opcode::RcAppendOnly),
        Extensions { append: Some(unknown), ..ext },
        &format!("c4 {body} 80000002"),
    );
    check(bth(Opcode::RcAppendMiddle), Extensions::default(), "c1 00 ffff 00 000011 00 223344");
    check(bth(Opcode::RcAppendLast), Extensions::default(), "c2 00 ffff 00 000011 00 223344");
}

#[test]
fn datagrams() {
    let ext = Extensions {
        deth: Some(Deth { qkey: 0x1111_1111, source_qpn: 0x01_0002 }),
        imm: Some(u32::from_ne_bytes([1, 2, 3, 4])),
        ..Extensions::default()
    };
    check(bth(Opcode::UdSendOnlyImm), ext, "65 00 ffff 00 000011 00 223344 11111111 00 010002 01020304");
}

#[test]
fn flush_puts_its_own_header_before_the_address() {
    let ext = Extensions {
        feth: Some(Feth { placement: 2, selectivity: 1 }),
        reth: Some(RETH),
        ..Extensions::default()
    };
    check(
        bth(Opcode::RcFlush),
        ext,
        "1c 00 ffff 00 000011 00 223344 00000012 1122334455667788 99aabbcc 01020304",
    );
}

#[test]
fn congestion_notification() {
    let bth = Bth { becn: true, psn: Psn::new(0), ..bth(Opcode::Cnp) };
    let bytes = "81 00 ffff 40 000011 00 000000 00000000 00000000 00000000 00000000";
    check(bth, Extensions::default(), bytes);
}

#[test]
fn reserved_bits_are_ignored() {
    let packet = |text: &str| Packet::parse(&hex(text)).map(|packet| (packet.bth, packet.ext));
    assert_eq!(
        packet("04 00 ffff 3f 000011 7f 223344"),
        packet("04 00 ffff 00 000011 00 223344"),
        "base transport header"
    );
    assert_eq!(
        packet("64 00 ffff 00 000011 00 223344 11111111 ff 010002"),
        packet("64 00 ffff 00 000011 00 223344 11111111 00 010002"),
        "datagram header"
    );
    assert_eq!(
        packet("1c 00 ffff 00 000011 00 223344 ffffffd2 1122334455667788 99aabbcc 01020304"),
        packet("1c 00 ffff 00 000011 00 223344 00000012 1122334455667788 99aabbcc 01020304"),
        "FLUSH header"
    );
}

#[test]
fn invalid_packets_fail_to_parse() {
    let refused = |text: &str| Packet::parse(&hex(text)).expect_err("not a packet");
    assert_eq!(refused(""), ParseError::Truncated);
    assert_eq!(refused("04 00 ffff 00 000011 00 2233"), ParseError::Truncated);
    assert_eq!(refused("0c 00 ffff 00 000011 00 223344 11223344"), ParseError::Truncated);
    assert_eq!(refused("15 00 ffff 00 000011 00 223344"), ParseError::UnknownOpcode(0x15));
    assert_eq!(refused("44 00 ffff 00 000011 00 223344"), ParseError::UnknownOpcode(0x44));
    assert_eq!(refused("04 01 ffff 00 000011 00 223344"), ParseError::TransportVersion(1));
    assert_eq!(refused("04 30 ffff 00 000011 00 223344 0000"), ParseError::Padding);
    assert_eq!(refused("11 00 ffff 00 000011 00 223344 1f000001 00"), ParseError::UnexpectedPayload);
    assert_eq!(refused("11 00 ffff 00 000011 00 223344 40000001"), ParseError::ReservedSyndrome(0x40));
    assert_eq!(refused("11 00 ffff 00 000011 00 223344 65000001"), ParseError::ReservedSyndrome(0x65));
    assert_eq!(refused("11 00 ffff 00 000011 00 223344 9f000001"), ParseError::ReservedSyndrome(0x9f));
}

#[test]
fn values_too_wide_for_their_field_are_truncated() {
    let wide = Bth { pad: 7, qpn: 0xff00_0011, ..bth(Opcode::UdSendOnly) };
    let ext = Extensions { deth: Some(Deth { qkey: 1, source_qpn: 0xee00_0002 }), ..Extensions::default() };
    let mut buf = [0; MAX_HEADER_LEN];
    let len = emit_headers(&wide, &ext, &mut buf).expect("the buffer suffices");
    assert_eq!(buf[..len], hex("64 30 ffff 00 000011 00 223344 00000001 00 000002"));
}
