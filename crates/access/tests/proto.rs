//! The control protocol: round trips, and invalid input.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;
use smallvec::{SmallVec, smallvec};
use terrace_access::layout::Layout;
use terrace_access::pages::PageBitmap;
use terrace_access::proto::*;

fn statuses() -> impl Strategy<Value = Status> {
    prop::sample::select(&Status::ALL[..])
}

fn failures() -> impl Strategy<Value = Status> {
    prop::sample::select(&Status::ALL[1..])
}

fn mtus() -> impl Strategy<Value = u16> + Clone {
    prop::sample::select(vec![256_u16, 512, 1024, 2048, 4096])
}

fn regions() -> impl Strategy<Value = RegionDescription> {
    (
        any::<u32>(),
        1_u64..1 << 36,
        0_u64..1 << 36,
        12_u32..=30,
        any::<[u8; 32]>(),
        any::<u64>(),
        prop::sample::select(vec![Mode::OneSided, Mode::RpcOnly, Mode::Plain]),
    )
        .prop_filter_map(
            "a valid region",
            |(base, length, lead, unit, signature_key, region_id, mode)| {
                let layout = Layout::new(u64::from(base) << 20, length, lead, 1 << unit)?;
                Some(RegionDescription { layout, signature_key, region_id, mode })
            },
        )
}

fn described() -> impl Strategy<Value = Described> {
    let extended = regions().prop_map(Described::Extended);
    prop_oneof![Just(Described::Plain), failures().prop_map(Described::Refused), extended]
}

fn datagrams() -> impl Strategy<Value = Datagram> {
    let number = 0_u32..1 << 24;
    let end = (number.clone(), number, mtus(), 1..=u16::MAX);
    prop_oneof![
        any::<(u64, u32)>().prop_map(|(tid, rkey)| Datagram::Describe { tid, rkey }),
        (any::<u64>(), any::<u32>(), described()).prop_map(|(tid, rkey, described)| Datagram::Description {
            tid,
            rkey,
            described
        }),
        (any::<u64>(), end.clone()).prop_map(|(tid, (qpn, psn, mtu_bytes, receive_count))| {
            Datagram::Connect { tid, connect: Connect { qpn, psn, mtu_bytes, receive_count } }
        }),
        (any::<u64>(), end, statuses()).prop_map(|(tid, (qpn, psn, mtu_bytes, receive_count), status)| {
            let accepted = match status {
                Status::Ok => Ok(Accepted { qpn, psn, mtu_bytes, receive_count }),
                refused => Err(refused),
            };
            Datagram::Accepted { tid, accepted }
        }),
        (any::<u64>(), 0_u32..1 << 24, 0_u32..1 << 24, ends()).prop_map(|(tid, from_qpn, to_qpn, end)| {
            Datagram::Join { tid, join: Join { from_qpn, to_qpn, end } }
        }),
        (any::<u64>(), ends(), statuses()).prop_map(|(tid, end, status)| {
            let joined = if status == Status::Ok { Ok(end) } else { Err(status) };
            Datagram::Joined { tid, joined }
        }),
    ]
}

fn tables() -> impl Strategy<Value = Table> {
    (0..u64::MAX / 2, 0..u64::MAX / 2, any::<u32>()).prop_map(|(va, length_bytes, rkey)| Table {
        va,
        length_bytes,
        rkey,
    })
}

/// A read of random length, with the number of pages of its range.
fn reads() -> impl Strategy<Value = Read> {
    let members = prop_oneof![vec(any::<bool>(), 1..140), vec(any::<bool>(), 1000..3000)];
    (any::<(u32, u32, u32, u32)>(), members, 0_u32..4096, any::<bool>()).prop_map(
        |((rkey, dest_rkey, va, dest_va), members, offset, all)| {
            let mut pages = PageBitmap::new(members.len());
            pages.insert(members.len() / 2);
            members
                .iter()
                .enumerate()
                .filter(|(_, member)| **member)
                .for_each(|(page, _)| pages.insert(page));
            let length = members.len() as u32 * 4096 - offset;
            let offset = if all { 0 } else { offset as u16 };
            let pages = (!all).then_some(Pages { offset, wanted: pages });
            Read { rkey, va: va.into(), length, pages, dest_va: dest_va.into(), dest_rkey }
        },
    )
}

/// The first of the reads, as many as fit into a message.
fn fitting(reads: Vec<Read>) -> SmallVec<[Read; 1]> {
    let mut length = HEADER_BYTES;
    let fits = |read: &Read| {
        length += read.encoded_bytes();
        length <= MESSAGE_BYTES_MAX
    };
    reads.into_iter().take_while(fits).collect()
}

/// Messages that carry no data.
fn bodies() -> impl Strategy<Value = Body<'static>> {
    let number = 0_u32..1 << 24;
    prop_oneof![
        any::<(u32, u64)>().prop_map(|(rkey, region_id)| Body::Open(Open { rkey, region_id })),
        (tables(), tables()).prop_map(|(bitmap, versions)| Body::Opened(Opened { bitmap, versions })),
        (number.clone(), number, any::<(u32, u64, bool)>()).prop_map(
            |(client_qpn, server_qpn, (rkey, region_id, on))| {
                Body::Magic(Magic { client_qpn, server_qpn, rkey, region_id, on })
            }
        ),
        vec(reads(), 1..8).prop_map(|reads| Body::Read(fitting(reads))),
        any::<(u32, u64, u32, u32)>().prop_map(|(rkey, va, length, source)| {
            let source = Source::Remote { va: u64::from(source) << 8, rkey: source };
            Body::Write(Write { rkey, va: va >> 1, length: length.max(1), source })
        }),
        (statuses(), 1..=REQUESTS_MAX as u32).prop_map(|(status, count)| Body::Done(Done { status, count })),
        prop::sample::select(vec!["a", "hot data", "\u{20ac}"]).prop_map(Body::Find),
        (any::<u32>(), regions()).prop_map(|(rkey, region)| Body::Found(Found { rkey, region })),
        ends().prop_map(Body::Pair),
        ends().prop_map(Body::Paired),
        any::<(u32, u32, u32)>().prop_map(|(rkey, va, length)| {
            Body::Fetch(Fetch { rkey, va: va.into(), length: length % FETCH_BYTES_MAX + 1 })
        }),
        prop::sample::select(vec![&b""[..], b"data"]).prop_map(Body::Data),
        (any::<(u32, u32)>(), atomics()).prop_map(|((rkey, va), kind)| Body::Atomic(Atomic {
            rkey,
            va: u64::from(va) * 8,
            kind
        })),
        any::<u64>().prop_map(Body::Value),
        any::<(u32, u32, u32, bool)>().prop_map(|(rkey, va, length, writes)| {
            let access = if writes { Access::Write } else { Access::Read };
            Body::Hold(Hold { rkey, va: va.into(), length: length.max(1), access })
        }),
        Just(Body::Release),
        any::<u32>().prop_map(Body::Describe),
    ]
}

fn atomics() -> impl Strategy<Value = AtomicKind> {
    prop_oneof![
        any::<(u64, u64)>().prop_map(|(compare, swap)| AtomicKind::CompareSwap { compare, swap }),
        any::<u64>().prop_map(|add| AtomicKind::FetchAdd { add }),
        any::<u64>().prop_map(|value| AtomicKind::Write { value }),
    ]
}

fn ends() -> impl Strategy<Value = Endpoint> {
    (0_u32..1 << 24, 0_u32..1 << 24, mtus()).prop_map(|(qpn, psn, mtu_bytes)| Endpoint {
        qpn,
        psn,
        mtu_bytes,
    })
}

fn encoded(message: &Message<'_>) -> Vec<u8> {
    let mut buffer = vec![0xee; MESSAGE_BYTES_MAX + 1];
    let length = message.encode(&mut buffer).expect("the message fits");
    assert!(buffer[length..].iter().all(|&byte| byte == 0xee), "nothing is written behind the message");
    buffer.truncate(length);
    buffer
}

/// Checks that the bytes are refused, or decode to a message that encodes to the same bytes.
fn check_round_trip(bytes: &[u8]) {
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(encoded(&message), bytes);
    }
    if let Ok(datagram) = Datagram::decode(bytes) {
        assert_eq!(datagram.encode(), bytes);
    }
}

proptest! {
    #[test]
    fn datagrams_round_trip(datagram in datagrams()) {
        let bytes = datagram.encode();
        prop_assert_eq!(Datagram::decode(&bytes), Ok(datagram));
        let mut buffer = [0; DATAGRAM_BYTES];
        prop_assert_eq!(datagram.encode_into(&mut buffer), Ok(DATAGRAM_BYTES));
        prop_assert_eq!(buffer, bytes);
        prop_assert!(datagram.encode_into(&mut buffer[1..]).is_err());
    }

    #[test]
    fn messages_round_trip(id: u64, body in bodies()) {
        let message = Message { id, body };
        let bytes = encoded(&message);
        prop_assert_eq!(Message::decode(&bytes), Ok(message.clone()));
        let mut short = vec![0; bytes.len() - 1];
        let error = EncodeError::BufferTooSmall { needed: bytes.len(), available: short.len() };
        prop_assert_eq!(message.encode(&mut short), Err(error));
    }

    #[test]
    fn inline_data_round_trips(id: u64, rkey: u32, va in 0..u64::MAX / 2, data in vec(any::<u8>(), 1..3000)) {
        let write = Write { rkey, va, length: data.len() as u32, source: Source::Inline(&data) };
        let message = Message { id, body: Body::Write(write) };
        let bytes = encoded(&message);
        prop_assert_eq!(Message::decode(&bytes), Ok(message.clone()));
    }

    #[test]
    fn truncated_and_longer_messages_are_refused(body in bodies(), cut in 1_usize..40, extra in 1_usize..40) {
        let mut bytes = encoded(&Message { id: 1, body });
        prop_assert!(Message::decode(&bytes[..bytes.len().saturating_sub(cut)]).is_err());
        bytes.resize(bytes.len() + extra, 0);
        prop_assert!(Message::decode(&bytes).is_err());
    }

    #[test]
    fn corrupt_messages_are_refused_or_round_trip(body in bodies(), at: prop::sample::Index, to: u8) {
        let mut bytes = encoded(&Message { id: 1, body });
        *at.get_mut(&mut bytes) = to;
        check_round_trip(&bytes);
    }

    #[test]
    fn corrupt_datagrams_are_refused_or_round_trip(datagram in datagrams(), at: prop::sample::Index, to: u8) {
        let mut bytes = datagram.encode();
        bytes[at.index(DATAGRAM_BYTES)] = to;
        check_round_trip(&bytes);
        prop_assert!(Datagram::decode(&bytes[..at.index(DATAGRAM_BYTES)]).is_err());
    }

    #[test]
    fn random_bytes_are_refused_or_round_trip(bytes in vec(any::<u8>(), 0..400)) {
        check_round_trip(&bytes);
    }
}

fn refusal(bytes: &[u8]) -> String {
    Message::decode(bytes).expect_err("it is refused").to_string()
}

#[test]
fn errors_state_the_field_and_the_rule() {
    let mut pages = PageBitmap::new(2);
    pages.insert(1);
    let read = Read {
        rkey: 1,
        va: 4095,
        length: 2,
        pages: Some(Pages { offset: 4095, wanted: pages }),
        dest_va: 0,
        dest_rkey: 2,
    };
    let good = encoded(&Message { id: 7, body: Body::Read(smallvec![read]) });
    let change = |at: usize, to: u8| {
        let mut bytes = good.clone();
        bytes[at] = to;
        refusal(&bytes)
    };
    assert_eq!(change(0, 9), "version 9, not 5");
    assert_eq!(change(1, 99), "no message of kind 99");
    assert_eq!(change(2, 1), "status is 0x1: only in answers");
    assert_eq!(change(4, 0), "length is 0x0: not the length of the message");
    assert_eq!(change(20, 0), "access length is 0x0: at least one byte");
    assert_eq!(change(36, 3), "pages is 0x3: not the number of pages of the range");
    assert_eq!(change(48, 0), "pages is 0x2: not the number of pages of the range");
    assert_eq!(change(49, 0x10), "page offset is 0x10ff: less than a page");
    assert_eq!(change(56, 0), "bitmap is 0x0: at least one page");
    assert_eq!(change(56, 4), "bitmap is 0x2: a bit for each page and none beyond");
    assert_eq!(refusal(&good[..10]), "length is 0x40: not the length of the message");
    let atomic = Atomic { rkey: 1, va: 0x1004, kind: AtomicKind::FetchAdd { add: 1 } };
    let unaligned = encoded(&Message { id: 7, body: Body::Atomic(atomic) });
    assert_eq!(refusal(&unaligned), "va is 0x1004: a multiple of 8");
    assert_eq!(refusal(&[]), "too short: version ends at byte 1, there are 0");
}

#[test]
fn the_largest_messages_fit_exactly() {
    let pages = PageBitmap::full(READ_PAGES_MAX);
    let length = READ_PAGES_MAX as u32 * 4096;
    let read = Read {
        rkey: 1,
        va: 0,
        length,
        pages: Some(Pages { offset: 0, wanted: pages }),
        dest_va: 0,
        dest_rkey: 2,
    };
    assert_eq!(encoded(&Message { id: 7, body: Body::Read(smallvec![read]) }).len(), MESSAGE_BYTES_MAX);
    let data = vec![1; INLINE_BYTES_MAX + 1];
    let write = |data| {
        let source = Source::Inline(data);
        Message { id: 7, body: Body::Write(Write { rkey: 1, va: 0, length: data.len() as u32, source }) }
    };
    assert_eq!(encoded(&write(&data[1..])).len(), MESSAGE_BYTES_MAX);
    let mut buffer = vec![0; 2 * MESSAGE_BYTES_MAX];
    assert_eq!(write(&data).encode(&mut buffer), Err(EncodeError::TooLong(MESSAGE_BYTES_MAX + 1)));
}

#[test]
fn foreign_datagrams_are_distinguished_from_corrupt_ones() {
    let mut bytes = Datagram::Describe { tid: 3, rkey: 5 }.encode();
    bytes[1] = 7;
    assert!(matches!(
        Datagram::decode(&bytes),
        Err(DecodeError::Foreign { field: "management class", value: 7 })
    ));
    bytes[1] = 0x3d;
    bytes[38] = 0;
    assert!(matches!(Datagram::decode(&bytes), Err(DecodeError::Foreign { field: "organisation", .. })));
    bytes[38] = 0x54;
    bytes[2] = VERSION + 1;
    assert_eq!(Datagram::decode(&bytes), Err(DecodeError::Version(VERSION + 1)));
}

#[test]
fn immediates_identify_requests_with_small_ids() {
    let ids = |first: u64, count: u64| first..first + count;
    for ids in [ids(0, 1), ids(7, 64), ids(0x1_0000_0000, 2), ids(0xff_0003_ffff, 1), ids(0xff_0003_ffc0, 64)]
    {
        assert_eq!(immediate_of(ids.clone()).map(ids_of_immediate), Some(ids));
    }
    for ids in [ids(7, 65), ids(7, 0), ids(0x100_0000_0000, 1), ids(0x1_0004_0000, 1), ids(0x1_0003_ffff, 2)]
    {
        assert_eq!(immediate_of(ids.clone()), None, "{ids:x?}");
    }
    assert_eq!(immediate_of(u64::MAX - 1..u64::MAX), None);
    assert_eq!(immediate_of(Range { start: 7, end: 3 }), None);
}

#[test]
fn one_malformed_request_makes_a_message_malformed() {
    let read = Read { rkey: 1, va: 4095, length: 2, pages: None, dest_va: 0, dest_rkey: 2 };
    let good = encoded(&Message { id: 7, body: Body::Read(smallvec![read.clone(), read]) });
    assert_eq!(good.len(), HEADER_BYTES + 2 * 40);
    let mut bytes = good.clone();
    bytes[HEADER_BYTES + 40 + 4] = 0;
    assert_eq!(refusal(&bytes), "access length is 0x0: at least one byte");
    let cut = |length: usize| {
        let mut bytes = good[..length].to_vec();
        bytes[4] = length as u8;
        refusal(&bytes)
    };
    assert_eq!(cut(HEADER_BYTES + 48), "too short: va ends at byte 72, there are 64");
    assert_eq!(cut(HEADER_BYTES), "too short: rkey ends at byte 20, there are 16");
}

#[test]
fn each_status_is_at_its_number() {
    for (number, status) in Status::ALL.iter().enumerate() {
        assert_eq!(*status as usize, number);
    }
}
