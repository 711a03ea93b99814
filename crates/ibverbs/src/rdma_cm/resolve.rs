//! Selection of a connection's local address and of the queue pair 1 that gets its request.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use terrace_nic::Gid;
use terrace_wire::cm::PortSpace;
use terrace_wire::{Path, ROCE_PORT};

use super::rendezvous;
use crate::errno::Errno;

/// Time to live of packets that queue pairs send.
pub const HOP_LIMIT: u8 = 64;

/// The destination port of route lookups. Nothing is sent to it.
const DISCARD_PORT: u16 = 9;

/// One of the device's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    pub gid_index: u8,
    pub address: IpAddr,
}

/// Whether an address stands for every address of the device: the wildcard, or a loopback address that the device does
/// not have (Linux's `cma_any_addr`).
pub fn is_any(gids: &[Gid], requested: IpAddr) -> bool {
    let requested = requested.to_canonical();
    let is_loopback = requested == Ipv4Addr::LOCALHOST || requested == Ipv6Addr::LOCALHOST;
    requested.is_unspecified() || (is_loopback && gids.iter().all(|gid| gid.addr != requested))
}

/// The device's address for a program's address: the same address if the device has it. For a loopback address or the
/// wildcard it is one of that family, preferably not a loopback address, as on a host with an RNIC.
pub fn own_address(gids: &[Gid], requested: IpAddr) -> Option<Source> {
    let requested = requested.to_canonical();
    let source = |(gid_index, gid): (u8, &Gid)| Source { gid_index, address: gid.addr };
    let exact = (0u8..).zip(gids).find(|(_, gid)| gid.addr == requested);
    let of_family = || (0u8..).zip(gids).filter(|(_, gid)| gid.addr.is_ipv4() == requested.is_ipv4());
    let external = || of_family().find(|(_, gid)| !gid.addr.is_loopback());
    let substitute = match (is_any(gids, requested), requested.is_loopback()) {
        (true, _) => external().or_else(|| of_family().next()),
        (false, true) => external(),
        (false, false) => None,
    };
    exact.or(substitute).map(source)
}

/// The device's address from which packets to a peer are sent.
///
/// # Errors
/// ENODEV without an address of the peer's family; EADDRNOTAVAIL for a multicast address; the kernel's error without a
/// route.
pub fn source_towards(gids: &[Gid], peer: SocketAddr) -> Result<Source, Errno> {
    let ip = peer.ip().to_canonical();
    if ip.is_multicast() {
        return Err(Errno(libc::EADDRNOTAVAIL));
    }
    if let Some(own) = own_address(gids, ip) {
        return Ok(own);
    }
    let of_family = || (0u8..).zip(gids).filter(|(_, gid)| gid.addr.is_ipv4() == ip.is_ipv4());
    let routed = of_family().find(|(_, gid)| check_route(gid.addr, peer).is_ok());
    match (routed, of_family().next()) {
        (Some((gid_index, gid)), _) => Ok(Source { gid_index, address: gid.addr }),
        (None, Some((_, gid))) => Err(check_route(gid.addr, peer).err().unwrap_or(Errno(libc::ENETUNREACH))),
        (None, None) => Err(Errno(libc::ENODEV)),
    }
}

/// The device's address from which datagrams to a multicast group are sent.
///
/// # Errors
/// ENODEV without an address of the group's family.
pub fn source_for_group(gids: &[Gid], group: IpAddr) -> Result<Source, Errno> {
    let of_family = (0u8..).zip(gids).find(|(_, gid)| gid.addr.is_ipv4() == group.is_ipv4());
    of_family.map(|(gid_index, gid)| Source { gid_index, address: gid.addr }).ok_or(Errno(libc::ENODEV))
}

/// Checks that the kernel has a route from a local address to a peer.
fn check_route(own: IpAddr, peer: SocketAddr) -> Result<(), Errno> {
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

/// The destination of a request for a service.
pub struct Target {
    /// The path to queue pair 1.
    pub path: Path,
    /// The peer's address as the listener has bound it.
    pub address: IpAddr,
}

/// Finds the destination of a request: the process of this host that listens, otherwise instance index 0.
pub fn target(gids: &[Gid], source: Source, peer: SocketAddr, space: PortSpace, traffic_class: u8) -> Target {
    let ip = peer.ip().to_canonical();
    // A loopback address reaches the device's addresses, as it reaches those of every RNIC on its host.
    let own = own_address(gids, ip).map(|own| own.address);
    let (address, instance) = match rendezvous::find(space, peer.port(), ip) {
        Some(instance) => (ip, Some(instance)),
        None => match own {
            Some(own) if own != ip => (own, rendezvous::find(space, peer.port(), own)),
            _ => (ip, None),
        },
    };
    let mut remote = peer;
    remote.set_ip(address);
    remote.set_port(ROCE_PORT + u16::from(instance.unwrap_or(0)));
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
    fn a_loopback_address_selects_an_address_of_the_device() {
        let own = |requested: &str| own_address(&gids(), requested.parse().expect("an address"));
        assert_eq!(own("192.0.2.5").map(|source| source.gid_index), Some(0));
        assert_eq!(own("::ffff:192.0.2.5").map(|source| source.gid_index), Some(0));
        assert_eq!(own("127.0.0.1").map(|source| source.gid_index), Some(0));
        assert_eq!(own("::1").map(|source| source.gid_index), Some(1));
        assert_eq!(own("192.0.2.1"), None);
        // A device with a loopback address is a host of its own. 127.0.0.1 and the wildcard select that address.
        let on_loopback = table(&["127.0.0.58"]);
        let own = |requested: &str| own_address(&on_loopback, requested.parse().expect("an address"));
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
    fn invalid_peer_addresses_fail() {
        let gids = table(&["127.0.0.58", "::1"]);
        let to =
            |peer: &str| source_towards(&gids, peer.parse().expect("an address")).map_err(|errno| errno.0);
        assert_eq!(to("224.0.0.1:1"), Err(libc::EADDRNOTAVAIL));
        assert_eq!(to("0.0.0.0:1").map(|source| source.gid_index), Ok(0));
        assert_eq!(to("127.0.0.59:1").map(|source| source.gid_index), Ok(0));
        let v4_only = &gids[..1];
        assert_eq!(
            source_towards(v4_only, "[2001:db8::1]:1".parse().expect("an address")).err(),
            Some(Errno(libc::ENODEV))
        );
    }
}
