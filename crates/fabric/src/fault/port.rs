//! A port that injects faults into the packets that it sends, and can drop packets that it receives.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use smallvec::SmallVec;
use terrace_faults::{Counts, Direction, Faults as Plan, Injected, PacketFate};
use terrace_sync::Mutex;
use terrace_wire::Path;

use super::{Delivery, Faults, Injector, marked};
use crate::{Gid, Port, PortCounters, RxBatch, TxBatch};

/// A port with the faults of a plan. Sent packets can have every fault. Received packets can have only loss and
/// blackholes, if the plan says so. For all faults in both directions both ends are wrapped.
///
/// Every `transmit` and `receive` sends the delayed packets that are due. The descriptors include a timer that becomes
/// readable when the next one is due.
#[derive(Debug)]
pub struct FaultyPort<P: Port = Box<dyn Port>> {
    inner: P,
    plan: Arc<Plan>,
    opened: Instant,
    timer: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    injector: Injector,
    in_order_ns: u64,
    delayed: BinaryHeap<Reverse<Delayed>>,
    delayed_total: u64,
    /// Packets that are due.
    outgoing: TxBatch,
}

/// A packet that is delayed until its time.
#[derive(Debug)]
struct Delayed {
    at_ns: u64,
    /// Orders packets with the same time: first in, first out.
    number: u64,
    path: Path,
    bytes: Vec<u8>,
    corrupt_bit: Option<u32>,
}

impl PartialEq for Delayed {
    fn eq(&self, other: &Delayed) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Delayed {}
impl PartialOrd for Delayed {
    fn partial_cmp(&self, other: &Delayed) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Delayed {
    fn cmp(&self, other: &Delayed) -> std::cmp::Ordering {
        (self.at_ns, self.number).cmp(&(other.at_ns, other.number))
    }
}

/// Buffer for packets that are due but could not be sent yet.
const OUTGOING_BYTES: usize = 1 << 20;

impl<P: Port> FaultyPort<P> {
    /// Wraps a port.
    ///
    /// # Errors
    /// The error of `timerfd_create(2)`.
    pub fn new(inner: P, plan: Arc<Plan>) -> io::Result<FaultyPort<P>> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let state = State {
            injector: Injector::new(Faults::from_plan(plan.plan()), plan.plan().seed),
            in_order_ns: 0,
            delayed: BinaryHeap::new(),
            delayed_total: 0,
            outgoing: TxBatch::new(OUTGOING_BYTES),
        };
        Ok(FaultyPort { inner, plan, opened: Instant::now(), timer, state: Mutex::new(state) })
    }

    fn now_ns(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    /// Sends the packets that are due, and sets the timer for the next one. Returns false if the network would block.
    fn send_due(&self, state: &mut State, now_ns: u64) -> bool {
        loop {
            state.fill_outgoing(now_ns);
            if state.outgoing.is_empty() {
                break;
            }
            if !self.inner.transmit(&mut state.outgoing) {
                break;
            }
        }
        self.set_timer(state.delayed.peek().map(|Reverse(delayed)| delayed.at_ns.saturating_sub(now_ns)));
        state.outgoing.is_empty()
    }

    /// Sets the timer, which also makes its descriptor unreadable.
    fn set_timer(&self, wait_ns: Option<u64>) {
        // A wait of zero would disarm the timer.
        let wait = wait_ns.map_or(Duration::ZERO, |ns| Duration::from_nanos(ns.max(1)));
        let value = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            tracing::warn!("fault injection timer: {error}");
        }
    }
}

impl State {
    /// Draws the faults of each packet of the batch, queues the copies, and empties the batch.
    fn delay_batch(&mut self, tx: &mut TxBatch, now_ns: u64, plan: &Plan) {
        for packet in tx.packets() {
            let fate = plan.packet(Direction::Out, packet.path.remote.ip());
            for delivery in self.deliveries(now_ns, fate, plan.counts()) {
                let mut path = packet.path;
                if delivery.mark {
                    path.traffic_class = marked(path.traffic_class);
                }
                self.delayed_total += 1;
                self.delayed.push(Reverse(Delayed {
                    at_ns: delivery.at_ns,
                    number: self.delayed_total,
                    path,
                    bytes: packet.bytes.to_vec(),
                    corrupt_bit: delivery.corrupt_bit,
                }));
            }
        }
        tx.clear();
    }

    /// The copies of a packet, by its scheduled and the unscheduled faults. The scheduled faults are already counted.
    fn deliveries(&mut self, now_ns: u64, fate: PacketFate, counts: &Counts) -> SmallVec<[Delivery; 2]> {
        if fate.lost {
            return SmallVec::new();
        }
        let mut in_order_ns = self.in_order_ns;
        let mut deliveries = self.injector.deliveries(now_ns.saturating_add(fate.delay_ns), &mut in_order_ns);
        count_faults(&deliveries, self.injector.faults.delay_ns.end > 1, counts);
        if let Some(first) = deliveries.first_mut() {
            first.at_ns = first.at_ns.saturating_add(fate.reorder_ns);
            first.corrupt_bit = fate.corrupt_bit.or(first.corrupt_bit);
            first.mark |= fate.mark;
            let copy = *first;
            deliveries.extend((0..fate.extra_copies).map(|_| copy));
        }
        // Later packets do not wait for a reordered packet.
        if fate.reorder_ns == 0 {
            self.in_order_ns = in_order_ns;
        }
        deliveries
    }

    /// Moves due packets to the batch until it is full.
    fn fill_outgoing(&mut self, now_ns: u64) {
        while let Some(Reverse(delayed)) = self.delayed.peek() {
            if delayed.at_ns > now_ns
                || !self.outgoing.push_copy(&delayed.path, &delayed.bytes, delayed.corrupt_bit)
            {
                return;
            }
            self.delayed.pop();
        }
    }
}

/// Counts the unscheduled faults.
fn count_faults(deliveries: &[Delivery], is_delayed: bool, counts: &Counts) {
    let Some(first) = deliveries.first() else { return counts.add(Injected::PacketLost) };
    let injected = [
        (deliveries.len() > 1, Injected::PacketDuplicated),
        (is_delayed, Injected::PacketDelayed),
        (first.is_reordered, Injected::PacketReordered),
        (first.corrupt_bit.is_some(), Injected::PacketCorrupted),
        (first.mark, Injected::PacketMarked),
    ];
    injected.into_iter().filter(|(is_injected, _)| *is_injected).for_each(|(_, fault)| counts.add(fault));
}

impl<P: Port> Port for FaultyPort<P> {
    fn gids(&self) -> &[Gid] {
        self.inner.gids()
    }

    fn instance(&self) -> u8 {
        self.inner.instance()
    }

    fn udp_port(&self) -> u16 {
        self.inner.udp_port()
    }

    fn mtu_limit(&self) -> u32 {
        self.inner.mtu_limit()
    }

    fn receive_buffer_bytes(&self) -> usize {
        self.inner.receive_buffer_bytes()
    }

    fn counters(&self) -> &PortCounters {
        self.inner.counters()
    }

    fn transmit(&self, tx: &mut TxBatch) -> bool {
        let mut state = self.state.lock();
        let now_ns = self.now_ns();
        if !state.outgoing.is_empty() && !self.send_due(&mut state, now_ns) {
            return false;
        }
        state.delay_batch(tx, now_ns, &self.plan);
        self.send_due(&mut state, now_ns)
    }

    fn receive(&self, rx: &mut RxBatch) -> usize {
        let mut state = self.state.lock();
        let now_ns = self.now_ns();
        let due = state.delayed.peek().is_some_and(|Reverse(delayed)| delayed.at_ns <= now_ns);
        if due || !state.outgoing.is_empty() {
            self.send_due(&mut state, now_ns);
        }
        drop(state);
        let received = self.inner.receive(rx);
        if received > 0 && self.plan.has_receive_faults() {
            rx.retain(|meta| !self.plan.packet(Direction::In, meta.source.ip()).lost);
        }
        received
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut descriptors = self.inner.descriptors();
        descriptors.push(self.timer.as_fd());
        descriptors
    }

    fn activate(&self, gid_index: u8) {
        self.inner.activate(gid_index);
    }

    fn join(&self, group: IpAddr) -> io::Result<()> {
        self.inner.join(group)
    }

    fn leave(&self, group: IpAddr) {
        self.inner.leave(group);
    }
}
