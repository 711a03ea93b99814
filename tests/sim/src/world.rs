//! The state of a run: network, nodes, connections, model.

use std::collections::BTreeSet;
use std::sync::Arc;

use terrace_fabric::sim::SimNet;
use terrace_nic::{Error, ManualClock, QpAttr, QpAttrMask, QpCap, QpInit, QpState, QpType, Time, WcStatus};

use crate::end::{End, Phase};
use crate::memory::{FLUSH, Purpose, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, Span};
use crate::node::{Node, SRQ_SGES};
use crate::plan::{ConnectionPlan, EndPlan, Plan, Profile};
use crate::rng::{SimRng, Stream, stream_seed};
use crate::tally::Tally;
use crate::window::Window;

/// The failure of a run.
#[derive(Debug)]
pub struct Failure(pub String);

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure(format!("a verb failed: {error}"))
    }
}

pub(crate) type Checked<T = ()> = Result<T, Failure>;

/// Fails the run unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $($reason:tt)+) => {
        if !$holds {
            return Err($crate::world::Failure(format!($($reason)+)));
        }
    };
}
pub(crate) use ensure;

/// Counters that every connection adds to, on each node.
pub(crate) const COUNTERS: usize = 2;

/// Largest summand of a shared counter, which must never wrap.
pub(crate) const ADD_MAX: u64 = 1 << 32;

/// Bytes beyond the longest message in an end's target memory at its peer.
const TARGET_SLACK_BYTES: usize = 4096;

/// A counter in a node's memory that all connections add to.
pub(crate) struct Counter {
    pub span: Span,
    pub start: u64,
    /// Pairs of a returned value and the summand added to it.
    pub returned: Vec<(u64, u64)>,
    /// Whether a failed addition may have been executed.
    pub unclear: bool,
}

pub(crate) struct World {
    pub plan: Plan,
    pub net: SimNet,
    pub clock: Arc<ManualClock>,
    pub nodes: [Node; 2],
    /// The ends of the connections, two for each. The first of a pair is on node 0.
    pub ends: Vec<End>,
    pub windows: Vec<Window>,
    pub counters: [Vec<Counter>; 2],
    pub rng: SimRng,
    pub epoch: u32,
    pub next_wr_id: u64,
    /// The time when the network's faults change, in nanoseconds.
    pub network_changes_at: Option<u64>,
    pub network_is_faulty: bool,
    /// Queue pairs whose send queue has drained, by node and number.
    pub drained: BTreeSet<(usize, u32)>,
    /// Whether the run moves the queue pairs to the error state.
    pub closing: bool,
    pub tally: Tally,
    pub trace: bool,
}

/// Prints a line of the trace, if tracing is on.
macro_rules! trace {
    ($world:expr, $($line:tt)+) => {
        if $world.trace {
            println!("{:>12} {}", $world.net.now(), format_args!($($line)+));
        }
    };
}
pub(crate) use trace;

impl World {
    pub fn new(seed: u64, trace: bool) -> Checked<World> {
        let plan = Plan::draw(seed);
        let net = SimNet::new(stream_seed(seed, Stream::Network), plan.network.faulty.clone());
        let clock = Arc::new(ManualClock::new());
        let mut nodes = [
            Node::open(&plan, seed, 0, &net, &clock, trace)?,
            Node::open(&plan, seed, 1, &net, &clock, trace)?,
        ];
        let mut counters = [Vec::new(), Vec::new()];
        for (node, counters) in nodes.iter_mut().zip(&mut counters) {
            for index in 0..COUNTERS {
                let span = node.memory.take(Purpose::Open, 8, true)?;
                let start = 1000 * (index as u64 + 1);
                node.memory.store(span, &start.to_ne_bytes());
                counters.push(Counter { span, start, returned: Vec::new(), unclear: false });
            }
        }
        let mut world = World {
            net,
            clock,
            nodes,
            ends: Vec::new(),
            windows: Vec::new(),
            counters,
            rng: SimRng::new(seed, Stream::Program),
            epoch: 0,
            next_wr_id: 0,
            network_changes_at: None,
            network_is_faulty: true,
            drained: BTreeSet::new(),
            closing: false,
            tally: Tally::default(),
            trace,
            plan,
        };
        for connection in world.plan.connections.clone() {
            world.make_connection(&connection)?;
        }
        Ok(world)
    }

    pub fn now(&self) -> u64 {
        self.net.now()
    }

    pub fn time(&self) -> Time {
        Time(self.now())
    }

    pub fn is_perfect(&self) -> bool {
        self.plan.profile == Profile::Perfect
    }

    pub fn is_failing(&self) -> bool {
        self.plan.profile == Profile::Failing
    }

    fn make_connection(&mut self, connection: &ConnectionPlan) -> Checked {
        for index in 0..2 {
            let plan = connection.ends[index].clone();
            let peer_longest = connection.ends[1 - index].message_bytes_max;
            let qp = self.nodes[index].pd.create_qp(qp_init(&self.nodes[index], connection.kind, &plan))?;
            let target_len = (plan.message_bytes_max + TARGET_SLACK_BYTES).next_multiple_of(8);
            let target = self.nodes[1 - index].memory.take(Purpose::Open, target_len, true)?;
            let av = self.nodes[1 - index].address_vector();
            let ah = match connection.kind {
                QpType::Ud => Some(self.nodes[index].pd.create_ah(&av)?),
                _ => None,
            };
            trace!(self, "end {} is QP {:#x}, longest inbound {peer_longest}", self.ends.len(), qp.qpn());
            self.ends.push(End {
                kind: connection.kind,
                mtu: connection.mtu as usize,
                qp,
                ah,
                qkey: 0x1234,
                target,
                uncertain: Vec::new(),
                connected: false,
                phase: Phase::Running,
                drains: 0,
                broken: None,
                send_failed: false,
                broke: false,
                budget: plan.budget,
                drafts: Default::default(),
                posted: Default::default(),
                steps: Vec::new(),
                succeeded: 0,
                fences: 0,
                last_read: Vec::new(),
                receives: Default::default(),
                inbound: Default::default(),
                received: 0,
                receives_failed: 0,
                plan,
            });
        }
        if connection.kind == QpType::Rc {
            self.make_windows()?;
        }
        Ok(())
    }

    /// Moves a queue pair from RESET to RTS.
    pub fn connect(&mut self, index: usize) -> Checked {
        let (end, peer) = (&self.ends[index], &self.ends[index ^ 1]);
        let node = &self.nodes[index & 1];
        let access = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC | FLUSH;
        // Packets of the first epoch must not be accepted in the second, so that has other PSNs, which replace the
        // waiting time of the specification.
        let psn = |plan: &EndPlan| plan.psn.wrapping_add(self.epoch * 0x3_4567) & 0xff_ffff;
        let mut attr =
            QpAttr { state: QpState::Init, port_num: 1, access, qkey: end.qkey, ..QpAttr::default() };
        let identity = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
        let connected = end.kind != QpType::Ud;
        let grant = if connected { QpAttrMask::ACCESS_FLAGS } else { QpAttrMask::QKEY };
        end.qp.modify(&attr, identity | grant)?;

        attr.state = QpState::Rtr;
        attr.path = Some(node.device.resolve(&self.nodes[1 - (index & 1)].address_vector(), peer.qp.qpn())?);
        attr.dest_qpn = peer.qp.qpn();
        attr.path_mtu = end.mtu as u32;
        attr.rq_psn = psn(&peer.plan);
        attr.max_dest_rd_atomic = end.plan.max_dest_rd_atomic;
        attr.min_rnr_timer = end.plan.min_rnr_timer;
        let path = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
        let responder = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
        let mask = match end.kind {
            QpType::Rc | QpType::XrcRecv => path | responder,
            QpType::Uc | QpType::XrcSend => path,
            QpType::Ud => QpAttrMask::empty(),
        };
        end.qp.modify(&attr, QpAttrMask::STATE | mask)?;

        attr.state = QpState::Rts;
        attr.sq_psn = psn(&end.plan);
        attr.timeout = end.plan.timeout;
        attr.retry_cnt = end.plan.retry_cnt;
        attr.rnr_retry = end.plan.rnr_retry;
        attr.max_rd_atomic = end.plan.max_rd_atomic;
        let requester = QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::MAX_QP_RD_ATOMIC;
        let mask = if end.is_reliable() { requester } else { QpAttrMask::empty() };
        end.qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::SQ_PSN | mask)?;
        self.ends[index].connected = true;
        trace!(self, "end {index} is connected");
        Ok(())
    }

    /// Changes only the state.
    pub fn modify_state(&self, index: usize, state: QpState) -> Checked {
        let attr = QpAttr { state, en_sqd_async_notify: true, ..QpAttr::default() };
        let notify =
            if state == QpState::Sqd { QpAttrMask::EN_SQD_ASYNC_NOTIFY } else { QpAttrMask::empty() };
        Ok(self.ends[index].qp.modify(&attr, QpAttrMask::STATE | notify)?)
    }

    /// Returns the indexes of the ends on a node.
    pub fn ends_of(&self, node: usize) -> impl Iterator<Item = usize> + use<> {
        (node..self.ends.len()).step_by(2)
    }

    /// Records that the program has seen the end of a connection.
    pub fn note_broken(&mut self, index: usize, status: WcStatus) -> Checked {
        if self.ends[index].broken.is_some() {
            return Ok(());
        }
        trace!(self, "end {index} has failed: {status:?}");
        ensure!(
            self.closing || self.is_failing(),
            "end {index}: the connection failed unexpectedly with {status:?}"
        );
        self.ends[index].broken = Some(status);
        self.ends[index].drafts.clear();
        self.mark_windows_unknown(index);
        Ok(())
    }

    /// Returns the length of the longest message that this end may receive.
    pub fn receive_bytes(&self, index: usize) -> usize {
        const GRH_BYTES: usize = 40;
        let peer = &self.ends[index ^ 1];
        peer.plan.message_bytes_max + if peer.kind == QpType::Ud { GRH_BYTES } else { 0 }
    }
}

fn qp_init(node: &Node, kind: QpType, plan: &EndPlan) -> QpInit {
    QpInit {
        qp_type: kind,
        send_cq: node.completions[0].cq.clone(),
        recv_cq: node.completions[1].cq.clone(),
        srq: plan.uses_srq.then(|| node.shared.srq.clone()),
        cap: QpCap {
            max_send_wr: plan.max_send_wr,
            max_recv_wr: plan.max_recv_wr,
            max_send_sge: plan.max_sge,
            max_recv_sge: plan.max_sge.max(SRQ_SGES),
            max_inline_data: plan.max_inline,
        },
        sq_sig_all: plan.sig_all,
        blocks_own_multicast: false,
        raises_events: true,
        cookie: 0,
    }
}
