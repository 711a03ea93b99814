//! Two commodity NICs with their memory, and connected queue pairs.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use terrace_access::layout::Layout;
use terrace_access::proto::{Mode, RegionDescription};
use terrace_access::region::{Knowledge, Region};
use terrace_access::signature::SignaturePage;
use terrace_fabric::sim::SimNet;
use terrace_nic::{
    AddressVector, Cq, CqInit, Device, DeviceConfig, Error, ManualClock, Mr, MrRequest, NicModel, Paging, Pd,
    QpAttr, QpAttrMask, QpCap, QpInit, QpState, QpType, QueuePair, RegionPolicy,
};

use super::pages::{Holds, PAGE, Pages};
use super::plan::Plan;
use super::side::{LENT, LOCAL, RECEIVED, REMOTE, SCRATCH, Slots, VERSIONS};
use crate::rng::{SimRng, Stream, stream_seed};

/// `ibv_access_flags` for all local and remote accesses.
const ALL: u32 = 1 | 1 << 1 | 1 << 2 | 1 << 3;

/// Bytes of a receive buffer, and of the longest SEND.
pub(super) const RECEIVE_BYTES: usize = 4096;
/// Entries of a completion queue.
pub(super) const CQ_DEPTH: usize = 1 << 12;
/// Receive buffers of each pair.
pub(super) const RECEIVE_COUNT: usize = 4;

/// A node: a device and its completion queues.
pub(super) struct Node {
    pub device: Arc<Device>,
    pub pd: Arc<Pd>,
    pub cq: Arc<Cq>,
    /// Of the control queue pairs.
    pub control_cq: Arc<Cq>,
}

impl Node {
    pub fn open(seed: u64, index: u8, net: &SimNet, clock: &Arc<ManualClock>) -> Result<Node, Error> {
        let port = Box::new(net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + index))));
        let seed = stream_seed(seed, Stream::Device(index));
        let config =
            DeviceConfig { model: NicModel::Commodity, ..DeviceConfig::simulated(port, clock.clone(), seed) };
        let device = Device::open(config)?;
        let pd = device.alloc_pd()?;
        let new_cq = || device.create_cq(CqInit { depth: CQ_DEPTH as u32, channel: None, cookie: 0 });
        let (cq, control_cq) = (new_cq()?, new_cq()?);
        Ok(Node { device, pd, cq, control_cq })
    }

    fn register(
        &self,
        addr: u64,
        length: usize,
        iova: u64,
        access: u32,
        paging: Option<Paging>,
    ) -> Result<Arc<Mr>, Error> {
        self.pd.reg_mr(MrRequest { addr, length: length as u64, iova, access, paging })
    }
}

/// The memory of both nodes.
pub(super) struct Memory {
    pub local: Holds,
    pub local_key: u32,
    pub remote: Holds,
    pub remote_key: u32,
    pub versions_key: u32,
    pub scratch: Arc<[AtomicU64]>,
    pub scratch_key: u32,
    pub lent: Slots,
    pub received: Arc<[AtomicU64]>,
    pub received_key: u32,
    /// What the target describes of its region.
    pub known: Knowledge,
    _regions: Vec<Arc<Mr>>,
}

fn zeros(bytes: usize) -> Arc<[AtomicU64]> {
    (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect()
}

impl Memory {
    /// Memory with random content, of which some pages are present.
    pub fn new(plan: &Plan, nodes: &[Node; 2], rng: &mut SimRng) -> Result<Memory, Error> {
        let [local, remote] = plan.page_counts.map(|count| {
            let pages = Pages::new(&rng.bytes(count * PAGE));
            (0..count).filter(|_| rng.chance(plan.present)).for_each(|page| pages.admit(page));
            Arc::new(pages)
        });
        let signature_key: [u8; 32] = rng.bytes(32).try_into().expect("32 bytes");
        let length = remote.page_count() * PAGE - plan.lead;
        let paging = Paging {
            pager: remote.clone(),
            pattern: SignaturePage::derive(&signature_key).shared(),
            policy: RegionPolicy::Wait,
        };
        let [a, b] = nodes;
        let remote_mr = b.register(remote.addr() + plan.lead as u64, length, REMOTE, ALL, Some(paging))?;
        let versions = &remote.versions;
        let versions_mr = b.register(versions.as_ptr() as u64, versions.len() * 4, VERSIONS, ALL, None)?;
        let received = zeros(plan.pair_count * RECEIVE_COUNT * RECEIVE_BYTES);
        let received_mr = b.register(received.as_ptr() as u64, received.len() * 8, RECEIVED, ALL, None)?;
        let local_mr = a.register(local.addr(), local.page_count() * PAGE, LOCAL, ALL, None)?;
        let scratch = zeros(plan.pair_count * (plan.slot_bytes * plan.slot_count) as usize);
        let scratch_mr = a.register(scratch.as_ptr() as u64, scratch.len() * 8, SCRATCH, ALL, None)?;
        let slot_bytes = plan.lent_bytes();
        let lent_cells = zeros(plan.pair_count * plan.call_count_max as usize * slot_bytes);
        let lent_mr = a.register(lent_cells.as_ptr() as u64, lent_cells.len() * 8, LENT, ALL, None)?;
        let lent =
            Slots { cells: lent_cells, key: lent_mr.rkey(), slot_bytes, count: plan.call_count_max.into() };
        let layout =
            Layout::new(REMOTE, length as u64, plan.lead as u64, PAGE as u32).expect("a valid layout");
        let description = RegionDescription { layout, signature_key, region_id: 9, mode: Mode::OneSided };
        Ok(Memory {
            local: Holds::new(local),
            local_key: local_mr.lkey(),
            remote: Holds::new(remote),
            remote_key: remote_mr.rkey(),
            versions_key: versions_mr.rkey(),
            scratch,
            scratch_key: scratch_mr.lkey(),
            lent,
            received,
            received_key: received_mr.lkey(),
            known: Knowledge::Extended(Arc::new(Region::new(remote_mr.rkey(), description))),
            _regions: vec![remote_mr, versions_mr, received_mr, local_mr, scratch_mr, lent_mr],
        })
    }
}

/// A queue pair on each node, connected to each other.
pub(super) fn connect(
    plan: &Plan,
    nodes: &[Node; 2],
    cq_of: fn(&Node) -> &Arc<Cq>,
) -> Result<[Arc<QueuePair>; 2], Error> {
    let make = |node: &Node| {
        node.pd.create_qp(QpInit {
            qp_type: QpType::Rc,
            send_cq: cq_of(node).clone(),
            recv_cq: cq_of(node).clone(),
            srq: None,
            cap: QpCap {
                max_send_wr: 256,
                max_recv_wr: 32,
                max_send_sge: 2,
                max_recv_sge: 1,
                max_inline_data: 64,
            },
            sq_sig_all: false,
            blocks_own_multicast: false,
            raises_events: true,
            cookie: 0,
        })
    };
    let qps = [make(&nodes[0])?, make(&nodes[1])?];
    for index in 0..2 {
        let (qp, peer_qpn) = (&qps[index], qps[1 - index].qpn());
        let mut attr = QpAttr { state: QpState::Init, port_num: 1, access: ALL, ..QpAttr::default() };
        let init = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
        qp.modify(&attr, init)?;
        let to = AddressVector {
            is_global: true,
            dgid: nodes[1 - index].device.gids()[0].raw,
            port_num: 1,
            hop_limit: 64,
            ..AddressVector::default()
        };
        attr.state = QpState::Rtr;
        attr.path = Some(nodes[index].device.resolve(&to, peer_qpn)?);
        attr.dest_qpn = peer_qpn;
        attr.path_mtu = plan.mtu;
        attr.rq_psn = 0x1000 * (2 - index as u32);
        attr.max_dest_rd_atomic = 16;
        attr.min_rnr_timer = 5;
        let path = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
        let responder = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
        qp.modify(&attr, QpAttrMask::STATE | path | responder)?;
        attr.state = QpState::Rts;
        attr.sq_psn = 0x1000 * (1 + index as u32);
        attr.timeout = 8;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        attr.max_rd_atomic = 16;
        let requester = QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::MAX_QP_RD_ATOMIC;
        qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::SQ_PSN | requester)?;
    }
    Ok(qps)
}
