//! Two queue pairs, the time, and a link between them that loses, duplicates, delays and reorders packets.

use std::collections::BTreeMap;
use std::net::IpAddr;

use terrace_transport::{
    AckPolicy, PACKET_BYTES_MAX, Qp, QpAttr, QpCap, QpConfig, QpState, QpType, RUN_DATA_MAX, Time, Transmit,
    WcStatus,
};
use terrace_wire::{Packet, Path, Psn};

use crate::model::{Arrival, KEY, Model, Side};
use crate::plan::Plan;
use crate::random::Random;
use crate::support::host::{Event, Memory};
use crate::support::sink::RunCollector;
use crate::support::{bring_up, meta_between, path_to};

/// Most receives posted to a queue pair at a time.
const RECEIVES_MAX: u32 = 6;
/// Delay until a deferred ACK or a full TX sink is polled again.
const TICK_NS: u64 = 50_000;
/// More steps than this mean that the two make no progress.
const STEPS_MAX: usize = 200_000;

struct Node {
    qp: Qp,
    host: Memory,
    side: Side,
    next_send: usize,
    next_receive: usize,
    receive_at: u64,
    done: Vec<u64>,
    arrived: Vec<Arrival>,
    look_again_at: Option<u64>,
}

/// A packet in flight: destination, bytes, the acknowledgement that it carries, and whether it is ECN-marked.
struct InFlight {
    to: usize,
    bytes: Vec<u8>,
    ack: Option<Psn>,
    marked: bool,
}

struct World<'a> {
    plan: &'a Plan,
    nodes: [Node; 2],
    random: Random,
    now: u64,
    /// By time of arrival, then in the order of sending.
    link: BTreeMap<(u64, u64), InFlight>,
    sent_count: u64,
    seen: Seen,
}

/// How often something happened that a run of many plans must have had.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub piggybacked_acks: u64,
    pub runs: u64,
}

fn address(side: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, side as u8 + 1])
}

/// Runs a plan to its end. The error says what failed.
pub fn run(plan: &Plan) -> Result<Seen, String> {
    let [first, second] = Model::new(plan).sides;
    let mut world = World {
        plan,
        nodes: [node(plan, 0, first), node(plan, 1, second)],
        random: Random::new(plan.seed),
        now: 1_000_000,
        link: BTreeMap::new(),
        sent_count: 0,
        seen: Seen::default(),
    };
    for _ in 0..STEPS_MAX {
        for side in 0..2 {
            world.serve(side)?;
        }
        if world.deliver()? {
            continue;
        }
        match world.next_time() {
            Some(time) => world.now = time,
            None => return world.check().map(|()| world.seen),
        }
    }
    Err(format!("no end in sight at {} ms: {}", world.now / 1_000_000, world.progress()))
}

fn node(plan: &Plan, side: usize, work: Side) -> Node {
    let attributes = plan.attributes;
    let mut qp = Qp::new(QpConfig {
        qpn: side as u32 + 1,
        qp_type: QpType::Rc,
        cap: QpCap {
            max_send_wr: attributes.queue_len,
            max_recv_wr: RECEIVES_MAX,
            max_send_sge: 3,
            max_recv_sge: 3,
            max_inline_data: 64,
        },
        sq_sig_all: false,
        has_srq: attributes.shared_receives,
        window_bytes: attributes.window,
        rd_atomic_limit: 16,
        mtu_limit: 4096,
    });
    let attr = QpAttr {
        path_mtu: attributes.mtu,
        sq_psn: attributes.first_psn.wrapping_add(side as u32 * 77) & 0xff_ffff,
        rq_psn: attributes.first_psn.wrapping_add((1 - side as u32) * 77) & 0xff_ffff,
        dest_qpn: 2 - side as u32,
        access: 0x30e,
        path: Some(path_to(address(1 - side))),
        max_rd_atomic: attributes.max_rd_atomic,
        max_dest_rd_atomic: attributes.max_rd_atomic + attributes.spare_rd_atomic,
        min_rnr_timer: 6,
        port_num: 1,
        timeout: 12,
        retry_cnt: 7,
        rnr_retry: 7,
        ..QpAttr::default()
    };
    bring_up(&mut qp, &attr, QpState::Rts);
    let host = Memory::default();
    *host.bytes.borrow_mut() = work.initial.clone();
    host.add_region(KEY, 0, work.initial.len() as u64, "lrwage");
    for key in &work.windows {
        host.add_region(*key, 0, 0, "m");
    }
    Node {
        qp,
        host,
        side: work,
        next_send: 0,
        next_receive: 0,
        receive_at: 0,
        done: Vec::new(),
        arrived: Vec::new(),
        look_again_at: None,
    }
}

type Packets = Vec<(Path, Vec<u8>)>;

/// Lets a node send into a sink that takes runs of up to so many bytes.
fn collect<const RUN_BYTES_MAX: u64>(
    node: &mut Node,
    now: Time,
    room: Option<usize>,
    acks: Option<Vec<(usize, Psn)>>,
) -> (Transmit, Packets, Option<Vec<(usize, Psn)>>) {
    let mut sink = RunCollector::<RUN_BYTES_MAX> { room, acks, ..RunCollector::default() };
    let stopped = node.qp.poll_transmit(|| now, &node.host, &mut sink, AckPolicy::Now);
    (stopped, sink.packets, sink.acks)
}

impl World<'_> {
    /// Runs one side until it is idle.
    fn serve(&mut self, side: usize) -> Result<(), String> {
        let node = &mut self.nodes[side];
        node.qp.handle_timeout(Time(self.now), &node.host);
        loop {
            let posted = self.post_sends(side);
            self.post_receives(side);
            self.transmit(side);
            self.take_events(side)?;
            if !posted {
                return Ok(());
            }
        }
    }

    /// Posts sends until the queue is full. Returns whether it took any.
    fn post_sends(&mut self, side: usize) -> bool {
        let node = &mut self.nodes[side];
        let before = node.next_send;
        while let Some(wr) = node.side.sends.get(node.next_send) {
            if node.qp.post_send(|| Time(self.now), &mut wr.clone(), &node.host, &mut ()).is_err() {
                break;
            }
            node.next_send += 1;
        }
        node.next_send > before
    }

    fn post_receives(&mut self, side: usize) {
        let node = &mut self.nodes[side];
        while let Some(wr) = node.side.receives.get(node.next_receive) {
            if self.now < node.receive_at {
                return;
            }
            if self.plan.attributes.shared_receives {
                node.host.shared_receives.borrow_mut().push_back(wr.clone());
            } else if node.qp.post_recv(wr.clone(), &node.host).is_err() {
                return;
            }
            node.next_receive += 1;
            if self.random.percent(self.plan.late_receives) {
                node.receive_at = self.now + self.random.below(2_000_000);
            }
        }
    }

    fn transmit(&mut self, side: usize) {
        let node = &mut self.nodes[side];
        let due = node.look_again_at.take_if(|at| *at <= self.now).is_some();
        let defers_ack = !due && self.random.percent(self.plan.hold_acks);
        if defers_ack && node.qp.wants_only_to_acknowledge() {
            node.look_again_at.get_or_insert(self.now + TICK_NS);
            return;
        }
        let narrow = self.random.percent(self.plan.narrow);
        let room = narrow.then(|| self.random.below(4) as usize);
        let carries = self.random.percent(self.plan.piggybacked_acks);
        let acks = carries.then(Vec::new);
        let now = Time(self.now);
        let (stopped, packets, acks) = match self.plan.attributes.runs {
            true => collect::<RUN_DATA_MAX>(node, now, room, acks),
            false => collect::<0>(node, now, room, acks),
        };
        if stopped == Transmit::SinkFull {
            node.look_again_at.get_or_insert(self.now + TICK_NS);
        } else {
            assert!(!node.qp.wants_transmit(), "idle, but wants to transmit");
        }
        let mut acks = acks.into_iter().flatten().peekable();
        for (index, (_, bytes)) in packets.into_iter().enumerate() {
            let ack = acks.next_if(|(carrier, _)| *carrier == index).map(|(_, psn)| psn);
            self.seen.piggybacked_acks += u64::from(ack.is_some());
            self.send(1 - side, bytes, ack);
        }
    }

    fn send(&mut self, to: usize, bytes: Vec<u8>, ack: Option<Psn>) {
        let faults = self.plan.faults;
        let copies = if self.random.percent(faults.loss) {
            0
        } else if self.random.percent(faults.duplicate) {
            2
        } else {
            1
        };
        for _ in 0..copies {
            let late = self.random.percent(faults.reorder);
            let delay = faults.delay_ns + if late { self.random.below(3 * faults.delay_ns) } else { 0 };
            let marked = self.random.percent(faults.mark);
            self.sent_count += 1;
            let packet = InFlight { to, bytes: bytes.clone(), ack, marked };
            self.link.insert((self.now + delay, self.sent_count), packet);
        }
    }

    fn take_events(&mut self, side: usize) -> Result<(), String> {
        let node = &mut self.nodes[side];
        while let Some(event) = node.host.poll_event() {
            match event {
                Event::SendComplete(wc) if wc.status == WcStatus::Success => node.done.push(wc.wr_id),
                Event::RecvComplete(wc) if wc.status == WcStatus::Success => {
                    let (wr_id, opcode, len, imm) = (wc.wr_id, wc.opcode, wc.byte_len, wc.imm);
                    node.arrived.push(Arrival { wr_id, opcode, len, imm });
                }
                other => return Err(format!("side {side} at {} us: {other:?}", self.now / 1000)),
            }
        }
        Ok(())
    }

    /// Delivers the packets that have arrived, in bursts. Returns whether there were any.
    fn deliver(&mut self) -> Result<bool, String> {
        let mut any = false;
        while let Some(entry) = self.link.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let InFlight { to, bytes, ack, marked } = entry.remove();
            any = true;
            let packet = Packet::parse(&bytes).map_err(|error| format!("malformed packet: {error}"))?;
            let meta = meta_between(address(1 - to), address(to), if marked { 3 } else { 0 });
            let node = &mut self.nodes[to];
            let (now, len) = (|| Time(self.now), packet.payload.len());
            if len as u64 <= PACKET_BYTES_MAX {
                node.qp.handle_packet(now, &meta, &packet, ack, &node.host);
            } else {
                self.seen.runs += 1;
                *node.host.run.borrow_mut() = packet.payload.to_vec();
                node.qp.handle_run(now, &meta, &packet, len as u64, ack, &node.host);
            }
            self.take_events(to)?;
            if self.random.percent(30) {
                return Ok(true);
            }
        }
        Ok(any)
    }

    fn next_time(&self) -> Option<u64> {
        let arrival = self.link.first_key_value().map(|(key, _)| key.0);
        let timers = self.nodes.iter().filter_map(|node| node.qp.deadline().map(|due| due.0));
        let looks = self.nodes.iter().filter_map(|node| node.look_again_at);
        let waiting =
            |node: &&Node| node.next_receive < node.side.receives.len() && node.receive_at > self.now;
        let receives = self.nodes.iter().filter(waiting).map(|node| node.receive_at);
        arrival.into_iter().chain(timers).chain(looks).chain(receives).min()
    }

    fn progress(&self) -> String {
        let sides = self.nodes.iter().map(|node| {
            let (done, all) = (node.done.len(), node.side.completions.len());
            let (arrived, due) = (node.arrived.len(), node.side.arrivals.len());
            format!("{done}/{all} sends, {arrived}/{due} receives, {:?}", node.qp.counters())
        });
        sides.collect::<Vec<_>>().join("; ")
    }

    /// At the end both sides are idle, every request is done once and in order, and memory equals the model's.
    fn check(&self) -> Result<(), String> {
        for (index, node) in self.nodes.iter().enumerate() {
            let side = &node.side;
            if node.done != side.completions || node.arrived != side.arrivals {
                return Err(format!("side {index}: {}", self.progress()));
            }
            let memory = node.host.bytes.borrow();
            if let Some(at) = (0..memory.len()).find(|at| memory[*at] != side.expected[*at]) {
                return Err(format!("side {index}: memory differs at {at:#x}"));
            }
            if node.host.records.borrow().get(&KEY).unwrap_or(&Vec::new()) != &side.records {
                return Err(format!("side {index}: the appended records differ"));
            }
            let log = node.host.log.borrow();
            let of_peer = |deed: &&String| deed.starts_with("flush") || deed.contains("key=0x1");
            let (peer, own): (Vec<_>, Vec<_>) = log.iter().partition(of_peer);
            if !peer.into_iter().eq(&side.deeds_of_peer) || !own.into_iter().eq(&side.deeds_of_self) {
                return Err(format!("side {index}: deeds {log:?}"));
            }
            if node.qp.unacknowledged_packets() > 0 || node.qp.queued_requests() > 0 {
                return Err(format!("side {index}: work is left"));
            }
        }
        Ok(())
    }
}
