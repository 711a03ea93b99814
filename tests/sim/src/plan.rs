//! What a seed decides beforehand: the network, the devices, the connections and the programs on them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use terrace_fabric::sim::SimConfig;
use terrace_nic::QpType;

use crate::dice::{Dice, Stream};
use crate::paging::PagingPlan;

/// The guarantees that the programs get, and so what is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Temper {
    /// A perfect network, receives always in time: nothing is retransmitted.
    Calm,
    /// A bad network, late receives, but long retries: everything arrives.
    Rough,
    /// A bad network, short retries, programs that make mistakes: connections break, cleanly.
    Harsh,
}

/// The network's faults. Bad and good times alternate. In rough runs the retries last longer than a bad time, so a
/// request that fails in a bad time succeeds in the next good one.
#[derive(Clone, Debug)]
pub(crate) struct Weather {
    pub bad: SimConfig,
    pub good: SimConfig,
    /// Longest bad time in nanoseconds; `None`: it never ends.
    pub bad_ns_max: Option<u64>,
    /// Length of the good times in nanoseconds.
    pub good_ns: u64,
}

/// How a program waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiting {
    Polls,
    /// It polls only after an event.
    Events,
    /// It polls, and arms the queue for solicited completions only; an event must come for those and no others.
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
    /// Probability that the port takes only part of a batch.
    pub block: f64,
    /// For the completion queues of sends and of receives.
    pub waiting: [Waiting; 2],
    /// Shortest and longest interval between the program's ticks, in nanoseconds.
    pub tick_ns: (u64, u64),
    /// How its memory is paged, if it is.
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
    /// Send work requests that the program is going to post.
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
    pub receive_zeal: f64,
    /// Probability that a work request has a mistake in it.
    pub sabotage: f64,
    /// Drains of the send queue per epoch.
    pub drains: u32,
    /// Weights of the operations; see `draw.rs`.
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
    pub window: u32,
    pub signaled: f64,
    pub fenced: f64,
    pub inline: f64,
}

/// Everything about a run that is drawn before it starts.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub temper: Temper,
    pub weather: Weather,
    pub nodes: [NodePlan; 2],
    pub connections: Vec<ConnectionPlan>,
    /// How often the connections are established; the second time after a reset.
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
        let mut dice = Dice::new(seed, Stream::Plan);
        let dice = &mut dice;
        let temper = dice.pick(&[
            Temper::Calm,
            Temper::Rough,
            Temper::Rough,
            Temper::Rough,
            Temper::Rough,
            Temper::Harsh,
            Temper::Harsh,
        ]);
        let ipv6 = dice.chance(0.8);
        let mtu = dice.pick(&MTUS);
        // Two devices with one address are two processes of one host: the second gets another instance index.
        let same_host = dice.chance(0.2);
        let connection_count = dice.pick(&[1, 1, 2, 2, 3, 4, 6]);
        let mut plan = Plan {
            temper,
            weather: Weather::draw(dice, temper, ipv6, mtu),
            nodes: [1, 2]
                .map(|last| NodePlan::draw(dice, temper, address(ipv6, if same_host { 1 } else { last }))),
            connections: (0..connection_count).map(|_| ConnectionPlan::draw(dice, temper, mtu)).collect(),
            epochs: if dice.chance(0.15) { 2 } else { 1 },
        };
        for (node, index) in plan.nodes.iter_mut().zip(0..) {
            node.paging = PagingPlan::draw(seed, index, temper == Temper::Calm);
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

impl Weather {
    fn draw(dice: &mut Dice, temper: Temper, ipv6: bool, mtu: u32) -> Weather {
        let shortest = dice.spread(1..=20_000);
        let delay_ns = shortest..shortest + dice.spread(1..=100_000);
        let calm = SimConfig { delay_ns, mtu, ..SimConfig::default() };
        if temper == Temper::Calm {
            return Weather { bad: calm.clone(), good: calm, bad_ns_max: None, good_ns: 0 };
        }
        let mut fault =
            |often: f64| if dice.chance(often) { dice.spread(1..=300) as f64 / 1000.0 } else { 0.0 };
        // Reordered or duplicated packets still arrive, so these faults go on in good times.
        let good = SimConfig { duplicate: fault(0.6), reorder: fault(0.6), ecn_mark: fault(0.3), ..calm };
        let loss = fault(0.8);
        // With IPv4 half of the ICRC's bits are needed to find out the identification: see `terrace_wire::icrc`.
        let corrupt = if ipv6 { fault(0.5) } else { 0.0 };
        let bad = SimConfig { loss, corrupt, ..good.clone() };
        match temper {
            Temper::Harsh => Weather { bad, good, bad_ns_max: None, good_ns: 0 },
            _ => Weather {
                bad,
                good,
                bad_ns_max: Some(dice.spread(100_000..=TIMEOUT_FLOOR_NS * 9 / 10)),
                good_ns: TIMEOUT_NS_MAX * 3 / 2,
            },
        }
    }
}

impl NodePlan {
    fn draw(dice: &mut Dice, temper: Temper, address: IpAddr) -> NodePlan {
        let calm = temper == Temper::Calm;
        let waiting = |dice: &mut Dice| {
            dice.pick(&[Waiting::Polls, Waiting::Polls, Waiting::Events, Waiting::Solicited])
        };
        NodePlan {
            address,
            receive_buffer_bytes: dice.pick(&[8, 64, 256, 1024, 16 << 10]) << 10,
            lag_ns_max: dice.pick(&[0, 0, 1_000, 20_000, 300_000]),
            block: if !calm && dice.chance(0.3) { 0.2 } else { 0.0 },
            waiting: [waiting(dice), waiting(dice)],
            tick_ns: (dice.spread(100..=20_000), dice.spread(20_000..=500_000)),
            paging: None,
        }
    }
}

impl ConnectionPlan {
    fn draw(dice: &mut Dice, temper: Temper, mtu_limit: u32) -> ConnectionPlan {
        let kind = match dice.index(8) {
            0 => QpType::Uc,
            1 => QpType::Ud,
            _ => QpType::Rc,
        };
        let mtus: Vec<u32> = MTUS.into_iter().filter(|mtu| *mtu <= mtu_limit).collect();
        let mtu = if kind == QpType::Ud { mtu_limit } else { dice.pick(&mtus) };
        let depth_max = dice.pick(&[1, 4, 16, 32]);
        let mut ends = [(); 2].map(|()| EndPlan::draw(dice, temper, kind, mtu));
        // A requester must not have more READs and atomics in flight than the responder has resources for.
        for (end, peer) in [(0, 1), (1, 0)] {
            let asks = 1 + dice.within(0..=depth_max) as u8;
            ends[end].max_rd_atomic = asks;
            ends[peer].max_dest_rd_atomic = asks + dice.pick(&[0, 0, 1, 4]);
        }
        ConnectionPlan { kind, mtu, ends }
    }
}

impl EndPlan {
    fn draw(dice: &mut Dice, temper: Temper, kind: QpType, mtu: u32) -> EndPlan {
        let harsh = temper == Temper::Harsh;
        let longest = match kind {
            QpType::Ud => mtu as usize,
            _ => dice.pick(&[64, mtu as usize, 3 * mtu as usize, 8 << 10, 8 << 10, 40 << 10]),
        };
        let few = if longest > 8 << 10 { 15 } else { 100 };
        let psn = if dice.chance(0.3) { 0xff_ffff - dice.within(0..=40) } else { dice.within(0..=0xff_ffff) };
        EndPlan {
            budget: if dice.chance(0.15) { 0 } else { dice.within(1..=few) as u32 },
            message_bytes_max: longest,
            max_send_wr: dice.pick(&[1, 4, 16, 64]),
            max_recv_wr: dice.pick(&[1, 2, 8, 64]),
            max_sge: dice.pick(&[1, 2, 4, 8]),
            max_inline: dice.pick(&[0, 16, 64, 256]),
            sig_all: dice.chance(0.2),
            // Unreliable connections do not use shared receives: a broken message would keep one.
            uses_srq: kind != QpType::Uc && dice.chance(0.3),
            psn: psn as u32,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            timeout: dice.pick(&TIMEOUTS),
            retry_cnt: dice.within(if harsh { 0..=3 } else { 5..=7 }) as u8,
            rnr_retry: if harsh { dice.within(0..=4) as u8 } else { 7 },
            min_rnr_timer: dice.within(1..=18) as u8,
            receive_zeal: if temper == Temper::Calm { 1.0 } else { dice.pick(&[0.1, 0.5, 1.0]) },
            sabotage: if harsh && dice.chance(0.5) { 0.05 } else { 0.0 },
            drains: if dice.chance(0.2) { dice.within(1..=4) as u32 } else { 0 },
            mix: Mix::draw(dice),
        }
    }
}

impl Mix {
    fn draw(dice: &mut Dice) -> Mix {
        let mut weight = || dice.pick(&[0, 1, 1, 3, 8]);
        Mix {
            send: weight() + 1,
            write: weight(),
            read: weight(),
            atomic: weight(),
            flush: weight().min(1),
            window: weight().min(1),
            signaled: dice.pick(&[0.1, 0.5, 1.0]),
            fenced: dice.pick(&[0.0, 0.1, 0.5]),
            inline: dice.pick(&[0.0, 0.3, 0.9]),
        }
    }
}
