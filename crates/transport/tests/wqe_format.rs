//! The format of work queue entries in memory, against bytes written by hand, and there and back.

use proptest::prelude::*;
use smallvec::smallvec;
use terrace_transport::wqe_format::*;
use terrace_transport::{Masked, Payload, SendFlags, SendOp, Sge, SgeList};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn check(entry: SendEntry, flags: SendFlags, text: &str) {
    let mut bytes = encode_send(&entry, flags).expect("it has a form");
    set_place(&mut bytes, 0x1234, 0xabcdef);
    assert_eq!(bytes[..], hex(text)[..], "{entry:?}");
    let (control, decoded) = decode_send(&bytes).expect("an entry");
    assert_eq!(decoded, entry);
    assert_eq!((control.index, control.qpn, control.flags), (0x1234, 0xabcdef, flags));
    assert_eq!(usize::from(control.segments) * SEGMENT_BYTES, bytes.len());
    // Whatever follows an entry in its last block is not part of it.
    bytes.extend_from_slice(&[0xff; BLOCK_BYTES]);
    assert_eq!(decode_send(&bytes).map(|(_, decoded)| decoded), Ok(entry));
}

fn request(op: SendOp, payload: Payload) -> SendEntry {
    SendEntry::Request { op, payload }
}

const SGE: Sge = Sge { addr: 0x1122_3344_5566_7788, length: 0x40, lkey: 0x99aa_bbcc };
const REMOTE: (u64, u32) = (0x0102_0304_0506_0708, 0x0a0b_0c0d);

#[test]
fn entries_have_the_bytes_that_mlx5_has() {
    let (va, rkey) = REMOTE;
    let (none, signaled) = (SendFlags::empty(), SendFlags::SIGNALED);
    let data = "00000040 99aabbcc 1122334455667788";
    let result = "00000008 99aabbcc 1122334455667788";
    let remote = "0102030405060708 0a0b0c0d 00000000";
    let sge = || Payload::Sge(SGE);
    let value = || Payload::Sge(Sge { length: 8, ..SGE });
    check(request(SendOp::Nop, Payload::Inline(smallvec![])), none, "00123400 abcdef01 00000000 00000000");
    let write = request(SendOp::Write { va, rkey }, sge());
    check(write, signaled, &format!("00123408 abcdef03 00000008 00000000 {remote} {data}"));
    let imm = u32::from_ne_bytes([1, 2, 3, 4]);
    let write_imm = request(SendOp::WriteImm { va, rkey, imm }, sge());
    check(write_imm, SendFlags::SOLICITED, &format!("00123409 abcdef03 00000002 01020304 {remote} {data}"));
    check(
        request(SendOp::Read { va, rkey }, Payload::Sges(SgeList::from_slice(&[SGE, SGE]))),
        SendFlags::FENCE,
        &format!("00123410 abcdef04 00000080 00000000 {remote} {data} {data}"),
    );
    check(request(SendOp::Send, sge()), none, &format!("0012340a abcdef02 00000000 00000000 {data}"));
    check(
        request(SendOp::SendImm(imm), Payload::Inline(SmallVecOf::from_slice(b"hello"))),
        none,
        "0012340b abcdef02 00000000 01020304 80000005 68656c6c 6f000000 00000000",
    );
    check(
        request(SendOp::SendInvalidate(rkey), Payload::Sges(SgeList::new())),
        none,
        "00123401 abcdef01 00000000 0a0b0c0d",
    );
    check(
        request(SendOp::CompareSwap { va, rkey, compare: 2, swap: 1 }, value()),
        none,
        &format!("00123411 abcdef04 00000000 00000000 {remote} 0000000000000001 0000000000000002 {result}"),
    );
    check(
        request(SendOp::FetchAdd { va, rkey, add: 3 }, value()),
        none,
        &format!("00123412 abcdef04 00000000 00000000 {remote} 0000000000000003 0000000000000000 {result}"),
    );
    let masked = Masked { result: Sge { length: 8, ..SGE }, compare_mask: 4, swap_mask: 3 };
    check(
        request(
            SendOp::MaskedCompareSwap { va, rkey, compare: 2, swap: 1 },
            Payload::Masked(Box::new(masked)),
        ),
        none,
        &format!(
            "09123414 abcdef05 00000000 00000000 {remote} 0000000000000001 0000000000000002
             0000000000000003 0000000000000004 {result}"
        ),
    );
    check(
        request(SendOp::MaskedFetchAdd { va, rkey, add: 1, boundary: 2 }, value()),
        none,
        &format!("09123415 abcdef04 00000000 00000000 {remote} 0000000000000001 0000000000000002 {result}"),
    );
    let segment = "0000000000000000 00000007 00000102";
    let wait = SendEntry::Wait { cqn: 0x102, index: 7 };
    check(wait, none, &format!("0012340f abcdef02 00000000 00000000 {segment}"));
    let enable = SendEntry::EnableSend { qpn: 0x102, index: 7 };
    check(enable, none, &format!("00123417 abcdef02 00000000 00000000 {segment}"));
    let enable = SendEntry::EnableRecv { qpn: 0x102, index: 7 };
    check(enable, none, &format!("00123416 abcdef02 00000000 00000000 {segment}"));
}

type SmallVecOf = terrace_transport::InlineData;

#[test]
fn a_receive_that_leaves_room_ends_with_the_invalid_key() {
    let bytes = encode_receive(&[SGE], 64).expect("it fits");
    assert_eq!(bytes[16..32], hex("00000000 00000100 0000000000000000")[..]);
    assert_eq!(decode_receive(&bytes)[..], [SGE]);
    assert_eq!(decode_receive(&encode_receive(&[SGE; 4], 64).expect("it fits"))[..], [SGE; 4]);
    assert_eq!(encode_receive(&[SGE; 5], 64), Err(EntryError::NoForm));
}

#[test]
fn what_is_no_entry_is_refused() {
    let (va, rkey) = REMOTE;
    let write = encode_send(&request(SendOp::Write { va, rkey }, Payload::Sge(SGE)), SendFlags::empty());
    let write = write.expect("it has a form");
    let refusal = |change: &dyn Fn(&mut EntryBytes)| {
        let mut changed = write.clone();
        change(&mut changed);
        decode_send(&changed).err()
    };
    assert_eq!(refusal(&|bytes| bytes[7] = 0), Some(EntryError::Segments), "no segments");
    assert_eq!(refusal(&|bytes| bytes[7] = 1), Some(EntryError::Segments), "no remote address");
    assert_eq!(refusal(&|bytes| bytes[7] = 63), Some(EntryError::Segments), "more than there is");
    assert_eq!(refusal(&|bytes| bytes[3] = 0x0e), Some(EntryError::Opcode), "segmentation offload");
    assert_eq!(refusal(&|bytes| bytes[3] = opcode::MASKED_FETCH_ADD), Some(EntryError::Opcode), "4 bytes");
    assert_eq!(refusal(&|bytes| bytes[3] = opcode::COMPARE_SWAP), Some(EntryError::Segments), "no result");
    assert_eq!(refusal(&|bytes| bytes[32] = 0x80), Some(EntryError::Segments), "inline beyond the end");
    assert_eq!(decode_send(&[]).err(), Some(EntryError::Segments));
    let provided = SendOp::AtomicWrite { va, rkey };
    let made = encode_send(&request(provided, Payload::Sge(SGE)), SendFlags::empty());
    assert_eq!(made, Err(EntryError::NoForm));
    let long = Payload::Sges(SgeList::from_elem(SGE, SEGMENTS_MAX));
    assert_eq!(encode_send(&request(SendOp::Send, long), SendFlags::empty()), Err(EntryError::NoForm));
}

proptest! {
    /// Whatever is in memory, it is refused, or it is an entry that is encoded to an equal one.
    #[test]
    fn every_content_is_an_entry_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..1100), opcode in 0u8..0x18) {
        let mut bytes = bytes;
        if let Some(byte) = bytes.get_mut(3) {
            *byte = opcode;
        }
        if let Ok((control, entry)) = decode_send(&bytes) {
            let again = encode_send(&entry, control.flags).expect("decoded entries have a form");
            prop_assert_eq!(decode_send(&again).map(|(_, again)| again), Ok(entry));
        }
        prop_assert!(decode_receive(&bytes).len() <= bytes.len() / SEGMENT_BYTES);
    }
}
