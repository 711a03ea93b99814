//! Commands that lead to a connection: binding an address, resolving the peer, connecting and listening.

use std::net::SocketAddr;

use terrace_cm::{Addresses, Connect, ListenerId, SidrRequest};
use terrace_nic::Device;
use terrace_wire::cm::{IpHeader, PortSpace, Transport, service_id};

use super::abi::{ConnParam, gid_of};
use super::attributes::{ACK_TIMEOUT, mtu_code};
use super::clock::now;
use super::descriptor::FileId;
use super::id::{Id, Stage};
use super::rendezvous::{self, Claim};
use super::resolve::{self, Source};
use super::service::Service;
use crate::abi::{IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_XRC_SEND};
use crate::errno::{EINVAL, Errno, Result};

/// Ports that are assigned when the program requests port 0.
const EPHEMERAL: std::ops::Range<u16> = 32768..61000;

/// An ephemeral port, a different one for each attempt.
fn ephemeral_port(attempt: u64) -> u16 {
    let mixed = (now().0 ^ u64::from(std::process::id()) << 20)
        .wrapping_add(attempt)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    EPHEMERAL.start + ((mixed >> 33) % EPHEMERAL.len() as u64) as u16
}

/// Binds an identifier to one address of the device, or to all, and reserves its port there.
///
/// # Errors
/// EINVAL unless the identifier is new; EADDRNOTAVAIL for an address that the device does not have; EADDRINUSE for a
/// port in use.
pub fn bind(service: &mut Service, file: FileId, number: u32, address: SocketAddr) -> Result<()> {
    let device = service.device.clone().ok_or(Errno(libc::ENODEV))?;
    let id = service.ids.get(file, number)?;
    if id.stage != Stage::Idle {
        return Err(EINVAL);
    }
    let source = match address.ip().to_canonical() {
        ip if resolve::is_any(device.gids(), ip) => None,
        ip => Some(resolve::own_address(device.gids(), ip).ok_or(Errno(libc::EADDRNOTAVAIL))?),
    };
    let (space, addresses) = (id.space, addresses(source, address, id.is_family_only));
    let claim = |port: u16| claim_all(&device, addresses, space, port);
    let (port, claims) = match address.port() {
        0 => first_free(claim)?,
        port => match claim(port) {
            // Two identifiers may share a port while at most one of them listens.
            Err(Errno(libc::EADDRINUSE)) if id.reuse => (port, Vec::new()),
            claims => (port, claims?),
        },
    };
    let mut local = address;
    local.set_port(port);
    (id.local, id.source, id.claims, id.stage) = (Some(local), source, claims, Stage::Bound);
    Ok(())
}

/// The addresses that an identifier is bound to: that of its source, or those that the wildcard stands for. As in Linux's `cma`, the
/// wildcard of IPv4 stands for that family only, unless the program has said otherwise.
fn addresses(source: Option<Source>, local: SocketAddr, is_family_only: Option<bool>) -> Addresses {
    match source {
        Some(source) => Addresses::One(source.address),
        None if !is_family_only.unwrap_or(local.is_ipv4()) => Addresses::All,
        None if local.is_ipv4() => Addresses::V4,
        None => Addresses::V6,
    }
}

/// Reserves a port at those of the device's addresses.
fn claim_all(device: &Device, addresses: Addresses, space: PortSpace, port: u16) -> Result<Vec<Claim>> {
    let own = device.gids().iter().map(|gid| gid.addr).filter(|address| addresses.contains(*address));
    own.map(|address| rendezvous::claim(space, port, address)).collect()
}

fn first_free(claim: impl Fn(u16) -> Result<Vec<Claim>>) -> Result<(u16, Vec<Claim>)> {
    const ATTEMPTS: u64 = 64;
    for attempt in 0..ATTEMPTS {
        let port = ephemeral_port(attempt);
        match claim(port) {
            Err(Errno(libc::EADDRINUSE)) => {}
            claims => return Ok((port, claims?)),
        }
    }
    Err(Errno(libc::EADDRNOTAVAIL))
}

/// Resolves a peer's address, or that of a multicast group for UD. The outcome is an event. Only invalid calls return an error.
///
/// # Errors
/// EINVAL for an identifier that has a peer already, or is bound to an address of another family.
pub fn resolve_address(
    service: &mut Service,
    file: FileId,
    number: u32,
    to: SocketAddr,
) -> Result<std::result::Result<(), Errno>> {
    let device = service.device.clone().ok_or(Errno(libc::ENODEV))?;
    let id = service.ids.get(file, number)?;
    if !matches!(id.stage, Stage::Idle | Stage::Bound) {
        return Err(EINVAL);
    }
    let group = Some(to.ip().to_canonical()).filter(|ip| ip.is_multicast() && id.is_ud());
    let found = match group {
        Some(group) => resolve::source_for_group(device.gids(), group),
        None => resolve::source_towards(device.gids(), to),
    };
    let source = match (id.source, found) {
        (Some(bound), Ok(_)) if bound.address.is_ipv4() == to.ip().to_canonical().is_ipv4() => bound,
        (Some(_), Ok(_)) => return Err(EINVAL),
        (None, Ok(source)) => source,
        (_, Err(errno)) => return Ok(Err(errno)),
    };
    let port = match id.local.map_or(0, |local| local.port()) {
        0 => ephemeral_port(number.into()),
        port => port,
    };
    id.source = Some(source);
    id.local = Some((source.address, port).into());
    id.peer = Some(to);
    id.stage = Stage::AddressResolved;
    Ok(Ok(()))
}

/// Sends a connection request, or a SIDR request for a UD queue pair.
///
/// # Errors
/// EINVAL without a route, to a multicast group, or for a kind of queue pair that does not connect; ENOMEM for too many connections.
pub fn connect(service: &mut Service, file: FileId, number: u32, param: ConnParam) -> Result<()> {
    let device = service.device.clone().ok_or(Errno(libc::ENODEV))?;
    let id = service.ids.get(file, number)?;
    let (Stage::RouteResolved, Some(source), Some(local), Some(peer)) =
        (id.stage, id.source, id.local, id.peer)
    else {
        return Err(EINVAL);
    };
    if peer.ip().to_canonical().is_multicast() {
        return Err(EINVAL);
    }
    let target = resolve::target(device.gids(), source, peer, id.space, id.traffic_class);
    let header = IpHeader { source_port: local.port(), source: source.address, destination: target.address };
    let service_id = service_id(id.space, peer.port());
    let mut sidr = SidrRequest { service_id, header, path: target.path, private_data: Vec::new() };
    let conn = if id.is_ud() {
        sidr.private_data = param.private_data;
        service.cm.send_sidr_req(now(), number.into(), &sidr)
    } else {
        let connect = connect_parameters(id, &device, source, &sidr, param)?;
        service.cm.connect(now(), number.into(), &connect)
    };
    let conn = conn.map_err(Errno::from)?;
    let id = service.ids.get(file, number)?;
    (id.conn, id.stage) = (Some(conn), Stage::Connecting);
    Ok(())
}

/// The parameters of a REQ.
fn connect_parameters(
    id: &Id,
    device: &Device,
    source: Source,
    sidr: &SidrRequest,
    param: ConnParam,
) -> Result<Connect> {
    let own_gid = device.gids().get(usize::from(source.gid_index)).map_or([0; 16], |gid| gid.raw);
    Ok(Connect {
        service_id: sidr.service_id,
        header: sidr.header,
        path: sidr.path,
        gids: [own_gid, gid_of(sidr.header.destination)],
        transport: match id.qp_type {
            IBV_QPT_RC => Transport::Rc,
            IBV_QPT_UC => Transport::Uc,
            IBV_QPT_XRC_SEND => Transport::Xrc,
            _ => return Err(EINVAL),
        },
        qpn: param.qp_num,
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: param.flow_control,
        retry_count: param.retry_count,
        rnr_retry_count: param.rnr_retry_count,
        srq: param.srq,
        path_mtu: mtu_code(device.port_attributes().active_mtu),
        ack_timeout: id.ack_timeout.unwrap_or(ACK_TIMEOUT),
        private_data: param.private_data,
    })
}

/// Listens at the address that an identifier is bound to.
///
/// # Errors
/// EINVAL unless the identifier is bound; EADDRINUSE when another identifier or process listens there.
pub fn listen(service: &mut Service, file: FileId, number: u32, backlog: u32) -> Result<()> {
    let device = service.device.clone().ok_or(Errno(libc::ENODEV))?;
    let id = service.ids.get(file, number)?;
    let (Stage::Bound, Some(local)) = (id.stage, id.local) else { return Err(EINVAL) };
    let (space, addresses) = (id.space, addresses(id.source, local, id.is_family_only));
    if id.claims.is_empty() {
        id.claims = claim_all(&device, addresses, space, local.port())?;
    }
    let listener = ListenerId(service.next_listener);
    service.next_listener += 1;
    service.cm.listen(listener, service_id(space, local.port()), addresses, backlog).map_err(Errno::from)?;
    let id = service.ids.get(file, number)?;
    // The name is published last: peers that find it send requests immediately.
    if let Err(errno) = id.claims.iter_mut().try_for_each(|claim| claim.listen(device.instance())) {
        id.claims.iter_mut().for_each(Claim::stop_listening);
        service.cm.stop_listening(listener, now());
        return Err(errno);
    }
    (id.listener, id.stage) = (Some(listener), Stage::Listening);
    Ok(())
}
