//! Emitted headers parse to the same headers, and no input makes a parse panic.

use proptest::option;
use proptest::prelude::*;
use terrace_wire::{
    Aeth, AppendEth, AppendFlags, AtomicEth, Bth, Deth, EmitError, Extensions, Feth, Headers, MAX_HEADER_LEN,
    NakCode, Opcode, Packet, ParseError, Psn, Reth, Syndrome, emit_headers,
};

fn opcode() -> impl Strategy<Value = Opcode> {
    proptest::sample::select(Opcode::all().collect::<Vec<_>>())
}

prop_compose! {
    fn bth()(
        opcode in opcode(),
        flags in any::<[bool; 5]>(),
        pad in 0u8..4,
        pkey in any::<u16>(),
        qpn in 0u32..1 << 24,
        psn in any::<u32>(),
    ) -> Bth {
        let [solicited, migrated, fecn, becn, ack_request] = flags;
        Bth { opcode, solicited, migrated, pad, pkey, fecn, becn, qpn, ack_request, psn: Psn::new(psn) }
    }
}

fn syndrome() -> impl Strategy<Value = Syndrome> {
    prop_oneof![
        (0u8..32).prop_map(|credits| Syndrome::Ack { credits }),
        (0u8..32).prop_map(|timer| Syndrome::RnrNak { timer }),
        proptest::sample::select(vec![
            NakCode::PsnSequence,
            NakCode::InvalidRequest,
            NakCode::RemoteAccess,
            NakCode::RemoteOperation,
            NakCode::InvalidRdRequest,
        ])
        .prop_map(Syndrome::Nak),
    ]
}

prop_compose! {
    /// All headers; the opcode decides which of them are emitted.
    fn extensions()(
        reth in any::<(u64, u32, u32)>(),
        aeth in (syndrome(), 0u32..1 << 24),
        atomic in any::<(u64, u32, u64, u64)>(),
        atomic_ack in any::<u64>(),
        words in any::<(u32, u32)>(),
        deth in (any::<u32>(), 0u32..1 << 24),
        feth in (0u8..16, 0u8..4),
        xrc_srqn in 0u32..1 << 24,
        append in any::<(u32, u32, u32)>(),
    ) -> Extensions {
        Extensions {
            reth: Some(Reth { va: reth.0, rkey: reth.1, length: reth.2 }),
            aeth: Some(Aeth { syndrome: aeth.0, msn: aeth.1 }),
            atomic: Some(AtomicEth { va: atomic.0, rkey: atomic.1, swap_or_add: atomic.2, compare: atomic.3 }),
            atomic_ack: Some(atomic_ack),
            imm: Some(words.0),
            ieth: Some(words.1),
            deth: Some(Deth { qkey: deth.0, source_qpn: deth.1 }),
            feth: Some(Feth { placement: feth.0, selectivity: feth.1 }),
            xrc_srqn: Some(xrc_srqn),
            append: Some(AppendEth {
                rkey: append.0,
                length: append.1,
                flags: AppendFlags::from_bits_retain(append.2),
            }),
        }
    }
}

/// The headers of `all` that are in `headers`.
fn select(all: &Extensions, headers: Headers) -> Extensions {
    Extensions {
        reth: all.reth.filter(|_| headers.contains(Headers::RETH)),
        aeth: all.aeth.filter(|_| headers.contains(Headers::AETH)),
        atomic: all.atomic.filter(|_| headers.contains(Headers::ATOMIC_ETH)),
        atomic_ack: all.atomic_ack.filter(|_| headers.contains(Headers::ATOMIC_ACK_ETH)),
        imm: all.imm.filter(|_| headers.contains(Headers::IMM)),
        ieth: all.ieth.filter(|_| headers.contains(Headers::IETH)),
        deth: all.deth.filter(|_| headers.contains(Headers::DETH)),
        feth: all.feth.filter(|_| headers.contains(Headers::FETH)),
        xrc_srqn: all.xrc_srqn.filter(|_| headers.contains(Headers::XRCETH)),
        append: all.append.filter(|_| headers.contains(Headers::APPEND_ETH)),
    }
}

/// The packet's bytes: headers, payload and the padding that `bth` announces.
fn build(bth: &Bth, ext: &Extensions, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; MAX_HEADER_LEN];
    let header_len = emit_headers(bth, ext, &mut bytes).expect("all headers are there");
    bytes.truncate(header_len);
    bytes.extend(payload);
    bytes.extend(std::iter::repeat_n(0, usize::from(bth.pad)));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn emitted_packets_parse_to_the_same_values(
        bth in bth(),
        ext in extensions(),
        payload in proptest::collection::vec(any::<u8>(), 0..80),
        before in (bth(), extensions()),
    ) {
        let info = bth.opcode.info();
        let payload = if info.payload { payload.as_slice() } else { &[] };
        let bytes = build(&bth, &ext, payload);
        let expected = Packet { bth, ext: select(&ext, info.headers), payload };
        prop_assert_eq!(Packet::parse(&bytes), Ok(expected));
        let others = Headers::DETH | Headers::XRCETH | Headers::FETH;
        let reth = expected.ext.reth.filter(|_| !info.headers.intersects(others));
        prop_assert_eq!(Reth::of_unverified(&bytes), reth);
        // Reading into a used packet keeps nothing of its old content.
        let mut reused = Packet { bth: before.0, ext: before.1, payload: &[1] };
        prop_assert_eq!(reused.read(&bytes), Ok(()));
        prop_assert_eq!(reused, expected);
    }

    #[test]
    fn a_truncated_packet_is_an_error(bth in bth(), ext in extensions(), keep in any::<proptest::sample::Index>()) {
        let bytes = build(&Bth { pad: 0, ..bth }, &ext, &[]);
        let cut = &bytes[..keep.index(bytes.len())];
        prop_assert_eq!(Packet::parse(cut), Err(ParseError::Truncated));
        prop_assert!(Reth::of_unverified(cut).is_none_or(|reth| Some(reth) == ext.reth));
    }

    #[test]
    fn any_bytes_parse_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..200), known in option::of(opcode())) {
        let mut bytes = bytes;
        // Random bytes alone rarely contain a known opcode.
        if let (Some(opcode), [first, second, ..]) = (known, bytes.as_mut_slice()) {
            *first = opcode as u8;
            *second &= 0xf0;
        }
        if let Ok(packet) = Packet::parse(&bytes) {
            let again = build(&packet.bth, &packet.ext, packet.payload);
            prop_assert_eq!(Packet::parse(&again), Ok(packet));
            prop_assert_eq!(again.len(), bytes.len());
        }
    }

    #[test]
    fn a_buffer_that_is_too_short_is_an_error(bth in bth(), ext in extensions(), len in 0..MAX_HEADER_LEN) {
        let mut buf = vec![0; len];
        let header_len = bth.opcode.info().header_len;
        let expected = if len < header_len { Err(EmitError::BufferTooShort) } else { Ok(header_len) };
        prop_assert_eq!(emit_headers(&bth, &ext, &mut buf), expected);
    }
}

#[test]
fn a_missing_header_is_an_error() {
    for opcode in Opcode::all() {
        let bth = Bth {
            opcode,
            solicited: false,
            migrated: false,
            pad: 0,
            pkey: 0xffff,
            fecn: false,
            becn: false,
            qpn: 1,
            ack_request: false,
            psn: Psn::new(0),
        };
        let needed = opcode.info().headers - Headers::CNP_RESERVED;
        let result = emit_headers(&bth, &Extensions::default(), &mut [0; MAX_HEADER_LEN]);
        match needed.iter().next() {
            Some(first) => assert_eq!(result, Err(EmitError::MissingHeader(first)), "{opcode:?}"),
            None => assert_eq!(result, Ok(opcode.info().header_len), "{opcode:?}"),
        }
    }
}
