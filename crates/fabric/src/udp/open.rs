//! Opening a port: address, instance index, sockets.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use terrace_wire::ROCE_PORT;

use super::addresses::{self, is_link_local};
use super::groups::Groups;
use super::poll_set::PollSet;
use super::segmentation::Segmentation;
use super::socket::{RECEIVE_BUFFER_BYTES, UdpSocket};
use super::{OpenError, UdpConfig, UdpPort};
use crate::{Gid, PortCounters};

pub(super) fn open(config: &UdpConfig) -> Result<UdpPort, OpenError> {
    let mut gids = addresses::choose(config.addr, &addresses::list()?)?;
    let mtu_limit = addresses::mtu_limit(config.mtu, &gids[0].interface)?;
    let (instance, first) = claim_instance(&gids[0], config)?;
    let mut sockets = vec![first];
    bind_others(&mut gids, instance, config, &mut sockets)?;
    let receive_buffer_bytes = sockets[0].receive_buffer_bytes();
    tracing::debug!(
        "instance {instance} (UDP port {}) of {}, {receive_buffer_bytes} bytes of receive buffer, GIDs {:?}",
        sockets[0].local().port(),
        gids[0].addr,
        gids.iter().map(|gid| gid.addr).collect::<Vec<_>>(),
    );
    Ok(UdpPort {
        gids,
        sockets,
        instance,
        mtu_limit,
        receive_buffer_bytes,
        counters: Arc::new(PortCounters::default()),
        active: AtomicU32::new(1),
        burst: AtomicU32::new(1),
        poll_set: PollSet::default(),
        segmentation: Segmentation::default(),
        logged_errors: AtomicU64::new(0),
        groups: Groups::default(),
        config: config.clone(),
    })
}

/// Claims the first free instance index by binding its UDP port. The kernel grants the binding to one process and
/// releases it when that process ends in any manner.
fn claim_instance(gid: &Gid, config: &UdpConfig) -> Result<(u8, UdpSocket), OpenError> {
    let instances = config.instance.map_or(0..=u8::MAX, |instance| instance..=instance);
    for instance in instances.clone() {
        match bind(gid, instance, config) {
            Ok(socket) => return Ok((instance, socket)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(OpenError::from_io("open a UDP socket", gid.addr, error)),
        }
    }
    let ports = match config.instance {
        Some(instance) => format!("port {} is", ROCE_PORT + u16::from(instance)),
        None => format!("ports {ROCE_PORT} to {} are", ROCE_PORT + u16::from(u8::MAX)),
    };
    Err(OpenError::PortsInUse { addr: gid.addr, ports })
}

/// Binds the same UDP port of the other GIDs. A GID that cannot be bound is left out of the table: it may be another
/// process's first address, or about to be removed.
fn bind_others(
    gids: &mut Vec<Gid>,
    instance: u8,
    config: &UdpConfig,
    sockets: &mut Vec<UdpSocket>,
) -> Result<(), OpenError> {
    let mut failure = None;
    let mut index = 0;
    gids.retain(|gid| {
        index += 1;
        if index == 1 {
            return true;
        }
        match bind(gid, instance, config) {
            Ok(socket) => sockets.push(socket),
            Err(error) => {
                tracing::debug!("GID {} omitted: {error}", gid.addr);
                failure = Some(OpenError::from_io("open a UDP socket", gid.addr, error));
                return false;
            }
        }
        true
    });
    match failure {
        Some(error @ OpenError::OutOfDescriptors) => Err(error),
        _ => Ok(()),
    }
}

/// The socket address of a GID and a UDP port.
pub(super) fn address_of(gid: &Gid, port: u16) -> SocketAddr {
    match gid.addr {
        IpAddr::V4(v4) => SocketAddr::new(v4.into(), port),
        IpAddr::V6(v6) => {
            let scope = if is_link_local(v6) { gid.ifindex } else { 0 };
            SocketAddrV6::new(v6, port, 0, scope).into()
        }
    }
}

fn bind(gid: &Gid, instance: u8, config: &UdpConfig) -> io::Result<UdpSocket> {
    let local = address_of(gid, ROCE_PORT + u16::from(instance));
    let requested = config.receive_buffer_bytes.unwrap_or(RECEIVE_BUFFER_BYTES);
    let socket = UdpSocket::bind(local, requested, config.socket_hook)?;
    socket.set_multicast_interface(gid.ifindex)?;
    Ok(socket)
}
