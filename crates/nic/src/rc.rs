//! Queue pairs of reliable connections whose ends know each other's [`Endpoint`]: from creation to RTS.

use std::net::IpAddr;
use std::sync::Arc;

use terrace_fabric::Gid;
use terrace_transport::{Endpoint, QpAttr, QpAttrMask, QpCap, QpState, QpType, RETRY_CNT_INFINITE};
use terrace_wire::Path;

use crate::address::AddressVector;
use crate::cq::Cq;
use crate::device::{Device, Pd};
use crate::error::Error;
use crate::qp::{QpInit, QueuePair};

/// The most READs of each end in flight.
pub const READ_COUNT: u8 = 64;
/// The exponent of the local ACK timeout: 67 ms.
pub const TIMEOUT: u8 = 14;
/// The most retries that the verbs allow. For RNR retries 7 means no limit.
const RETRIES: u8 = 7;
/// RNR retries without limit, for peers that are trusted to post receives.
pub const RNR_RETRIES: u8 = 7;
/// The index into the RNR timer table: 0.01 ms.
const MIN_RNR_TIMER: u8 = 1;

/// The endpoint of a queue pair, with a random PSN.
pub fn endpoint_of(qp: &QueuePair) -> Endpoint {
    let mtu_bytes = qp.pd().device().port_attributes().active_mtu as u16;
    Endpoint { qpn: qp.qpn(), psn: rand::random::<u32>() & 0xff_ffff, mtu_bytes }
}

/// Creates a queue pair for a reliable connection, in RESET, and chooses the parameters for its peer. It raises no
/// asynchronous events: its owner learns from completions what becomes of it.
///
/// # Errors
/// As [`Pd::create_qp`].
pub fn new_pair(pd: &Arc<Pd>, cq: &Arc<Cq>, cap: QpCap) -> Result<(Arc<QueuePair>, Endpoint), Error> {
    let qp = pd.create_qp(QpInit {
        qp_type: QpType::Rc,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        cap,
        sq_sig_all: false,
        blocks_own_multicast: false,
        raises_events: false,
        cookie: 0,
    })?;
    let endpoint = endpoint_of(&qp);
    Ok((qp, endpoint))
}

/// Moves a queue pair to INIT, with `ibv_access_flags` for the peer.
///
/// # Errors
/// As [`QueuePair::modify`].
pub fn initialize(qp: &Arc<QueuePair>, access: u32) -> Result<(), Error> {
    let attr = QpAttr { state: QpState::Init, port_num: 1, access, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    qp.modify(&attr, mask)
}

/// Moves a queue pair from INIT to RTS, connected to a peer's. The path MTU is the smaller of the two. With [`TIMEOUT`], it fails
/// when the peer has not answered for 1.7 seconds; with one more, after twice that time.
///
/// # Errors
/// As [`QueuePair::modify`]; EINVAL for parameters of the peer that are out of range.
pub fn connect(
    qp: &Arc<QueuePair>,
    own: Endpoint,
    remote: Path,
    peer: Endpoint,
    timeout: u8,
    rnr_retries: u8,
) -> Result<(), Error> {
    connect_with(qp, own, remote, peer, (timeout, RETRIES, rnr_retries))
}

/// As [`connect`], for an owner that finds dead peers by other means. The queue pair outlasts any silence: it sends
/// unanswered requests again, four times a second in the end, until it is destroyed.
///
/// # Errors
/// As [`connect`].
pub fn connect_persistently(
    qp: &Arc<QueuePair>,
    own: Endpoint,
    remote: Path,
    peer: Endpoint,
) -> Result<(), Error> {
    connect_with(qp, own, remote, peer, (TIMEOUT, RETRY_CNT_INFINITE, RNR_RETRIES))
}

fn connect_with(
    qp: &Arc<QueuePair>,
    own: Endpoint,
    remote: Path,
    peer: Endpoint,
    (timeout, retries, rnr_retries): (u8, u8, u8),
) -> Result<(), Error> {
    let mut attr = QpAttr {
        state: QpState::Rtr,
        path: Some(remote),
        dest_qpn: peer.qpn,
        rq_psn: peer.psn,
        path_mtu: u32::from(own.mtu_bytes.min(peer.mtu_bytes)),
        max_dest_rd_atomic: READ_COUNT,
        min_rnr_timer: MIN_RNR_TIMER,
        ..QpAttr::default()
    };
    let path = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    let responder = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
    qp.modify(&attr, QpAttrMask::STATE | path | responder)?;
    attr.state = QpState::Rts;
    attr.sq_psn = own.psn;
    (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (timeout, retries, rnr_retries);
    attr.max_rd_atomic = READ_COUNT;
    let retries = QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY;
    let requester = QpAttrMask::SQ_PSN | QpAttrMask::MAX_QP_RD_ATOMIC;
    qp.modify(&attr, QpAttrMask::STATE | retries | requester)
}

/// The path to a queue pair at this address; `None` if the device has no address of the same family.
///
/// # Errors
/// EINVAL for an address that no queue pair has.
pub fn path_to(device: &Device, address: IpAddr, qpn: u32) -> Result<Option<Path>, Error> {
    let dgid = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let family = |gid: &Gid| gid.addr.is_ipv4() == address.is_ipv4();
    let Some(sgid_index) = device.gids().iter().position(family) else { return Ok(None) };
    let av = AddressVector {
        is_global: true,
        dgid,
        sgid_index: sgid_index as u8,
        port_num: 1,
        ..AddressVector::default()
    };
    device.resolve(&av, qpn).map(Some)
}
