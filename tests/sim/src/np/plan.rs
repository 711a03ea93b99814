//! The parameters of a run, which the seed determines.

use terrace_access::optimistic::Order;
use terrace_fabric::sim::SimConfig;

use crate::rng::SimRng;

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub faulty: SimConfig,
    pub intact: SimConfig,
    pub mtu: u32,
    pub pair_count: usize,
    /// Requests of each pair.
    pub budget: u32,
    /// Longest transfer, in bytes.
    pub bytes_max: u64,
    /// Pages of the initiator's memory, and of the target's.
    pub page_counts: [usize; 2],
    /// Where in its first page the region begins.
    pub lead: usize,
    /// Probability at each tick that a page comes or goes, on either node.
    pub churn: f64,
    /// Probability that a page is present at the start.
    pub present: f64,
    /// Probability that a request is signaled.
    pub signaled: f64,
    /// Probability that the target has no room for a hold.
    pub busy: f64,
    /// Probability that an answer is lost with its control queue pair, and the request sent again.
    pub lost_answer: f64,
    /// Probability that a request is for the beginning of the memory, so that requests overlap.
    pub overlap: f64,
    pub tick_ns_max: u64,
    pub order: Order,
    pub post_count_max: usize,
    pub call_count_max: u32,
    pub inline_bytes_max: u32,
    pub call_bytes_max: u32,
    pub is_reverse_allowed: bool,
    pub unchecked_count_max: usize,
    pub check_delay_ns: u64,
    pub version_age_ns: u64,
    pub slot_bytes: u32,
    pub slot_count: u32,
    pub is_two_sided: bool,
}

impl Plan {
    /// Bytes of the memory that is lent for a call.
    pub fn lent_bytes(&self) -> usize {
        self.bytes_max.min(self.call_bytes_max.into()).next_multiple_of(8) as usize
    }

    pub fn draw(rng: &mut SimRng) -> Plan {
        let mtu = rng.pick(&[256, 1024, 4096]);
        let (delay_min_ns, delay_max_ns) = rng.pick(&[(1000, 2000), (500, 10_000)]);
        let intact = SimConfig { mtu, delay_ns: delay_min_ns..delay_max_ns, ..SimConfig::default() };
        let faulty = SimConfig {
            loss: rng.pick(&[0.0, 0.01, 0.05]),
            duplicate: rng.pick(&[0.0, 0.05]),
            reorder: rng.pick(&[0.0, 0.1, 0.5]),
            ..intact.clone()
        };
        Plan {
            faulty,
            intact,
            mtu,
            pair_count: rng.pick(&[1, 2]),
            budget: rng.within(10..=60) as u32,
            bytes_max: rng.pick(&[64, 3000, 12_000]),
            page_counts: [rng.within(4..=8) as usize, rng.within(3..=8) as usize],
            lead: rng.within(0..=511) as usize * 8,
            churn: rng.pick(&[0.0, 0.05, 0.3, 0.8]),
            present: rng.pick(&[0.0, 0.5, 1.0]),
            signaled: rng.pick(&[0.1, 0.5, 1.0]),
            busy: rng.pick(&[0.0, 0.2]),
            lost_answer: rng.pick(&[0.0, 0.2]),
            overlap: rng.pick(&[0.0, 0.5, 0.9]),
            tick_ns_max: rng.pick(&[500, 3000, 20_000]),
            order: if rng.chance(0.2) { Order::Strict } else { Order::Default },
            post_count_max: rng.pick(&[2, 8, 64]),
            call_count_max: rng.pick(&[1, 4, 16]),
            inline_bytes_max: rng.pick(&[32, 1024]),
            call_bytes_max: rng.pick(&[1000, 4096, 1 << 20]),
            is_reverse_allowed: rng.chance(0.6),
            unchecked_count_max: rng.pick(&[1, 4, 32]),
            check_delay_ns: rng.pick(&[1000, 50_000]),
            version_age_ns: rng.pick(&[0, 20_000, 1_000_000_000]),
            slot_bytes: rng.pick(&[8, 64]),
            slot_count: rng.pick(&[1, 4]),
            is_two_sided: rng.chance(0.1),
        }
    }
}
