//! Answers about a connection's route, and the attributes for its queue pair.

use std::net::SocketAddr;

use terrace_cm::Agreed;
use terrace_nic::Device;
use terrace_wire::Path;
use terrace_wire::cm::service_id;

use super::abi::{Answer, gid_of};
use super::id::{Id, Stage};
use super::resolve::HOP_LIMIT;
use crate::abi::*;
use crate::errno::{EINVAL, Result};
use crate::object;
use crate::query::PKEY;

/// The device's only port.
const PORT_NUM: u8 = 1;

/// `RDMA_UDP_QKEY`: the Q_Key of UD queue pairs, unless their program sets another one.
pub const DEFAULT_QKEY: u32 = 0x0123_4567;

/// Code of the ACK timeout that REQs contain: 268 ms, as in the kernel's cma for RoCE.
pub const ACK_TIMEOUT: u8 = 16;

/// `AF_IB` of `linux/socket.h`.
const AF_IB: u16 = 27;

/// Code of a path MTU.
pub fn mtu_code(bytes: u32) -> u8 {
    (bytes / 256).checked_ilog2().map_or(1, |log| (log + 1).min(5) as u8)
}

/// `struct rdma_ucm_query_route_resp`.
pub fn route(id: &Id, device: Option<(&Device, u64)>) -> Answer<208> {
    let mut answer = Answer::new();
    let [local, peer] =
        [id.local, id.peer].map(|address| address.map_or([0; 16], |address| gid_of(address.ip())));
    answer.put(8, &peer).put(24, &own_gid(id, device).unwrap_or(local));
    answer.put(8 + 52, &PKEY.to_be_bytes());
    if let Some((device, guid)) = device
        && id.source.is_some()
    {
        answer.put(0, &guid.to_be_bytes()).put(196, &[PORT_NUM]);
        if id.stage >= Stage::RouteResolved && id.stage != Stage::Listening {
            answer.put_u32(192, 1);
            path_record(&mut answer, 8, id, device);
        }
    }
    answer.put_address(136, id.local);
    answer.put_address(164, id.peer);
    answer
}

fn own_gid(id: &Id, device: Option<(&Device, u64)>) -> Option<[u8; 16]> {
    let (device, _) = device?;
    device.gids().get(usize::from(id.source?.gid_index)).map(|gid| gid.raw)
}

/// `EXACTLY`, of the selectors of path records.
const EXACTLY: u8 = 2;
/// Code of the port's nominal rate: 100 Gb/s.
const RATE: u8 = 16;

/// `struct ib_user_path_rec`, behind its GIDs.
fn path_record(answer: &mut Answer<208>, at: usize, id: &Id, device: &Device) {
    const REVERSIBLE: u32 = 1;
    let mtu = mtu_code(device.port_attributes().active_mtu);
    answer.put_u32(at + 44, REVERSIBLE).put_u32(at + 48, mtu.into());
    let lifetime = id.ack_timeout.unwrap_or(ACK_TIMEOUT).saturating_sub(1);
    answer.put(at + 54, &[HOP_LIMIT, id.traffic_class, 1, 0, EXACTLY, EXACTLY, RATE, EXACTLY, lifetime, 0]);
}

/// `struct rdma_ucm_query_addr_resp`, with IP addresses or with GIDs.
pub fn addresses(id: &Id, device: Option<(&Device, u64)>, as_gids: bool) -> Answer<280> {
    let mut answer = Answer::new();
    if let (Some((_, guid)), Some(_)) = (device, id.source) {
        answer.put(0, &guid.to_be_bytes()).put(8, &[PORT_NUM]).put(10, &PKEY.to_be_bytes());
    }
    for (size_at, at, address) in [(12, 16, id.local), (14, 144, id.peer)] {
        let size = match (address, as_gids) {
            (address, false) => answer.put_address(at, address),
            (address, true) => put_gid(&mut answer, at, id, address),
        };
        answer.put_u16(size_at, size);
    }
    answer
}

/// `struct sockaddr_ib`: family, partition, flow, address, service with its mask, scope.
fn put_gid(answer: &mut Answer<280>, at: usize, id: &Id, address: Option<SocketAddr>) -> u16 {
    let port = address.map_or(0, |address| address.port());
    answer.put_u16(at, AF_IB).put(at + 2, &PKEY.to_be_bytes());
    answer.put(at + 8, &address.map_or([0; 16], |address| gid_of(address.ip())));
    answer.put(at + 24, &service_id(id.space, port).to_be_bytes());
    48
}

/// `struct rdma_ucm_query_path_resp` with one record, in wire format (`struct ibv_path_record`).
pub fn path(id: &Id, device: &Device) -> Answer<80> {
    const GMP_PRIMARY_AND_BIDIRECTIONAL: u32 = 1 | 2 | 8 | 32;
    const REVERSIBLE_ONE_PATH: u8 = 0x81;
    let mut answer = Answer::new();
    if id.stage < Stage::RouteResolved || id.stage == Stage::Listening {
        return answer;
    }
    let [local, peer] =
        [id.local, id.peer].map(|address| address.map_or([0; 16], |address| gid_of(address.ip())));
    let mtu = mtu_code(device.port_attributes().active_mtu);
    let lifetime = id.ack_timeout.unwrap_or(ACK_TIMEOUT).saturating_sub(1);
    answer.put_u32(0, 1).put_u32(8, GMP_PRIMARY_AND_BIDIRECTIONAL);
    answer.put(16 + 8, &peer).put(16 + 24, &local).put(16 + 44, &u32::from(HOP_LIMIT).to_be_bytes());
    answer.put(16 + 48, &[id.traffic_class, REVERSIBLE_ONE_PATH]).put(16 + 50, &PKEY.to_be_bytes());
    answer.put(16 + 54, &[EXACTLY << 6 | mtu, EXACTLY << 6 | RATE, EXACTLY << 6 | lifetime]);
    answer
}

/// `struct ib_uverbs_qp_attr` for a queue pair's transition to a state, with the mask of valid attributes.
///
/// # Errors
/// EINVAL for a state without attributes, or before the attributes are known.
pub fn queue_pair(id: &Id, agreed: Option<(Agreed, Path)>, state: ibv_qp_state) -> Result<ib_uverbs_qp_attr> {
    // SAFETY: integers and arrays of them.
    let mut attr: ib_uverbs_qp_attr = unsafe { object::zeroed() };
    attr.qp_state = state;
    match (state, agreed) {
        (IBV_QPS_INIT, agreed) => initialised(id, agreed, &mut attr),
        (IBV_QPS_RTR, Some((agreed, path))) if !id.is_ud() => ready_to_receive(id, &agreed, &path, &mut attr),
        (IBV_QPS_RTS, Some((agreed, _))) if !id.is_ud() => ready_to_send(id, &agreed, &mut attr),
        _ => return Err(EINVAL),
    }
    Ok(attr)
}

fn initialised(id: &Id, agreed: Option<(Agreed, Path)>, attr: &mut ib_uverbs_qp_attr) {
    attr.qp_attr_mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    attr.port_num = PORT_NUM;
    if id.is_ud() {
        attr.qp_attr_mask |= IBV_QP_QKEY;
        attr.qkey = if id.qkey == 0 { DEFAULT_QKEY } else { id.qkey };
        return;
    }
    attr.qp_attr_mask |= IBV_QP_ACCESS_FLAGS;
    // Without a connection, peers have no access.
    if let Some((agreed, _)) = agreed {
        attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
        if agreed.responder_resources > 0 {
            attr.qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        }
    }
}

fn ready_to_receive(id: &Id, agreed: &Agreed, path: &Path, attr: &mut ib_uverbs_qp_attr) {
    attr.qp_attr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = PORT_NUM;
    attr.ah_attr.grh.dgid = gid_of(path.remote.ip().to_canonical());
    attr.ah_attr.grh.sgid_index = path.source_gid_index;
    attr.ah_attr.grh.hop_limit = HOP_LIMIT;
    attr.ah_attr.grh.traffic_class = agreed.traffic_class;
    attr.ah_attr.grh.flow_label = agreed.flow_label;
    attr.path_mtu = agreed.path_mtu.into();
    attr.dest_qp_num = agreed.remote_qpn;
    attr.rq_psn = agreed.rq_psn;
    if matches!(id.qp_type, IBV_QPT_RC | IBV_QPT_XRC_RECV) {
        attr.qp_attr_mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        attr.max_dest_rd_atomic = agreed.responder_resources;
        // 655 ms, as in the kernel: programs rely on the long duration of a few retries.
        attr.min_rnr_timer = 0;
    }
}

fn ready_to_send(id: &Id, agreed: &Agreed, attr: &mut ib_uverbs_qp_attr) {
    attr.qp_attr_mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    attr.sq_psn = agreed.sq_psn;
    if matches!(id.qp_type, IBV_QPT_RC | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV) {
        attr.qp_attr_mask |= IBV_QP_TIMEOUT;
        attr.timeout = id.ack_timeout.unwrap_or(agreed.ack_timeout);
    }
    if matches!(id.qp_type, IBV_QPT_RC | IBV_QPT_XRC_SEND) {
        attr.qp_attr_mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        attr.retry_cnt = agreed.retry_count;
        attr.rnr_retry = agreed.rnr_retry_count;
        attr.max_rd_atomic = agreed.initiator_depth;
    }
}
