//! A case: the network's faults, the queue pairs' attributes, and the work of both sides.

use proptest::prelude::*;

/// One piece of work. Lengths are drawn around the packet boundaries.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    Send {
        len: Len,
        imm: bool,
        inline: bool,
    },
    SendInvalidate {
        len: Len,
    },
    Write {
        len: Len,
        imm: bool,
    },
    Read {
        len: Len,
    },
    CompareSwap,
    FetchAdd,
    AtomicWrite,
    Flush,
    Append {
        len: Len,
        commit: bool,
    },
    Bind,
    /// A READ, and a fenced SEND of the data that it fetched.
    ReadThenSend {
        len: Len,
    },
    /// A WRITE, and a READ of the written data.
    WriteThenRead {
        len: Len,
    },
    /// A bind, and a local invalidate of the key it made.
    BindThenInvalidate,
}

/// A length: a number of packets of the path MTU, plus a few bytes.
#[derive(Clone, Copy, Debug)]
pub struct Len {
    packets: u8,
    rest: i16,
}

impl Len {
    pub fn bytes(self, mtu: u32) -> u32 {
        (i64::from(self.packets) * i64::from(mtu) + i64::from(self.rest)).max(0) as u32
    }
}

/// Probabilities in percent, times in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub loss: u8,
    pub duplicate: u8,
    pub reorder: u8,
    pub mark: u8,
    pub delay_ns: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    pub mtu: u32,
    pub window: u32,
    pub max_rd_atomic: u8,
    /// How many more of them the other side can take.
    pub spare_rd_atomic: u8,
    pub first_psn: u32,
    pub queue_len: u32,
    pub shared_receives: bool,
    /// Whether packets of a message may travel as runs.
    pub runs: bool,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub faults: Faults,
    pub attributes: Attributes,
    /// Probabilities in percent that ACKs are deferred, that packets carry them, that the TX sink is small, and that
    /// receives come late.
    pub hold_acks: u8,
    pub piggybacked_acks: u8,
    pub narrow: u8,
    pub late_receives: u8,
    pub work: [Vec<Op>; 2],
}

fn len() -> impl Strategy<Value = Len> {
    let rest = prop_oneof![3 => -1i16..=1, 1 => -200i16..200];
    (0u8..=5, rest).prop_map(|(packets, rest)| Len { packets, rest })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (len(), any::<bool>(), any::<bool>()).prop_map(|(len, imm, inline)| Op::Send { len, imm, inline }),
        1 => len().prop_map(|len| Op::SendInvalidate { len }),
        4 => (len(), any::<bool>()).prop_map(|(len, imm)| Op::Write { len, imm }),
        5 => len().prop_map(|len| Op::Read { len }),
        1 => Just(Op::CompareSwap),
        2 => Just(Op::FetchAdd),
        1 => Just(Op::AtomicWrite),
        1 => Just(Op::Flush),
        2 => (len(), any::<bool>()).prop_map(|(len, commit)| Op::Append { len, commit }),
        1 => Just(Op::Bind),
        1 => len().prop_map(|len| Op::ReadThenSend { len }),
        1 => len().prop_map(|len| Op::WriteThenRead { len }),
        1 => Just(Op::BindThenInvalidate),
    ]
}

fn faults() -> impl Strategy<Value = Faults> {
    // More loss than this exhausts seven retries at times, as it should.
    let loss = prop_oneof![1 => Just(0u8), 2 => 1u8..4, 1 => 4u8..=6];
    let rate = || prop_oneof![1 => Just(0u8), 2 => 0u8..8, 1 => 8u8..20];
    (loss, rate(), rate(), prop_oneof![3 => Just(0u8), 1 => 0u8..30], 1_000u64..200_000).prop_map(
        |(loss, duplicate, reorder, mark, delay_ns)| Faults { loss, duplicate, reorder, mark, delay_ns },
    )
}

fn attributes() -> impl Strategy<Value = Attributes> {
    let mtu = prop_oneof![4 => Just(256u32), 1 => Just(512u32), 1 => Just(1024u32), 1 => Just(4096u32)];
    let window = prop_oneof![1 => Just(1u32), 2 => 1u32..20_000, 1 => Just(1u32 << 20)];
    let psn = prop_oneof![1 => Just(0u32), 2 => 0xff_ff80u32..=0xff_ffff, 1 => 0u32..0xff_ffff];
    (mtu, window, 1u8..=8, 0u8..3, psn, 1u32..24, any::<bool>(), any::<bool>()).prop_map(
        |(mtu, window, max_rd_atomic, spare_rd_atomic, first_psn, queue_len, shared_receives, runs)| {
            Attributes {
                mtu,
                window,
                max_rd_atomic,
                spare_rd_atomic,
                first_psn,
                queue_len,
                shared_receives,
                runs,
            }
        },
    )
}

pub fn plan() -> impl Strategy<Value = Plan> {
    let percent = || prop_oneof![1 => Just(0u8), 1 => 0u8..60];
    let work = || prop::collection::vec(op(), 0..24);
    let nuisances = (percent(), percent(), percent(), percent());
    (any::<u64>(), faults(), attributes(), nuisances, work(), work()).prop_map(
        |(seed, faults, attributes, (hold_acks, piggybacked_acks, narrow, late_receives), ours, theirs)| {
            Plan {
                seed,
                faults,
                attributes,
                hold_acks,
                piggybacked_acks,
                narrow,
                late_receives,
                work: [ours, theirs],
            }
        },
    )
}
