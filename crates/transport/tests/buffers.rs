//! Several queue pairs whose peers READ absent memory share fewer access slots than any of them would use. In any order
//! of completions and wake-ups, each READ is answered in full.

#[path = "link/random.rs"]
mod random;
mod support;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use random::Random;
use smallvec::smallvec;
use support::host::{Event, Memory, Slots, pattern};
use support::sink::Collector;
use support::{bring_up, meta_between, path_to};
use terrace_transport::{
    AckPolicy, Payload, Qp, QpAttr, QpCap, QpConfig, QpState, QpType, SendFlags, SendOp, SendWr, Sge, Time,
    Transmit, WcStatus,
};
use terrace_wire::Packet;

const SEEDS: u64 = 400;
const READS: usize = 10;
const KEY: u32 = 1;
const MTU: u32 = 4096;
/// Length of the memory that is read.
const LEN: u64 = 1 << 20;
/// Length of the longest READ.
const READ_LEN_MAX: u64 = 300 << 10;

fn address(side: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, side])
}

fn queue_pair(side: u8, reads_max: u8) -> Qp {
    let cap = QpCap {
        max_send_wr: READS as u32,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    };
    let mut qp = Qp::new(QpConfig {
        qpn: u32::from(side),
        qp_type: QpType::Rc,
        cap,
        sq_sig_all: true,
        has_srq: false,
        window_bytes: 1 << 20,
        rd_atomic_limit: 16,
        mtu_limit: MTU,
    });
    let attr = QpAttr {
        path_mtu: MTU,
        dest_qpn: u32::from(3 - side),
        access: 0xe,
        path: Some(path_to(address(3 - side))),
        max_rd_atomic: reads_max,
        max_dest_rd_atomic: reads_max,
        // No timeout: a retransmission would hide a missing wake-up.
        timeout: 0,
        retry_cnt: 7,
        rnr_retry: 7,
        min_rnr_timer: 1,
        port_num: 1,
        ..QpAttr::default()
    };
    bring_up(&mut qp, &attr, QpState::Rts);
    qp
}

/// A requester and its responder.
struct Pair {
    requester: Qp,
    ours: Memory,
    responder: Qp,
    theirs: Memory,
    /// Remote address and length of each READ.
    reads: Vec<(u64, u32)>,
    done: usize,
}

impl Pair {
    fn new(number: usize, slots: &Arc<Slots>, random: &mut Random) -> Pair {
        let reads_max = 1 + random.below(8) as u8;
        let mut theirs = Memory { number, slots: slots.clone(), ..Memory::new(LEN as usize) };
        theirs.add_region(KEY, 0, LEN, "r");
        for _ in 0..1 + random.below(4) {
            let start = random.below(LEN);
            theirs.absent.get_mut().push(start..(start + random.below(LEN)).min(LEN));
        }
        let ours = Memory::default();
        *ours.bytes.borrow_mut() = vec![0; READS * READ_LEN_MAX as usize];
        ours.add_region(KEY, 0, READS as u64 * READ_LEN_MAX, "l");
        let reads = (0..READS).map(|_| {
            let len_max = [1, 5000, 70 << 10, READ_LEN_MAX][random.below(4) as usize];
            let len = 1 + random.below(len_max);
            (random.below(LEN - len), len as u32)
        });
        let (requester, responder) = (queue_pair(1, reads_max), queue_pair(2, reads_max));
        Pair { requester, ours, responder, theirs, reads: reads.collect(), done: 0 }
    }

    fn post(&mut self) {
        for (wr_id, (va, length)) in (0..).zip(self.reads.clone()) {
            let payload = Payload::Sges(smallvec![Sge { addr: wr_id * READ_LEN_MAX, length, lkey: KEY }]);
            let op = SendOp::Read { va, rkey: KEY };
            let mut wr = SendWr { wr_id, op, payload, flags: SendFlags::SIGNALED, target: None };
            self.requester.post_send(|| Time(1), &mut wr, &self.ours, &mut ()).expect("posted");
        }
    }

    /// Runs both sides until they are idle.
    fn run(&mut self, random: &mut Random) {
        loop {
            let requests = transmit(&mut self.requester, &self.ours, random);
            let any = hand_over(requests, 1, &mut self.responder, &self.theirs);
            let responses = transmit(&mut self.responder, &self.theirs, random);
            if !hand_over(responses, 2, &mut self.requester, &self.ours) && !any {
                break;
            }
        }
        while let Some(event) = self.ours.poll_event() {
            let Event::SendComplete(wc) = event else { panic!("{event:?}") };
            assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, self.done as u64));
            let (va, len) = self.reads[self.done];
            let arrived = self.ours.read(wc.wr_id * READ_LEN_MAX, len as usize);
            assert!(arrived.iter().zip(va..).all(|(byte, addr)| *byte == pattern(addr)), "READ {}", wc.wr_id);
            self.done += 1;
        }
    }
}

/// Sends until the queue pair is idle, a few packets at a time.
fn transmit(qp: &mut Qp, host: &Memory, random: &mut Random) -> Vec<Vec<u8>> {
    let mut sent = Vec::new();
    loop {
        let room = Some(1 + random.below(40) as usize);
        let mut sink = Collector { room, ..Collector::default() };
        let stopped = qp.poll_transmit(|| Time(1), host, &mut sink, AckPolicy::Now);
        sent.extend(sink.packets.into_iter().map(|(_, bytes)| bytes));
        if stopped != Transmit::SinkFull {
            return sent;
        }
    }
}

/// Returns whether there were packets.
fn hand_over(packets: Vec<Vec<u8>>, from: u8, to: &mut Qp, host: &Memory) -> bool {
    let meta = meta_between(address(from), address(3 - from), 0);
    for bytes in &packets {
        let packet = Packet::parse(bytes).expect("well-formed");
        to.handle_packet(|| Time(1), &meta, &packet, None, host);
    }
    !packets.is_empty()
}

fn play(seed: u64) {
    let mut random = Random::new(seed);
    let slots = Arc::new(Slots::default());
    slots.set(Some(1 + random.below(6) as usize));
    let mut pairs: Vec<Pair> =
        (0..1 + random.below(6) as usize).map(|number| Pair::new(number, &slots, &mut random)).collect();
    let mut woken: VecDeque<usize> = (0..pairs.len()).collect();
    pairs.iter_mut().for_each(Pair::post);
    while pairs.iter().any(|pair| pair.done < READS) {
        let busy: Vec<usize> =
            (0..pairs.len()).filter(|&at| !pairs[at].theirs.under_way.borrow().is_empty()).collect();
        let at = if !busy.is_empty() && (woken.is_empty() || random.percent(50)) {
            let at = busy[random.below(busy.len() as u64) as usize];
            let count = pairs[at].theirs.under_way.borrow().len() as u64;
            assert!(pairs[at].theirs.complete(random.below(count) as usize, Ok(())));
            at
        } else {
            let left: Vec<usize> = pairs.iter().map(|pair| READS - pair.done).collect();
            let at = woken.pop_front().unwrap_or_else(|| panic!("seed {seed}: all sleep, {left:?} to do"));
            pairs[at].responder.wake();
            pairs[at].run(&mut random);
            woken.extend(slots.take_wakeups());
            continue;
        };
        woken.push_back(at);
        woken.extend(slots.take_wakeups());
    }
    for pair in &pairs {
        assert_eq!(pair.responder.counters().rnr_naks_sent, 0, "seed {seed}");
    }
}

#[test]
fn reads_of_absent_memory_complete_with_few_buffers() {
    (0..SEEDS).for_each(play);
}
