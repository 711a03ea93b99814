//! Fault injection: loss, duplication, reordering, corruption, delay and congestion marks, drawn from a seed.
//!
//! [`FaultyPort`] applies a [`FaultPlan`](terrace_faults::FaultPlan) from a file to any port. The simulated network
//! uses the same `Injector`.

mod port;

use std::ops::Range;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use smallvec::SmallVec;
use terrace_faults::FaultPlan;

pub use port::FaultyPort;

/// Probabilities and times of the injected faults.
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

/// One copy of a packet in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    pub at_ns: u64,
    /// The bit to flip, modulo the packet's length.
    pub corrupt_bit: Option<u32>,
    pub mark: bool,
    /// Whether the packet is delayed so that later packets overtake it.
    pub is_reordered: bool,
}

impl Faults {
    /// The unscheduled faults of a plan.
    fn from_plan(plan: &FaultPlan) -> Faults {
        Faults {
            loss: plan.loss,
            duplicate: plan.duplicate,
            corrupt: plan.corrupt,
            reorder: plan.reorder,
            ecn_mark: plan.ecn_mark,
            delay_ns: plan.delay_us_min * 1000..plan.delay_us_max * 1000 + 1,
            reorder_ns_max: plan.reorder_us_max * 1000,
        }
    }
}

/// Draws the faults of each packet. The time is an argument, and the draws come from the seed.
#[derive(Debug)]
pub(crate) struct Injector {
    pub faults: Faults,
    rng: StdRng,
}

impl Injector {
    pub fn new(faults: Faults, seed: u64) -> Injector {
        Injector { faults, rng: StdRng::seed_from_u64(seed) }
    }

    /// Arrival times and faults of the copies of a packet sent now; empty if the packet is lost. `in_order_ns` is the
    /// arrival time of the latest packet of the same flow that was not reordered: later packets do not overtake that
    /// packet.
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
        let is_reordered = self.chance(self.faults.reorder);
        if is_reordered {
            at_ns = at_ns.saturating_add(1 + self.draw(0..self.faults.reorder_ns_max));
        } else {
            at_ns = at_ns.max(*in_order_ns);
            *in_order_ns = at_ns;
        }
        let corrupt_bit = self.chance(self.faults.corrupt).then(|| self.rng.random());
        let mark = self.chance(self.faults.ecn_mark);
        Delivery { at_ns, corrupt_bit, mark, is_reordered }
    }

    fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.random::<f64>() < probability
    }

    fn draw(&mut self, range: Range<u64>) -> u64 {
        if range.end.saturating_sub(range.start) <= 1 { range.start } else { self.rng.random_range(range) }
    }
}

/// The traffic class of a packet with a congestion mark: both ECN bits set (RFC 3168).
pub(crate) fn marked(traffic_class: u8) -> u8 {
    traffic_class | 3
}
