//! A queue pair's surroundings in tests: memory with keys, and a TX sink. The fuzz target shares it.

// Each test uses its own part.
#![allow(dead_code)]

pub mod host;
pub mod sink;

use std::net::{IpAddr, SocketAddr};

use terrace_transport::{Qp, QpAttr, QpAttrMask, QpState, QpType};
use terrace_wire::{Bth, Opcode, Path, Psn, ROCE_PORT, RxMeta};

use host::Memory;

/// An environment variable's number, if it is one.
pub fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A path to the peer at this address.
pub fn path_to(peer: IpAddr) -> Path {
    Path {
        remote: SocketAddr::new(peer, ROCE_PORT),
        source_gid_index: 0,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
    }
}

/// The header of a request that wants to be acknowledged.
pub fn request_bth(opcode: Opcode, qpn: u32, psn: u32) -> Bth {
    Bth {
        opcode,
        solicited: false,
        migrated: false,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        qpn,
        ack_request: true,
        psn: Psn::new(psn),
    }
}

/// The metadata of a packet received from one address by another. The source port is not the path's: a peer may send
/// from any port.
pub fn meta_between(source: IpAddr, destination: IpAddr, traffic_class: u8) -> RxMeta {
    RxMeta { source: SocketAddr::new(source, 0xc123), destination, gid_index: 0, traffic_class }
}

/// Moves a queue pair from RESET to `state` through the usual transitions.
pub fn bring_up(qp: &mut Qp, attr: &QpAttr, state: QpState) {
    let host = Memory::new(0);
    let qp_type = qp.config().qp_type;
    let route: &[QpState] = match state {
        QpState::Reset => &[],
        QpState::Init => &[QpState::Init],
        QpState::Rtr => &[QpState::Init, QpState::Rtr],
        QpState::Rts => &[QpState::Init, QpState::Rtr, QpState::Rts],
        QpState::Sqd => &[QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd],
        QpState::Err => &[QpState::Init, QpState::Err],
        QpState::Sqe => panic!("only an error leads to SQE"),
    };
    for &to in route {
        let mask = QpAttrMask::STATE | required(qp_type, qp.state(), to);
        qp.modify(&QpAttr { state: to, ..*attr }, mask, &host).expect("the usual way up is open");
    }
}

/// The attributes that a usual transition requires.
pub fn required(qp_type: QpType, from: QpState, to: QpState) -> QpAttrMask {
    terrace_transport::required_attributes(qp_type, from, to).expect("the transition exists")
}
