//! Which of our addresses a connection uses, and which queue pair 1 its request goes to.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use terrace_nic::Gid;
use terrace_wire::cm::PortSpace;
use terrace_wire::{Path, ROCE_PORT};

use super::rendezvous;
use crate::errno::Errno;

/// Time to live of packets that queue pairs send.
pub const HOP_LIMIT: u8 = 64;

/// A port for finding a route: nothing is sent to it.
const DISCARD_PORT: u16 = 9;

/// One of the device's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    pub gid_index: u8,
    pub address: IpAddr,
}

/// Whether a program means any address of the device: the wildcard, or the address of the loopback, unless the device
/// has just that one (Linux's `cma_any_addr`).
pub fn is_any(gids: &[Gid], wanted: IpAddr) -> bool {
    let wanted = wanted.to_canonical();
    let is_loopback = wanted == Ipv4Addr::LOCALHOST || wanted == Ipv6Addr::LOCALHOST;
    wanted.is_unspecified() || (is_loopback && gids.iter().all(|gid| gid.addr != wanted))
}

/// The device's address that a program means: the same one; for the loopback address or the wildcard, one of that
/// family, preferably one that leads out of this host, as on a host with an RNIC.
pub fn own_address(gids: &[Gid], wanted: IpAddr) -> Option<Source> {
    let wanted = wanted.to_canonical();
    let source = |(gid_index, gid): (u8, &Gid)| Source { gid_index, address: gid.addr };
    let exactly = (0u8..).zip(gids).find(|(_, gid)| gid.addr == wanted);
    let of_family = || (0u8..).zip(gids).filter(|(_, gid)| gid.addr.is_ipv4() == wanted.is_ipv4());
    let leads_out = || of_family().find(|(_, gid)| !gid.addr.is_loopback());
    let fitting = match (is_any(gids, wanted), wanted.is_loopback()) {
        (true, _) => leads_out().or_else(|| of_family().next()),
        (false, true) => leads_out(),
        (false, false) => None,
    };
    exactly.or(fitting).map(source)
}

/// The device's address that packets to a peer leave from.
///
/// # Errors
/// ENODEV without an address of the peer's family; EADDRNOTAVAIL for an address that no peer can have; the system's
/// without a route.
pub fn towards(gids: &[Gid], peer: SocketAddr) -> Result<Source, Errno> {
    let ip = peer.ip().to_canonical();
    if ip.is_multicast() {
        return Err(Errno(libc::EADDRNOTAVAIL));
    }
    if let Some(own) = own_address(gids, ip) {
        return Ok(own);
    }
    let of_family = || (0u8..).zip(gids).filter(|(_, gid)| gid.addr.is_ipv4() == ip.is_ipv4());
    let routed = of_family().find(|(_, gid)| leads_to(gid.addr, peer).is_ok());
    match (routed, of_family().next()) {
        (Some((gid_index, gid)), _) => Ok(Source { gid_index, address: gid.addr }),
        (None, Some((_, gid))) => Err(leads_to(gid.addr, peer).err().unwrap_or(Errno(libc::ENETUNREACH))),
        (None, None) => Err(Errno(libc::ENODEV)),
    }
}

/// Whether the system has a route from one of our addresses to a peer.
fn leads_to(own: IpAddr, peer: SocketAddr) -> Result<(), Errno> {
    let mut target = peer;
    target.set_port(DISCARD_PORT);
    let mut source = SocketAddr::new(own, 0);
    if let (SocketAddr::V6(source), SocketAddr::V6(target)) = (&mut source, target)
        && source.ip().is_unicast_link_local()
    {
        source.set_scope_id(target.scope_id());
    }
    let tried = UdpSocket::bind(source).and_then(|socket| socket.connect(target));
    tried.map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::ENETUNREACH)))
}

/// Where the request for a service at an address goes.
pub struct Target {
    /// The path to queue pair 1.
    pub path: Path,
    /// The peer's address as the listener knows it.
    pub address: IpAddr,
}

/// Finds where the request for a service goes: to the slot of the process of this host that listens; else to slot 0.
pub fn target(gids: &[Gid], source: Source, peer: SocketAddr, space: PortSpace, traffic_class: u8) -> Target {
    let ip = peer.ip().to_canonical();
    // The loopback address reaches the device's addresses, as it reaches those of every RNIC on its host.
    let own = own_address(gids, ip).map(|own| own.address);
    let (address, slot) = match rendezvous::find(space, peer.port(), ip) {
        Some(slot) => (ip, Some(slot)),
        None => match own {
            Some(own) if own != ip => (own, rendezvous::find(space, peer.port(), own)),
            _ => (ip, None),
        },
    };
    let mut remote = peer;
    remote.set_ip(address);
    remote.set_port(ROCE_PORT + u16::from(slot.unwrap_or(0)));
    if let SocketAddr::V6(v6) = &mut remote
        && v6.ip().is_unicast_link_local()
        && v6.scope_id() == 0
    {
        v6.set_scope_id(gids.get(usize::from(source.gid_index)).map_or(0, |gid| gid.ifindex));
    }
    let source_gid_index = source.gid_index;
    let path = Path { remote, source_gid_index, traffic_class, hop_limit: 0, flow_label: 0 };
    Target { path, address }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gids() -> Vec<Gid> {
        table(&["192.0.2.5", "2001:db8::5"])
    }

    fn table(addrs: &[&str]) -> Vec<Gid> {
        addrs.iter().map(|addr| Gid::new(addr.parse().expect("an address"), "lo", 1)).collect()
    }

    #[test]
    fn the_loopback_stands_for_the_device() {
        let own = |wanted: &str| own_address(&gids(), wanted.parse().expect("an address"));
        assert_eq!(own("192.0.2.5").map(|source| source.gid_index), Some(0));
        assert_eq!(own("::ffff:192.0.2.5").map(|source| source.gid_index), Some(0));
        assert_eq!(own("127.0.0.1").map(|source| source.gid_index), Some(0));
        assert_eq!(own("::1").map(|source| source.gid_index), Some(1));
        assert_eq!(own("192.0.2.1"), None);
        // An address of the loopback that a device has stands for a host of its own, and the loopback's proper ones for
        // any.
        let on_loopback = table(&["127.0.0.58"]);
        let own = |wanted: &str| own_address(&on_loopback, wanted.parse().expect("an address"));
        assert_eq!(own("127.0.0.1").map(|source| source.address), Some([127, 0, 0, 58].into()));
        assert_eq!(own("0.0.0.0").map(|source| source.address), Some([127, 0, 0, 58].into()));
        assert_eq!(own("127.0.0.59"), None);
        assert_eq!(own("::1"), None);
        assert!(is_any(&on_loopback, [127, 0, 0, 1].into()) && is_any(&on_loopback, [0; 4].into()));
        assert!(
            !is_any(&on_loopback, [127, 0, 0, 59].into()) && !is_any(&on_loopback, [127, 0, 0, 58].into())
        );
        assert!(!is_any(&table(&["127.0.0.1"]), [127, 0, 0, 1].into()));
    }

    #[test]
    fn peers_that_are_none_are_refused() {
        let gids = table(&["127.0.0.58", "::1"]);
        let to = |peer: &str| towards(&gids, peer.parse().expect("an address")).map_err(|errno| errno.0);
        assert_eq!(to("224.0.0.1:1"), Err(libc::EADDRNOTAVAIL));
        assert_eq!(to("0.0.0.0:1").map(|source| source.gid_index), Ok(0));
        assert_eq!(to("127.0.0.59:1").map(|source| source.gid_index), Ok(0));
        let v4_only = &gids[..1];
        assert_eq!(
            towards(v4_only, "[2001:db8::1]:1".parse().expect("an address")).err(),
            Some(Errno(libc::ENODEV))
        );
    }
}
