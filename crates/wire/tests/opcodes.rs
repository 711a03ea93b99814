//! The opcode table against the specification's lists, written here a second time in another form.

use std::collections::HashSet;

use terrace_wire::{Headers, MAX_HEADER_LEN, Opcode, Operation, Position, Service, Trailer};

const SERVICES: [Service; 5] = [Service::Rc, Service::Uc, Service::Ud, Service::Cnp, Service::Xrc];
const OPERATIONS: [Operation; 14] = [
    Operation::Send,
    Operation::Write,
    Operation::ReadRequest,
    Operation::ReadResponse,
    Operation::Acknowledge,
    Operation::AtomicAcknowledge,
    Operation::CompareSwap,
    Operation::FetchAdd,
    Operation::Flush,
    Operation::AtomicWrite,
    Operation::Cnp,
    Operation::Append,
    Operation::MaskedCompareSwap,
    Operation::MaskedFetchAdd,
];
const POSITIONS: [Position; 4] = [Position::First, Position::Middle, Position::Last, Position::Only];
const TRAILERS: [Trailer; 3] = [Trailer::None, Trailer::Immediate, Trailer::Invalidate];

/// Header length in bytes by opcode byte, as the figures of IBTA chapter 9 and annexes A17 and A19 add up; for
/// APPEND those of `docs/append.md`.
fn specified_header_len(byte: u8) -> Option<usize> {
    let extensions = match byte {
        // UC has the first twelve operations of RC.
        0x00..=0x02 | 0x04 | 0x07 | 0x08 | 0x20..=0x22 | 0x24 | 0x27 | 0x28 => 0,
        0x03 | 0x05 | 0x09 | 0x23 | 0x25 | 0x29 => 4,
        0x06 | 0x0a | 0x26 | 0x2a | 0x0c => 16,
        0x0b | 0x2b => 16 + 4,
        0x0e => 0,
        0x0d | 0x0f..=0x11 => 4,
        0x12 => 4 + 8,
        0x13 | 0x14 => 28,
        0x16 | 0x17 => 4,
        0x1c => 4 + 16,
        0x1d => 16,
        0x64 => 8,
        0x65 => 8 + 4,
        0x81 => 16,
        // Terrace's own.
        0xd0 | 0xd1 => 28,
        // Annex A14: requests have 4 bytes more than those of RC, responses are the same.
        0xad..=0xb2 => return specified_header_len(byte & 0x1f),
        0xa0..=0xb7 => return specified_header_len(byte & 0x1f).map(|len| len + 4),
        0xc0 | 0xc4 => 12,
        0xc1 | 0xc2 => 0,
        _ => return None,
    };
    Some(12 + extensions)
}

#[test]
fn every_byte_is_an_opcode_exactly_if_specified() {
    for byte in 0..=u8::MAX {
        let opcode = Opcode::from_byte(byte);
        assert_eq!(opcode.map(|opcode| opcode.info().header_len), specified_header_len(byte), "{byte:#04x}");
        if let Some(opcode) = opcode {
            assert_eq!(opcode as u8, byte);
            assert_eq!(opcode.info().opcode, opcode);
        }
    }
    assert_eq!(Opcode::all().len(), 69);
}

#[test]
fn service_operation_position_and_trailer_identify_one_opcode() {
    let mut found = HashSet::new();
    for service in SERVICES {
        for operation in OPERATIONS {
            for position in POSITIONS {
                for trailer in TRAILERS {
                    let Some(opcode) = Opcode::for_message(service, operation, position, trailer) else {
                        continue;
                    };
                    let info = opcode.info();
                    assert_eq!(
                        (info.service, info.operation, info.position, info.trailer),
                        (service, operation, position, trailer)
                    );
                    assert!(found.insert(opcode), "{opcode:?} has two meanings");
                }
            }
        }
    }
    assert_eq!(found, Opcode::all().collect());
}

#[test]
fn the_upper_bits_are_the_service() {
    for opcode in Opcode::all() {
        let service = match opcode as u8 >> 5 {
            0 => Service::Rc,
            1 => Service::Uc,
            3 => Service::Ud,
            4 => Service::Cnp,
            5 => Service::Xrc,
            // 9.2: a manufacturer's opcode, of any service.
            6 => Service::Rc,
            other => panic!("{opcode:?} belongs to service {other}"),
        };
        assert_eq!(opcode.info().service, service);
    }
}

#[test]
fn the_unreliable_connection_repeats_the_reliable_one() {
    for byte in 0..=0x0b {
        let [rc, uc] = [byte, byte | 0x20].map(|byte| Opcode::from_byte(byte).expect("specified").info());
        assert_eq!(
            (rc.operation, rc.position, rc.trailer, rc.headers, rc.payload),
            (uc.operation, uc.position, uc.trailer, uc.headers, uc.payload)
        );
        assert_eq!(rc.name.strip_prefix("RC_"), uc.name.strip_prefix("UC_"));
    }
}

#[test]
fn the_extended_reliable_connection_repeats_the_reliable_one_with_a_queue_in_its_requests() {
    for byte in (0..=0x14).chain([0x16, 0x17]) {
        let [rc, xrc] = [byte, byte | 0xa0].map(|byte| Opcode::from_byte(byte).expect("specified").info());
        let is_answer = (0x0d..=0x12).contains(&byte);
        let added = if is_answer { Headers::empty() } else { Headers::XRCETH };
        assert_eq!(
            (rc.operation, rc.position, rc.trailer, rc.headers | added, rc.payload),
            (xrc.operation, xrc.position, xrc.trailer, xrc.headers, xrc.payload)
        );
        assert_eq!(rc.name.strip_prefix("RC_"), xrc.name.strip_prefix("XRC_"));
    }
}

#[test]
fn headers_follow_from_the_meaning() {
    for info in Opcode::all().map(Opcode::info) {
        let has = |header| info.headers.contains(header);
        assert_eq!(has(Headers::IMM), info.trailer == Trailer::Immediate, "{}", info.name);
        assert_eq!(has(Headers::IETH), info.trailer == Trailer::Invalidate, "{}", info.name);
        assert_eq!(has(Headers::DETH), info.service == Service::Ud, "{}", info.name);
        assert!(info.service == Service::Xrc || !has(Headers::XRCETH), "{}", info.name);
        assert!(info.trailer == Trailer::None || info.position.is_last(), "{}", info.name);
        // 9.4: only the first packet of a message has the address.
        let addressed =
            matches!(info.operation, Operation::Write | Operation::ReadRequest | Operation::AtomicWrite)
                && info.position.is_first()
                || info.operation == Operation::Flush;
        assert_eq!(has(Headers::RETH), addressed, "{}", info.name);
        let appends = info.operation == Operation::Append && info.position.is_first();
        assert_eq!(has(Headers::APPEND_ETH), appends, "{}", info.name);
        let atomic = matches!(
            info.operation,
            Operation::CompareSwap
                | Operation::FetchAdd
                | Operation::MaskedCompareSwap
                | Operation::MaskedFetchAdd
        );
        assert_eq!(has(Headers::ATOMIC_ETH), atomic, "{}", info.name);
        // 9.4: the middle packets of a READ response acknowledge nothing.
        let acknowledges = matches!(info.operation, Operation::Acknowledge | Operation::AtomicAcknowledge)
            || info.operation == Operation::ReadResponse && info.position != Position::Middle;
        assert_eq!(has(Headers::AETH), acknowledges, "{}", info.name);
        let data = matches!(
            info.operation,
            Operation::Send
                | Operation::Write
                | Operation::ReadResponse
                | Operation::AtomicWrite
                | Operation::Append
                | Operation::MaskedCompareSwap
        );
        assert_eq!(info.payload, data, "{}", info.name);
    }
}

#[test]
fn names_differ_and_the_longest_header_is_an_atomics() {
    let names: HashSet<_> = Opcode::all().map(|opcode| opcode.info().name).collect();
    assert_eq!(names.len(), Opcode::all().len());
    assert_eq!(MAX_HEADER_LEN, Opcode::XrcCompareSwap.info().header_len);
    assert!(Opcode::all().all(|opcode| opcode.info().header_len % 4 == 0));
}

#[test]
fn positions_begin_and_end_messages() {
    let ends = POSITIONS.map(|position| (position.is_first(), position.is_last()));
    assert_eq!(ends, [(true, false), (false, false), (false, true), (true, true)]);
}
