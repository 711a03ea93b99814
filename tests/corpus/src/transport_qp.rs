//! Checks queue pairs of every type in every state with any packets, work requests, attributes and times in any order.
//! No call panics, sent packets are well-formed, work requests complete at most once and in order, and the peer's
//! packets use a bounded amount of memory.

mod input;

use std::collections::VecDeque;
use std::iter;
use std::net::IpAddr;

use crate::{decoded, support};
use arbitrary::Arbitrary;
use smallvec::smallvec;
use terrace_transport::{
    APPEND_LEN_MAX, AckPolicy, Payload, Qp, QpAttr, QpAttrMask, QpState, QpType, RemoteError, SendFlags,
    SendOp, SendWr, Sge, StagingBudget, Time, Transmit, WcStatus,
};
use terrace_wire::{Headers, Packet, Psn, Service, emit_headers};

use crate::support::host::{Event, Memory};
use crate::support::sink::Collector;
use crate::support::{bring_up, meta_between};
use input::{MEMORY_LEN, Setup, Step};

/// Runs are a little longer than this.
const RUN_BYTES: usize = 6000;
/// Limit of a case's steps, because more of them are slow.
const STEPS_MAX: usize = 200;
/// Limit of packets that may leave at the end. Each READ response has up to 64 packets of 256 bytes here, and there are
/// at most 8 new and 8 repeated responses. The queue pair's own requests and their segments are added to these.
const BACKLOG_MAX: usize = 4000;
/// Limit of characters in a queue pair's debug output. It holds at most 16 work requests and receives, 8 READs as
/// responder resources, about a hundred pending responses, and 512 packets whose memory is absent.
const DESCRIPTION_MAX: usize = 200_000;

#[derive(Arbitrary, Debug)]
struct Case {
    setup: Setup,
    steps: Vec<Step>,
}

struct World {
    qp: Qp,
    host: Memory,
    now: Time,
    /// IDs of posted work requests that have not completed.
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
    next_id: u64,
}

fn own() -> IpAddr {
    IpAddr::from([10, 0, 0, 1])
}

fn peer() -> IpAddr {
    IpAddr::from([10, 0, 0, 2])
}

/// Runs one case.
pub fn check(bytes: &[u8]) {
    let Some(case) = decoded::<Case>(bytes) else { return };
    let mut world = World::new(&case.setup);
    for step in case.steps.iter().take(STEPS_MAX) {
        world.run(step, &case.setup);
        world.take_events();
    }
    assert!(format!("{:?}", world.qp).len() < DESCRIPTION_MAX, "the queue pair grows");
    world.finish();
}

impl World {
    fn new(setup: &Setup) -> World {
        let host = Memory::new(MEMORY_LEN as usize);
        for key in 0..input::KEYS as u8 {
            add_region(&host, key);
        }
        host.srqs.borrow_mut().insert(input::SRQN, VecDeque::new());
        let mut world = World {
            qp: Qp::new(setup.config()),
            host,
            now: Time(1_000_000),
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            next_id: 0,
        };
        let attr = setup.attr(peer());
        match setup.state() {
            QpState::Sqe => {
                bring_up(&mut world.qp, &attr, QpState::Rts);
                world.fail_a_send();
            }
            state => bring_up(&mut world.qp, &attr, state),
        }
        world.take_events();
        world
    }

    fn fail_a_send(&mut self) {
        let mut wr = SendWr {
            wr_id: self.next_id,
            op: SendOp::Send,
            payload: Payload::Sges(smallvec![Sge { addr: 0, length: 8, lkey: 99 }]),
            flags: SendFlags::SIGNALED,
            target: None,
        };
        if self.qp.post_send(|| self.now, &mut wr, &self.host, &mut ()).is_ok() {
            self.sends.push_back(self.next_id);
            self.next_id += 1;
            self.transmit(None);
        }
    }

    fn run(&mut self, step: &Step, setup: &Setup) {
        match step {
            Step::Packet(packet) => {
                let attr = self.qp.query();
                let bytes = packet.bytes(attr.rq_psn, attr.sq_psn, attr.path_mtu);
                self.handle(&bytes, packet.is_foreign(), packet.traffic_class());
            }
            Step::Raw { bytes, foreign } => self.handle(bytes, *foreign, 0),
            Step::Send(send) => {
                let mut wr = send.request(self.next_id, peer());
                if self.qp.post_send(|| self.now, &mut wr, &self.host, &mut ()).is_ok() {
                    self.sends.push_back(self.next_id);
                    self.next_id += 1;
                }
            }
            Step::Receive { memory, count } => self.receive(memory, *count, setup),
            Step::Modify { to, wrong_current, without_state, extra, missing, attributes } => {
                let (qp_type, from, to) = (self.qp.config().qp_type, self.qp.state(), input::state(*to));
                let cur_state = if *wrong_current { to } else { from };
                let attr = QpAttr { state: to, cur_state, ..attributes.attr(peer()) };
                let needed = terrace_transport::required_attributes(qp_type, from, to);
                let mut mask = input::modify_mask(needed.unwrap_or(QpAttrMask::empty()), *extra, *missing);
                mask.set(QpAttrMask::STATE, !without_state);
                self.modify(&attr, mask);
            }
            Step::Transmit { room, hold } => {
                if !(*hold && self.qp.wants_only_to_acknowledge()) {
                    self.transmit((*room < 128).then_some(usize::from(*room % 16)));
                }
            }
            Step::Wait { ns } => {
                self.now = self.now.after_ns(u64::from(*ns) * 64);
                self.qp.handle_timeout(self.now, &self.host);
            }
            Step::WaitForTimer => {
                if let Some(due) = self.qp.deadline() {
                    self.now = self.now.max(due);
                    self.qp.handle_timeout(self.now, &self.host);
                    let next = self.qp.deadline();
                    assert!(next.is_none_or(|next| next > self.now), "a timer that went off is still due");
                }
            }
            Step::Pause { ns } => self.host.pause_ns.set((*ns > 0).then_some(u64::from(*ns))),
            Step::Region { key, present: true } => add_region(&self.host, *key),
            Step::Region { key, present: false } => {
                self.host.regions.borrow_mut().remove(&(u32::from(*key) % input::KEYS));
            }
            Step::Absent { addr, length, faulting, slots } => {
                let (addr, length) = (u64::from(*addr), u64::from(*length));
                *self.host.absent.borrow_mut() = iter::once(addr..addr + length).collect();
                self.host.faulting.set(*faulting);
                self.host.defers_appends.set(length % 2 == 1);
                self.host.slots.set((*slots < 64).then_some(usize::from(*slots % 8)));
            }
            Step::Complete { index, outcome, wakes } => {
                let count = self.host.under_way.borrow().len();
                let outcome = match outcome % 8 {
                    0 => Err(RemoteError::Access),
                    1 => Err(RemoteError::Operation),
                    _ => Ok(()),
                };
                self.host.complete(usize::from(*index) % count.max(1), outcome);
                if *wakes {
                    self.qp.wake();
                }
            }
        }
    }

    fn receive(&mut self, memory: &[input::Piece; 2], count: u8, setup: &Setup) {
        let wr = input::receive(self.next_id, memory, count);
        let shared = self.host.shared_receives.borrow().len();
        let of_xrc = self.host.srqs.borrow()[&input::SRQN].len();
        let posted = if self.qp.config().qp_type == QpType::XrcRecv {
            if of_xrc < 16 {
                self.host.srqs.borrow_mut().entry(input::SRQN).or_default().push_back(wr);
            }
            of_xrc < 16
        } else if setup.shared_receives && shared < 16 {
            self.host.shared_receives.borrow_mut().push_back(wr);
            true
        } else {
            self.qp.post_recv(wr, &self.host).is_ok()
        };
        if posted {
            self.receives.push_back(self.next_id);
            self.next_id += 1;
        }
    }

    fn modify(&mut self, attr: &QpAttr, mask: QpAttrMask) {
        let before = self.qp.query();
        if self.qp.modify(attr, mask, &self.host).is_err() {
            assert_eq!(self.qp.query(), before, "a refused change changed something");
        } else if self.qp.state() == QpState::Reset {
            // RESET discards completions, but does not empty a shared queue.
            self.host.events.borrow_mut().clear();
            self.sends.clear();
            let (left, of_xrc) = (self.host.shared_receives.borrow(), self.host.srqs.borrow());
            let left = left.iter().chain(of_xrc.values().flatten());
            self.receives.retain(|id| left.clone().any(|wr| wr.wr_id == *id));
        }
    }

    fn handle(&mut self, bytes: &[u8], foreign: bool, traffic_class: u8) {
        let Ok(packet) = Packet::parse(bytes) else { return };
        let source = if foreign { IpAddr::from([10, 9, 9, 9]) } else { peer() };
        let meta = meta_between(source, own(), traffic_class);
        let state = self.qp.state();
        // The packet's length determines whether it carries an acknowledgement, and for which PSN near the last sent
        // one.
        let recent = Psn::new(self.qp.query().sq_psn).minus((bytes.len() / 16 % 4) as u32);
        let ack = (bytes.len() / 4 % 4 == 1).then_some(recent);
        if packet.payload.len() % 8 == 3 {
            // As a run, whether its opcode may be one or not.
            let data = packet.payload.repeat(RUN_BYTES / packet.payload.len() + 1);
            let len = data.len() as u64;
            *self.host.run.borrow_mut() = data;
            self.qp.handle_run(|| self.now, &meta, &packet, len, ack, &self.host);
        } else {
            self.qp.handle_packet(|| self.now, &meta, &packet, ack, &self.host);
        }
        self.take_events();
        if foreign && self.qp.config().qp_type != QpType::Ud {
            assert_eq!(self.qp.state(), state, "a stranger changed the state");
        }
    }

    fn transmit(&mut self, room: Option<usize>) -> usize {
        let acks = room.is_some_and(|room| room & 1 == 1).then(Vec::new);
        let mut sink = Collector { room, acks, ..Collector::default() };
        let stopped = self.qp.poll_transmit(|| self.now, &self.host, &mut sink, AckPolicy::Now);
        if stopped == Transmit::Idle {
            assert!(!self.qp.wants_transmit(), "idle, but wants to transmit");
        }
        assert!(stopped == Transmit::Idle || room.is_some(), "full without a limit");
        for (path, bytes) in &sink.packets {
            assert_eq!(*path, support::path_to(peer()));
            self.check_packet(bytes);
        }
        self.take_events();
        sink.packets.len()
    }

    fn check_packet(&self, bytes: &[u8]) {
        let packet = Packet::parse(bytes).expect("what leaves can be read");
        let info = packet.bth.opcode.info();
        let mut head = vec![0; info.header_len];
        emit_headers(&packet.bth, &packet.ext, &mut head).expect("and written");
        assert_eq!(head, bytes[..info.header_len], "reserved bits");
        let padded = bytes.len() - info.header_len;
        assert!(padded.is_multiple_of(4));
        assert!(bytes[info.header_len + packet.payload.len()..].iter().all(|byte| *byte == 0), "a dirty pad");
        let qp_type = self.qp.config().qp_type;
        let mtu = if qp_type == QpType::Ud { 4096 } else { self.qp.query().path_mtu };
        // RESET clears the path MTU.
        assert!(packet.payload.len() <= mtu as usize || self.qp.state() == QpState::Reset);
        assert!(info.service == qp_type.service() || info.service == Service::Cnp && qp_type.is_reliable());
        assert_eq!(
            info.headers.contains(Headers::XRCETH),
            qp_type == QpType::XrcSend && info.service != Service::Cnp
        );
        assert_eq!((packet.bth.qpn, packet.bth.pkey), (0x22, 0xffff));
        assert_eq!(info.headers.contains(Headers::DETH), qp_type == QpType::Ud);
    }

    /// Checks that completions are for posted work requests, in order.
    fn take_events(&mut self) {
        let is_dead = matches!(self.qp.state(), QpState::Reset | QpState::Err);
        let staged = StagingBudget::default().free_bytes() - self.host.staging.borrow().free_bytes();
        assert!(
            staged <= if is_dead { 0 } else { u64::from(APPEND_LEN_MAX) },
            "{staged} bytes of a record are kept"
        );
        let signal_all = self.qp.config().sq_sig_all;
        while let Some(event) = self.host.poll_event() {
            match event {
                Event::SendComplete(wc) => loop {
                    let id = self.sends.pop_front().expect("a completion of something posted");
                    if id == wc.wr_id {
                        break;
                    }
                    assert!(!signal_all, "a request was passed over in silence");
                },
                Event::RecvComplete(wc) => {
                    assert_eq!(self.receives.pop_front(), Some(wc.wr_id), "receives complete in order");
                    let takes_more = self.qp.state() != QpState::Err;
                    assert!(!takes_more || wc.status == WcStatus::Success, "an error that breaks nothing");
                }
                _ => {}
            }
        }
        let (sends, receives) = self.qp.queue_lengths();
        let cap = self.qp.config().cap;
        assert!(sends <= cap.max_send_wr as usize && receives <= cap.max_recv_wr as usize);
        assert!(self.sends.len() >= sends);
    }

    /// Ends all accesses to absent memory, including those that start meanwhile.
    fn finish_absent(&mut self) {
        loop {
            while self.host.complete(0, Ok(())) {}
            self.qp.wake();
            let left = self.transmit(None);
            assert!(left < BACKLOG_MAX, "{left} packets waited for memory");
            if self.host.under_way.borrow().is_empty() {
                return;
            }
        }
    }

    /// Runs the queue pair until it has no more work.
    fn finish(&mut self) {
        self.host.pause_ns.set(None);
        self.host.slots.set(None);
        self.finish_absent();
        let mut left = self.transmit(None);
        assert!(left < BACKLOG_MAX, "{left} packets waited");
        // Without responses the retries are used up, unless the program requested infinite ones.
        for _ in 0..40 {
            let Some(due) = self.qp.deadline() else { return };
            self.now = self.now.max(due);
            self.qp.handle_timeout(self.now, &self.host);
            self.take_events();
            left = self.transmit(None);
            assert!(left < BACKLOG_MAX, "{left} packets at once");
        }
        panic!("timers go off without end");
    }
}

fn add_region(host: &Memory, key: u8) {
    let rights = ["", "lrwagpe", "r", "rwm"][usize::from(key) % 4];
    if !rights.is_empty() {
        host.add_region(u32::from(key) % input::KEYS, 0, MEMORY_LEN, rights);
    }
}
