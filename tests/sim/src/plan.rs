//! The plan of a run, which the seed determines: the network, the devices, the connections and their programs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use terrace_fabric::sim::SimConfig;
use terrace_nic::QpType;

use crate::paging::PagingPlan;
use crate::rng::{SimRng, Stream};

/// The guarantees that the programs get, and that the run checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Profile {
    /// The network is perfect and receives are posted in time, so no packet is retransmitted.
    Perfect,
    /// The network has faults and receives are late, but retries are long, so every message arrives.
    Lossy,
    /// The network has faults, retries are short and programs post invalid requests, so connections fail.
    Failing,
}

/// The network's faults. Faulty and intact periods alternate. With `Profile::Lossy` the retries last longer than a
/// faulty period, so a request that fails in it succeeds in the next intact one.
#[derive(Clone, Debug)]
pub(crate) struct NetworkPlan {
    pub faulty: SimConfig,
    pub intact: SimConfig,
    /// Longest faulty period in nanoseconds; `None` if it never ends.
    pub faulty_ns_max: Option<u64>,
    /// Length of the intact periods in nanoseconds.
    pub intact_ns: u64,
}

/// The means by which a program waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    Polls,
    /// The program polls only after an event.
    Events,
    /// The program polls, and arms the queue for solicited completions. These must raise an event, and no others may.
    Solicited,
}

/// A node: its device and its program.
#[derive(Clone, Debug)]
pub(crate) struct NodePlan {
    pub address: IpAddr,
    /// Size of the receive buffer, which limits the queue pairs' windows.
    pub receive_buffer_bytes: usize,
    /// Longest delay of the device's steps, in nanoseconds.
    pub lag_ns_max: u64,
    /// Probability that the port accepts only a part of a batch.
    pub block: f64,
    /// The means of waiting for sends and for receives.
    pub waiting: [Waiting; 2],
    /// Shortest and longest interval between the program's ticks, in nanoseconds.
    pub tick_ns: (u64, u64),
    /// The parameters of its pagers; `None` if its memory is not paged.
    pub paging: Option<PagingPlan>,
}

/// A connection, or for UD a pair of queue pairs that send to each other.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionPlan {
    pub kind: QpType,
    pub mtu: u32,
    pub ends: [EndPlan; 2],
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub(crate) struct EndPlan {
    /// The number of send work requests that the program posts.
    pub budget: u32,
    /// Longest message in bytes.
    pub message_bytes_max: usize,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_sge: u32,
    pub max_inline: u32,
    pub sig_all: bool,
    pub uses_srq: bool,
    pub psn: u32,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    /// Probability, at each opportunity, that the program posts a receive.
    pub receive_probability: f64,
    /// Probability that a work request is invalid.
    pub mistake_probability: f64,
    /// The number of send queue drains per epoch.
    pub drains: u32,
    /// The weights of the operations (`draw.rs`).
    pub mix: Mix,
}

/// The weights of a program's operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mix {
    pub send: u32,
    pub write: u32,
    pub read: u32,
    pub atomic: u32,
    pub flush: u32,
    pub append: u32,
    pub window: u32,
    pub signaled: f64,
    pub fenced: f64,
    pub inline: f64,
}

/// The parameters of a run, which are drawn before it starts.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub profile: Profile,
    pub network: NetworkPlan,
    pub nodes: [NodePlan; 2],
    pub connections: Vec<ConnectionPlan>,
    /// The number of times that the connections are established, with a reset in between.
    pub epochs: u32,
}

const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];

/// The floor of the local ACK timeout, in nanoseconds. All timeouts in `TIMEOUTS` but the longest two are below it.
const TIMEOUT_FLOOR_NS: u64 = 8_000_000;

/// Exponents for the local ACK timeout: 8 ms (the floor) to 33 ms.
const TIMEOUTS: [u8; 6] = [1, 4, 8, 10, 12, 13];
const TIMEOUT_NS_MAX: u64 = 4096 << 13;

impl Plan {
    pub fn draw(seed: u64) -> Plan {
        let mut rng = SimRng::new(seed, Stream::Plan);
        let rng = &mut rng;
        let profile = rng.pick(&[
            Profile::Perfect,
            Profile::Lossy,
            Profile::Lossy,
            Profile::Lossy,
            Profile::Lossy,
            Profile::Failing,
            Profile::Failing,
        ]);
        let ipv6 = rng.chance(0.8);
        let mtu = rng.pick(&MTUS);
        // Two devices with one address are two processes of one host. The second gets another instance index.
        let same_host = rng.chance(0.2);
        let connection_count = rng.pick(&[1, 1, 2, 2, 3, 4, 6]);
        let mut plan = Plan {
            profile,
            network: NetworkPlan::draw(rng, profile, ipv6, mtu),
            nodes: [1, 2]
                .map(|last| NodePlan::draw(rng, profile, address(ipv6, if same_host { 1 } else { last }))),
            connections: (0..connection_count).map(|_| ConnectionPlan::draw(rng, profile, mtu)).collect(),
            epochs: if rng.chance(0.15) { 2 } else { 1 },
        };
        for (node, index) in plan.nodes.iter_mut().zip(0..) {
            node.paging = PagingPlan::draw(seed, index, profile == Profile::Perfect);
        }
        let mut appends = SimRng::new(seed, Stream::Appends);
        for end in plan.connections.iter_mut().flat_map(|connection| &mut connection.ends) {
            end.mix.append = appends.pick(&[0, 0, 1, 4]);
        }
        plan
    }
}

fn address(ipv6: bool, last: u8) -> IpAddr {
    match ipv6 {
        true => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into()).into(),
        false => Ipv4Addr::new(10, 0, 0, last).into(),
    }
}

impl NetworkPlan {
    fn draw(rng: &mut SimRng, profile: Profile, ipv6: bool, mtu: u32) -> NetworkPlan {
        let shortest = rng.spread(1..=20_000);
        let delay_ns = shortest..shortest + rng.spread(1..=100_000);
        let perfect = SimConfig { delay_ns, mtu, ..SimConfig::default() };
        if profile == Profile::Perfect {
            return NetworkPlan {
                faulty: perfect.clone(),
                intact: perfect,
                faulty_ns_max: None,
                intact_ns: 0,
            };
        }
        let mut fault =
            |often: f64| if rng.chance(often) { rng.spread(1..=300) as f64 / 1000.0 } else { 0.0 };
        // Reordered or duplicated packets still arrive, so these faults continue in intact periods.
        let intact =
            SimConfig { duplicate: fault(0.6), reorder: fault(0.6), ecn_mark: fault(0.3), ..perfect };
        let loss = fault(0.8);
        // With IPv4 half of the ICRC's bits serve to determine the identification (`terrace_wire::icrc`).
        let corrupt = if ipv6 { fault(0.5) } else { 0.0 };
        let faulty = SimConfig { loss, corrupt, ..intact.clone() };
        match profile {
            Profile::Failing => NetworkPlan { faulty, intact, faulty_ns_max: None, intact_ns: 0 },
            _ => NetworkPlan {
                faulty,
                intact,
                faulty_ns_max: Some(rng.spread(100_000..=TIMEOUT_FLOOR_NS * 9 / 10)),
                intact_ns: TIMEOUT_NS_MAX * 3 / 2,
            },
        }
    }
}

impl NodePlan {
    fn draw(rng: &mut SimRng, profile: Profile, address: IpAddr) -> NodePlan {
        let perfect = profile == Profile::Perfect;
        let waiting = |rng: &mut SimRng| {
            rng.pick(&[Waiting::Polls, Waiting::Polls, Waiting::Events, Waiting::Solicited])
        };
        NodePlan {
            address,
            receive_buffer_bytes: rng.pick(&[8, 64, 256, 1024, 16 << 10]) << 10,
            lag_ns_max: rng.pick(&[0, 0, 1_000, 20_000, 300_000]),
            block: if !perfect && rng.chance(0.3) { 0.2 } else { 0.0 },
            waiting: [waiting(rng), waiting(rng)],
            tick_ns: (rng.spread(100..=20_000), rng.spread(20_000..=500_000)),
            paging: None,
        }
    }
}

impl ConnectionPlan {
    fn draw(rng: &mut SimRng, profile: Profile, mtu_limit: u32) -> ConnectionPlan {
        let kind = match rng.index(8) {
            0 => QpType::Uc,
            1 => QpType::Ud,
            _ => QpType::Rc,
        };
        let mtus: Vec<u32> = MTUS.into_iter().filter(|mtu| *mtu <= mtu_limit).collect();
        let mtu = if kind == QpType::Ud { mtu_limit } else { rng.pick(&mtus) };
        let depth_max = rng.pick(&[1, 4, 16, 32]);
        let mut ends = [(); 2].map(|()| EndPlan::draw(rng, profile, kind, mtu));
        // A requester must not have more READs and atomics in flight than the responder has resources for.
        for (end, peer) in [(0, 1), (1, 0)] {
            let limit = 1 + rng.within(0..=depth_max) as u8;
            ends[end].max_rd_atomic = limit;
            ends[peer].max_dest_rd_atomic = limit + rng.pick(&[0, 0, 1, 4]);
        }
        ConnectionPlan { kind, mtu, ends }
    }
}

impl EndPlan {
    fn draw(rng: &mut SimRng, profile: Profile, kind: QpType, mtu: u32) -> EndPlan {
        let failing = profile == Profile::Failing;
        let longest = match kind {
            QpType::Ud => mtu as usize,
            _ => rng.pick(&[64, mtu as usize, 3 * mtu as usize, 8 << 10, 8 << 10, 40 << 10]),
        };
        let few = if longest > 8 << 10 { 15 } else { 100 };
        let psn = if rng.chance(0.3) { 0xff_ffff - rng.within(0..=40) } else { rng.within(0..=0xff_ffff) };
        EndPlan {
            budget: if rng.chance(0.15) { 0 } else { rng.within(1..=few) as u32 },
            message_bytes_max: longest,
            max_send_wr: rng.pick(&[1, 4, 16, 64]),
            max_recv_wr: rng.pick(&[1, 2, 8, 64]),
            max_sge: rng.pick(&[1, 2, 4, 8]),
            max_inline: rng.pick(&[0, 16, 64, 256]),
            sig_all: rng.chance(0.2),
            // Unreliable connections do not use shared receives, because an incomplete message would keep one.
            uses_srq: kind != QpType::Uc && rng.chance(0.3),
            psn: psn as u32,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            timeout: rng.pick(&TIMEOUTS),
            retry_cnt: rng.within(if failing { 0..=3 } else { 5..=7 }) as u8,
            rnr_retry: if failing { rng.within(0..=4) as u8 } else { 7 },
            min_rnr_timer: rng.within(1..=18) as u8,
            receive_probability: if profile == Profile::Perfect { 1.0 } else { rng.pick(&[0.1, 0.5, 1.0]) },
            mistake_probability: if failing && rng.chance(0.5) { 0.05 } else { 0.0 },
            drains: if rng.chance(0.2) { rng.within(1..=4) as u32 } else { 0 },
            mix: Mix::draw(rng),
        }
    }
}

impl Mix {
    fn draw(rng: &mut SimRng) -> Mix {
        let mut weight = || rng.pick(&[0, 1, 1, 3, 8]);
        Mix {
            send: weight() + 1,
            write: weight(),
            read: weight(),
            atomic: weight(),
            flush: weight().min(1),
            append: 0,
            window: weight().min(1),
            signaled: rng.pick(&[0.1, 0.5, 1.0]),
            fenced: rng.pick(&[0.0, 0.1, 0.5]),
            inline: rng.pick(&[0.0, 0.3, 0.9]),
        }
    }
}
