//! The fast paths have the effects of the general ones. Two connections take the same steps, only one of them may take
//! the fast paths ([`Host::HAS_FAST_PATHS`]), and nothing in or around their queue pairs may differ. Cases are drawn from
//! a fixed seed; `TERRACE_CASES=100000` runs more of them.

mod support;

use std::net::IpAddr;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use smallvec::SmallVec;
use support::host::{Event, Memory};
use support::sink::Collector;
use support::{bring_up, from_env, meta_between, path_to};
use terrace_transport::*;
use terrace_wire::{Bth, Extensions, Opcode, Packet, Psn, emit_headers};

const KEY: u32 = 0x101;
const MTU: u32 = 1024;
const CASES: u32 = 1000;

/// A step of one side of both connections.
#[derive(Clone, Debug)]
enum Step {
    Send {
        what: What,
        len: u32,
        flags: u32,
        key: u32,
    },
    Receive {
        len: u32,
        key: u32,
    },
    /// Packets in flight to this side arrive, except those whose bit is set.
    Arrive {
        lost: u8,
        again: bool,
        congested: bool,
    },
    /// The side posts a receive, takes the packets in flight, and sends a message.
    Answer {
        len: u32,
        flags: u32,
    },
    /// The side sends its deferred packets.
    Transmit {
        acks: AckPolicy,
        room: Option<usize>,
    },
    Wait {
        ns: u64,
    },
    Drain,
    /// A forged packet arrives, with the next PSN.
    Forged {
        len: u32,
    },
    /// The memory that the peer accesses becomes absent, or present.
    Absent {
        is: bool,
    },
    /// The oldest access to absent memory ends.
    EndAccess,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Send,
    Inline,
    SendImm,
    Write,
    Read,
    FetchAdd,
    Invalidate,
}

fn step() -> impl Strategy<Value = (bool, Step)> {
    let what = prop_oneof![
        12 => Just(What::Send), 2 => Just(What::Inline), 1 => Just(What::SendImm), 1 => Just(What::Write),
        1 => Just(What::Read), 1 => Just(What::FetchAdd), 1 => Just(What::Invalidate),
    ];
    let len = prop_oneof![8 => 0u32..100, 1 => Just(MTU), 1 => MTU + 1..3 * MTU];
    let key = || prop_oneof![60 => Just(KEY), 1 => Just(KEY ^ 0x100)];
    let flags = || prop_oneof![3 => Just(2u32), 1 => Just(0), 1 => 0u32..8];
    let lost = prop_oneof![7 => Just(0u8), 1 => any::<u8>()];
    let acks = prop_oneof![Just(AckPolicy::Now), Just(AckPolicy::First)];
    let room = prop_oneof![6 => Just(None), 1 => (0usize..3).prop_map(Some)];
    let step = prop_oneof![
        12 => (what, len, flags(), key()).prop_map(|(what, len, flags, key)| Step::Send { what, len, flags, key }),
        10 => (prop_oneof![9 => Just(4096u32), 1 => 0u32..100], key())
            .prop_map(|(len, key)| Step::Receive { len, key }),
        12 => (lost, prop::bool::weighted(0.05), prop::bool::weighted(0.03))
            .prop_map(|(lost, again, congested)| Step::Arrive { lost, again, congested }),
        12 => (0u32..100, flags()).prop_map(|(len, flags)| Step::Answer { len, flags }),
        3 => (acks, room).prop_map(|(acks, room)| Step::Transmit { acks, room }),
        1 => (1u64..100_000_000).prop_map(|ns| Step::Wait { ns }),
        1 => Just(Step::Drain),
        1 => prop_oneof![Just(8), Just(MTU + 4)].prop_map(|len| Step::Forged { len }),
        1 => any::<bool>().prop_map(|is| Step::Absent { is }),
        2 => Just(Step::EndAccess),
    ];
    (any::<bool>(), step)
}

struct Side<const FAST: bool> {
    qp: Qp,
    host: Memory<FAST>,
    /// Packets in flight to this side, with the acknowledgements that they carry.
    mail: Vec<(Vec<u8>, Option<Psn>)>,
    events: Vec<Event>,
}

impl<const FAST: bool> Side<FAST> {
    fn new(number: u8, sq_sig_all: bool) -> Self {
        let cap =
            QpCap { max_send_wr: 6, max_recv_wr: 16, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 80 };
        let mut qp = Qp::new(QpConfig {
            qpn: number.into(),
            qp_type: QpType::Rc,
            cap,
            sq_sig_all,
            has_srq: false,
            window_bytes: 8 << 10,
            rd_atomic_limit: 1,
            mtu_limit: 4096,
        });
        let attr = QpAttr {
            path_mtu: MTU,
            dest_qpn: u32::from(3 - number),
            path: Some(path_to(address(3 - number))),
            port_num: 1,
            access: 0xf,
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        bring_up(&mut qp, &attr, QpState::Rts);
        let host = Memory::with_paths(8192);
        host.add_region(KEY, 0, 8192, "lrwag");
        Side { qp, host, mail: Vec::new(), events: Vec::new() }
    }

    fn take_events(&mut self) {
        self.events.extend(std::iter::from_fn(|| self.host.poll_event()));
    }

    /// Sends all pending packets, after those already in the sink.
    fn send(&mut self, now: Time, acks: AckPolicy, mut sink: Collector) -> Vec<(Vec<u8>, Option<Psn>)> {
        self.qp.poll_transmit(|| now, &self.host, &mut sink, acks);
        self.take_events();
        let acks = sink.acks.unwrap_or_default();
        let ack_of = |at: usize| acks.iter().find(|(carrier, _)| *carrier == at).map(|(_, psn)| *psn);
        sink.packets.into_iter().enumerate().map(|(at, (_, bytes))| (bytes, ack_of(at))).collect()
    }

    /// The side's state, except its memory.
    fn state(&self) -> String {
        format!("{:?} {:?} {:?}", self.qp, self.mail, self.events)
    }
}

/// A sink whose packets can carry acknowledgements.
fn sink(room: Option<usize>) -> Collector {
    Collector { room, acks: Some(Vec::new()), ..Collector::default() }
}

fn address(number: u8) -> IpAddr {
    [10, 0, 0, number].into()
}

/// The header of a forged one-packet SEND.
fn forged(qpn: u32, psn: Psn) -> Bth {
    Bth {
        opcode: Opcode::RcSendOnly,
        solicited: false,
        migrated: true,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        qpn,
        ack_request: true,
        psn,
    }
}

struct Connection<const FAST: bool> {
    sides: [Side<FAST>; 2],
    now: u64,
    wr_id: u64,
    /// Messages that left as they were posted, and messages that arrived.
    sent_count: usize,
    arrived_count: usize,
}

impl<const FAST: bool> Connection<FAST> {
    fn new(sq_sig_all: bool) -> Self {
        let sides = [1, 2].map(|number| Side::new(number, sq_sig_all));
        Connection { sides, now: 1, wr_id: 0, sent_count: 0, arrived_count: 0 }
    }

    fn take(&mut self, at: usize, step: &Step) {
        self.now += 10;
        let side = &mut self.sides[at];
        match *step {
            Step::Send { what, len, flags, key } => {
                self.wr_id += 1;
                let mut wr = work_request(self.wr_id, what, len, flags, key);
                let mut sink = sink(None);
                if side.qp.post_send(|| Time(self.now), &mut wr, &side.host, &mut sink).is_ok() {
                    self.sent_count += sink.packets.len();
                    self.send(at, AckPolicy::Now, sink);
                }
            }
            Step::Receive { len, key } => {
                self.wr_id += 1;
                let sges = SgeList::from_slice(&[Sge { addr: 4096, length: len, lkey: key }]);
                // A full queue refuses it, in both.
                let _ = side.qp.post_recv(RecvWr { wr_id: self.wr_id, sges }, &side.host);
            }
            Step::Arrive { lost, again, congested } => {
                for (index, (bytes, ack)) in std::mem::take(&mut side.mail).iter().enumerate() {
                    if lost >> (index % 8) & 1 == 0 {
                        self.hand(at, bytes, *ack, congested);
                        if again {
                            self.hand(at, bytes, *ack, false);
                        }
                    }
                }
            }
            Step::Answer { len, flags } => {
                let (what, key) = (What::Send, KEY);
                for step in [
                    Step::Receive { len: 4096, key },
                    Step::Arrive { lost: 0, again: false, congested: false },
                    Step::Send { what, len, flags, key },
                ] {
                    self.take(at, &step);
                }
            }
            Step::Transmit { acks, room } => self.send(at, acks, sink(room)),
            Step::Forged { len } => {
                let mut bytes = vec![0; 12 + len as usize];
                let (qpn, psn) = (at as u32 + 1, Psn::new(side.qp.query().rq_psn));
                emit_headers(&forged(qpn, psn), &Extensions::default(), &mut bytes).expect("room");
                self.hand(at, &bytes, None, false);
                self.send(at, AckPolicy::Now, sink(None));
            }
            Step::Absent { is } => {
                *side.host.absent.borrow_mut() = std::iter::once(0..4096).filter(|_| is).collect();
            }
            Step::EndAccess => {
                if side.host.complete(0, Ok(())) {
                    side.qp.wake();
                    self.send(at, AckPolicy::Now, sink(None));
                }
            }
            Step::Wait { ns } => {
                self.now += ns;
                side.qp.handle_timeout(Time(self.now), &side.host);
                self.send(at, AckPolicy::Now, sink(None));
            }
            Step::Drain => {
                let state = match side.qp.state() {
                    QpState::Rts => QpState::Sqd,
                    QpState::Sqd => QpState::Rts,
                    _ => return,
                };
                let attr = QpAttr { state, ..QpAttr::default() };
                // RTS is refused while the queue drains, in both.
                let _ = side.qp.modify(&attr, QpAttrMask::STATE, &side.host);
                self.send(at, AckPolicy::Now, sink(None));
            }
        }
    }

    fn send(&mut self, at: usize, acks: AckPolicy, sink: Collector) {
        let packets = self.sides[at].send(Time(self.now), acks, sink);
        self.sides[1 - at].mail.extend(packets);
    }

    fn hand(&mut self, at: usize, bytes: &[u8], ack: Option<Psn>, congested: bool) {
        let (own, peer) = (at as u8 + 1, 2 - at as u8);
        let meta = meta_between(address(peer), address(own), if congested { 3 } else { 0 });
        let packet = Packet::parse(bytes).expect("a packet");
        let side = &mut self.sides[at];
        side.qp.handle_packet(|| Time(self.now), &meta, &packet, ack, &side.host);
        let before = side.events.len();
        side.take_events();
        let arrived =
            |event: &&Event| matches!(event, Event::RecvComplete(wc) if wc.status == WcStatus::Success);
        self.arrived_count += side.events[before..].iter().filter(arrived).count();
    }
}

fn work_request(wr_id: u64, what: What, len: u32, flags: u32, lkey: u32) -> SendWr {
    let eight = Payload::Sges(SgeList::from_slice(&[Sge { addr: 0, length: 8, lkey }]));
    let sges = Payload::Sges(SgeList::from_slice(&[Sge { addr: 1, length: len, lkey }]));
    let (va, rkey) = (64, KEY);
    let (op, payload) = match what {
        What::Send => (SendOp::Send, sges),
        What::Inline => (SendOp::Send, Payload::Inline(SmallVec::from_elem(wr_id as u8, len as usize % 90))),
        What::SendImm => (SendOp::SendImm(7), sges),
        What::Write => (SendOp::Write { va, rkey }, sges),
        What::Read => (SendOp::Read { va, rkey }, sges),
        What::FetchAdd => (SendOp::FetchAdd { va, rkey, add: wr_id }, eight),
        What::Invalidate => (SendOp::LocalInvalidate(KEY ^ 0x200), Payload::Sges(SgeList::new())),
    };
    SendWr { wr_id, op, payload, flags: SendFlags::from_bits_truncate(flags), target: None }
}

#[test]
fn fast_paths_equal_general_paths() {
    let cases = from_env("TERRACE_CASES").map_or(CASES, |cases| cases as u32);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &[9; 32]));
    let counts = std::cell::Cell::new([0; 2]);
    let outcome = runner.run(&(any::<bool>(), vec(step(), 1..120)), |(sq_sig_all, steps)| {
        let (mut fast, mut general) =
            (Connection::<true>::new(sq_sig_all), Connection::<false>::new(sq_sig_all));
        for (is_second, step) in &steps {
            fast.take(usize::from(*is_second), step);
            general.take(usize::from(*is_second), step);
            for (one, other) in fast.sides.iter().zip(&general.sides) {
                prop_assert_eq!(one.state(), other.state());
                prop_assert!(one.host.bytes == other.host.bytes, "memory differs");
            }
        }
        let [sent, arrived] = counts.get();
        counts.set([sent + fast.sent_count, arrived + fast.arrived_count]);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let counts = counts.get();
    assert!(
        counts.iter().all(|count| *count >= cases as usize),
        "too few messages in {cases} cases: {counts:?}"
    );
}
