//! A port that injects faults into the packets that it sends, and may drop packets that it receives.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
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

/// A port whose packets suffer the faults of a plan: sent packets all of them; received packets only loss and
/// blackholes, where the plan asks for it. Wrap both ends for faults in both directions.
///
/// Every `transmit` and `receive` sends the held packets that are due. The descriptors include
/// a timer that becomes readable when the next one is due.
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
    held: BinaryHeap<Reverse<Held>>,
    held_total: u64,
    /// Packets that are due.
    outgoing: TxBatch,
}

/// A packet that is held until its time.
#[derive(Debug)]
struct Held {
    at_ns: u64,
    /// Orders packets of the same time: first in, first out.
    number: u64,
    path: Path,
    bytes: Vec<u8>,
    spoil: Option<u32>,
}

impl PartialEq for Held {
    fn eq(&self, other: &Held) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Held {}
impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Held) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Held {
    fn cmp(&self, other: &Held) -> std::cmp::Ordering {
        (self.at_ns, self.number).cmp(&(other.at_ns, other.number))
    }
}

/// Buffer for packets that are due but could not be sent yet.
const OUTGOING_BYTES: usize = 1 << 20;

impl<P: Port> FaultyPort<P> {
    /// Wraps a port.
    ///
    /// # Errors
    /// The system has no timer descriptor left.
    pub fn new(inner: P, plan: Arc<Plan>) -> io::Result<FaultyPort<P>> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let state = State {
            injector: Injector::new(Faults::of(plan.plan()), plan.plan().seed),
            in_order_ns: 0,
            held: BinaryHeap::new(),
            held_total: 0,
            outgoing: TxBatch::new(OUTGOING_BYTES),
        };
        Ok(FaultyPort { inner, plan, opened: Instant::now(), timer, state: Mutex::new(state) })
    }

    fn now_ns(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    /// Sends the packets that are due, and sets the timer for the next. False if the network would block.
    fn release(&self, state: &mut State, now_ns: u64) -> bool {
        loop {
            state.fill_outgoing(now_ns);
            if state.outgoing.is_empty() {
                break;
            }
            if !self.inner.transmit(&mut state.outgoing) {
                break;
            }
        }
        self.set_timer(state.held.peek().map(|Reverse(held)| held.at_ns.saturating_sub(now_ns)));
        state.outgoing.is_empty()
    }

    /// Sets the timer. That also makes it unreadable.
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
    /// Draws the faults of each packet of the batch, and empties the batch.
    fn take(&mut self, tx: &mut TxBatch, now_ns: u64, plan: &Plan) {
        for packet in tx.packets() {
            let fate = plan.packet(Direction::Out, packet.path.remote.ip());
            for delivery in self.deliveries(now_ns, fate, plan.counts()) {
                let mut path = packet.path;
                if delivery.mark {
                    path.traffic_class = marked(path.traffic_class);
                }
                self.held_total += 1;
                self.held.push(Reverse(Held {
                    at_ns: delivery.at_ns,
                    number: self.held_total,
                    path,
                    bytes: packet.bytes.to_vec(),
                    spoil: delivery.spoil,
                }));
            }
        }
        tx.clear();
    }

    /// The copies of a packet, by its scheduled fate and the unscheduled faults. The fate is counted already.
    fn deliveries(&mut self, now_ns: u64, fate: PacketFate, counts: &Counts) -> SmallVec<[Delivery; 2]> {
        if fate.lost {
            return SmallVec::new();
        }
        let mut in_order_ns = self.in_order_ns;
        let mut deliveries = self.injector.deliveries(now_ns.saturating_add(fate.delay_ns), &mut in_order_ns);
        count(&deliveries, self.injector.faults.delay_ns.end > 1, counts);
        if let Some(first) = deliveries.first_mut() {
            first.at_ns = first.at_ns.saturating_add(fate.held_back_ns);
            first.spoil = fate.spoil.or(first.spoil);
            first.mark |= fate.mark;
            let copy = *first;
            deliveries.extend((0..fate.extra_copies).map(|_| copy));
        }
        // Later packets do not wait for a packet that is held back.
        if fate.held_back_ns == 0 {
            self.in_order_ns = in_order_ns;
        }
        deliveries
    }

    /// Moves due packets to the batch, as far as they fit.
    fn fill_outgoing(&mut self, now_ns: u64) {
        while let Some(Reverse(held)) = self.held.peek() {
            if held.at_ns > now_ns || !self.outgoing.push_copy(&held.path, &held.bytes, held.spoil) {
                return;
            }
            self.held.pop();
        }
    }
}

/// Counts the unscheduled faults.
fn count(deliveries: &[Delivery], delays: bool, counts: &Counts) {
    let Some(first) = deliveries.first() else { return counts.add(Injected::PacketLost) };
    let done = [
        (deliveries.len() > 1, Injected::PacketDuplicated),
        (delays, Injected::PacketDelayed),
        (first.held_back, Injected::PacketReordered),
        (first.spoil.is_some(), Injected::PacketCorrupted),
        (first.mark, Injected::PacketMarked),
    ];
    done.into_iter().filter(|(done, _)| *done).for_each(|(_, what)| counts.add(what));
}

impl<P: Port> Port for FaultyPort<P> {
    fn gids(&self) -> &[Gid] {
        self.inner.gids()
    }

    fn slot(&self) -> u8 {
        self.inner.slot()
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
        if !state.outgoing.is_empty() && !self.release(&mut state, now_ns) {
            return false;
        }
        state.take(tx, now_ns, &self.plan);
        self.release(&mut state, now_ns)
    }

    fn receive(&self, rx: &mut RxBatch) -> usize {
        let mut state = self.state.lock();
        let now_ns = self.now_ns();
        let due = state.held.peek().is_some_and(|Reverse(held)| held.at_ns <= now_ns);
        if due || !state.outgoing.is_empty() {
            self.release(&mut state, now_ns);
        }
        drop(state);
        let received = self.inner.receive(rx);
        if received > 0 && self.plan.is_for_arrivals() {
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
}
