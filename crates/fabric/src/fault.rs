//! Faults that are wanted: loss, duplication, reordering, corruption, delay and congestion marks, drawn from a seed.
//!
//! [`FaultPlan`] is what a person writes in a file; [`FaultyPort`] applies one to any port. The simulated network
//! draws from the same [`Injector`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path as FilePath, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use terrace_wire::Path;

use crate::{Gid, Port, PortCounters, RxBatch, TxBatch};

/// Faults to inject into the packets that a port sends, as a TOML file says it. Every key may be left out.
///
/// ```toml
/// seed = 7              # the same seed draws the same faults for the same packets
/// loss = 0.01           # probabilities for each packet, 0 to 1
/// duplicate = 0.01
/// corrupt = 0.001       # one bit flipped after the ICRC was computed
/// reorder = 0.01        # held back for up to reorder_us_max, so that others overtake it
/// reorder_us_max = 100
/// ecn_mark = 0.0        # marked "congestion experienced"
/// delay_us_min = 0      # every packet waits this long ...
/// delay_us_max = 0      # ... to this long, order kept
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultPlan {
    /// Where the random draws start.
    pub seed: u64,
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet arrives twice.
    pub duplicate: f64,
    /// Probability that a bit of a packet is flipped.
    pub corrupt: f64,
    /// Probability that a packet is held back so that others overtake it.
    pub reorder: f64,
    /// How long it is held back at most, in microseconds.
    pub reorder_us_max: u64,
    /// Probability that a packet is marked with "congestion experienced".
    pub ecn_mark: f64,
    /// Shortest delay of every packet in microseconds.
    pub delay_us_min: u64,
    /// Longest delay of every packet in microseconds; packets stay in order.
    pub delay_us_max: u64,
}

impl Default for FaultPlan {
    fn default() -> FaultPlan {
        FaultPlan {
            seed: 0,
            loss: 0.0,
            duplicate: 0.0,
            corrupt: 0.0,
            reorder: 0.0,
            reorder_us_max: 100,
            ecn_mark: 0.0,
            delay_us_min: 0,
            delay_us_max: 0,
        }
    }
}

/// Why a fault plan was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum FaultPlanError {
    /// The file could not be read.
    #[error("cannot read the fault plan {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// It is not TOML, or has a key that means nothing. Shows the line.
    #[error("the fault plan is not valid: {0}")]
    Syntax(#[from] toml::de::Error),
    /// A probability is not between 0 and 1.
    #[error("the fault plan's `{key}` is {value}; a probability lies between 0 and 1")]
    Probability {
        /// The key.
        key: &'static str,
        /// Its value.
        value: f64,
    },
    /// A time is longer than any test should last.
    #[error("the fault plan's `{key}` is {value} microseconds; at most {DELAY_US_MAX} (a minute) is allowed")]
    Delay {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u64,
    },
    /// The delay's ends are the wrong way round.
    #[error("the fault plan's `delay_us_min` ({min}) is above its `delay_us_max` ({max})")]
    DelayOrder {
        /// The lower end.
        min: u64,
        /// The upper end.
        max: u64,
    },
}

const DELAY_US_MAX: u64 = 60_000_000;

impl FaultPlan {
    /// Reads a plan from a file.
    ///
    /// # Errors
    /// The file cannot be read, or holds no valid plan.
    pub fn load(path: &FilePath) -> Result<FaultPlan, FaultPlanError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| FaultPlanError::Read { path: path.to_owned(), source })?;
        FaultPlan::parse(&text)
    }

    /// Reads a plan from its text.
    ///
    /// # Errors
    /// The text holds no valid plan.
    pub fn parse(text: &str) -> Result<FaultPlan, FaultPlanError> {
        let plan: FaultPlan = toml::from_str(text)?;
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), FaultPlanError> {
        let probabilities = [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("corrupt", self.corrupt),
            ("reorder", self.reorder),
            ("ecn_mark", self.ecn_mark),
        ];
        for (key, value) in probabilities {
            if !(0.0..=1.0).contains(&value) {
                return Err(FaultPlanError::Probability { key, value });
            }
        }
        for (key, value) in [("delay_us_max", self.delay_us_max), ("reorder_us_max", self.reorder_us_max)] {
            if value > DELAY_US_MAX {
                return Err(FaultPlanError::Delay { key, value });
            }
        }
        if self.delay_us_min > self.delay_us_max {
            return Err(FaultPlanError::DelayOrder { min: self.delay_us_min, max: self.delay_us_max });
        }
        Ok(())
    }

    fn faults(&self) -> Faults {
        Faults {
            loss: self.loss,
            duplicate: self.duplicate,
            corrupt: self.corrupt,
            reorder: self.reorder,
            ecn_mark: self.ecn_mark,
            delay_ns: self.delay_us_min * 1000..self.delay_us_max * 1000 + 1,
            reorder_ns_max: self.reorder_us_max * 1000,
        }
    }
}

/// What can happen to a packet, in the terms of the injector.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    pub loss: f64,
    pub duplicate: f64,
    pub corrupt: f64,
    pub reorder: f64,
    pub ecn_mark: f64,
    pub delay_ns: Range<u64>,
    pub reorder_ns_max: u64,
}

/// One copy of a packet on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    pub at_ns: u64,
    /// Which bit to flip, modulo the packet's length.
    pub spoil: Option<u32>,
    pub mark: bool,
}

/// Draws what happens to each packet. Pure: the time comes in, the draws come from the seed.
#[derive(Debug)]
pub(crate) struct Injector {
    pub faults: Faults,
    rng: StdRng,
}

impl Injector {
    pub fn new(faults: Faults, seed: u64) -> Injector {
        Injector { faults, rng: StdRng::seed_from_u64(seed) }
    }

    /// When and how a packet sent now arrives; empty if it is lost. `in_order_ns` is when the latest packet of the
    /// same flow that was not held back arrives: the next one does not overtake it.
    pub fn deliveries(&mut self, now_ns: u64, in_order_ns: &mut u64) -> SmallVec<[Delivery; 2]> {
        let mut deliveries = SmallVec::new();
        if self.chance(self.faults.loss) {
            return deliveries;
        }
        let copies = if self.chance(self.faults.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            deliveries.push(self.delivery(now_ns, in_order_ns));
        }
        deliveries
    }

    fn delivery(&mut self, now_ns: u64, in_order_ns: &mut u64) -> Delivery {
        let mut at_ns = now_ns.saturating_add(self.draw(self.faults.delay_ns.clone()));
        if self.chance(self.faults.reorder) {
            at_ns = at_ns.saturating_add(1 + self.draw(0..self.faults.reorder_ns_max));
        } else {
            at_ns = at_ns.max(*in_order_ns);
            *in_order_ns = at_ns;
        }
        let spoil = self.chance(self.faults.corrupt).then(|| self.rng.random());
        let mark = self.chance(self.faults.ecn_mark);
        Delivery { at_ns, spoil, mark }
    }

    fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.random::<f64>() < probability
    }

    fn draw(&mut self, range: Range<u64>) -> u64 {
        if range.end.saturating_sub(range.start) <= 1 { range.start } else { self.rng.random_range(range) }
    }
}

/// The traffic class of a packet that met congestion: both ECN bits set (RFC 3168).
pub(crate) fn marked(traffic_class: u8) -> u8 {
    traffic_class | 3
}

/// A port whose outgoing packets suffer the faults of a plan. Wrap both ends to spoil both directions.
///
/// Packets that wait need somebody to let them go: every `transmit` and `receive` does, and among the descriptors is
/// a timer that becomes readable when the next one is due.
#[derive(Debug)]
pub struct FaultyPort<P: Port = Box<dyn Port>> {
    inner: P,
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

/// A packet that waits for its time.
#[derive(Debug)]
struct Held {
    at_ns: u64,
    /// Tells apart packets of the same time: first come, first out.
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

/// Room for packets that are due but could not leave yet.
const OUTGOING_BYTES: usize = 1 << 20;

impl<P: Port> FaultyPort<P> {
    /// Wraps a port.
    ///
    /// # Errors
    /// The system has no timer descriptor left.
    pub fn new(inner: P, plan: &FaultPlan) -> io::Result<FaultyPort<P>> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let state = State {
            injector: Injector::new(plan.faults(), plan.seed),
            in_order_ns: 0,
            held: BinaryHeap::new(),
            held_total: 0,
            outgoing: TxBatch::new(OUTGOING_BYTES),
        };
        Ok(FaultyPort { inner, opened: Instant::now(), timer, state: Mutex::new(state) })
    }

    fn now_ns(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    /// Sends what is due, and sets the timer for the next. False if the network would block.
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

    /// Setting the timer also ends its being readable.
    fn set_timer(&self, wait_ns: Option<u64>) {
        // A wait of zero would switch the timer off.
        let wait = wait_ns.map_or(Duration::ZERO, |ns| Duration::from_nanos(ns.max(1)));
        let value = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            tracing::warn!("fault injection timer: {error}");
        }
    }
}

impl State {
    /// Draws what happens to each packet of the batch, and takes them all.
    fn take(&mut self, tx: &mut TxBatch, now_ns: u64) {
        for packet in tx.packets() {
            for delivery in self.injector.deliveries(now_ns, &mut self.in_order_ns) {
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

    /// Moves what is due to the batch, as far as there is room.
    fn fill_outgoing(&mut self, now_ns: u64) {
        while let Some(Reverse(held)) = self.held.peek() {
            if held.at_ns > now_ns || !self.outgoing.push_copy(&held.path, &held.bytes, held.spoil) {
                return;
            }
            self.held.pop();
        }
    }
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
        state.take(tx, now_ns);
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
        self.inner.receive(rx)
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
