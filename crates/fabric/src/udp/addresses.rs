//! The host's local addresses, and the selection of a port's GIDs.

use std::net::{IpAddr, Ipv6Addr};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::{InterfaceFlags, if_nametoindex};
use nix::sys::socket::SockaddrStorage;

use super::error::OpenError;
use crate::Gid;

/// Path MTUs of RoCE, in bytes.
const PATH_MTUS: [u32; 5] = [4096, 2048, 1024, 512, 256];

/// Most bytes of a packet besides its payload: IPv6 40, UDP 8, BTH 12, extensions 28 (an atomic request), ICRC 4.
const OVERHEAD_BYTES: u32 = 40 + 8 + 12 + 28 + 4;

/// An address of an interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalAddress {
    pub gid: Gid,
    pub loopback: bool,
}

/// Every address of every interface that is up, in the kernel's order.
pub(super) fn list() -> Result<Vec<LocalAddress>, OpenError> {
    let mut addresses = Vec::new();
    for interface in getifaddrs().map_err(OpenError::unlisted)? {
        let addr = interface.address.as_ref().and_then(ip_of);
        let (true, Some(addr)) = (interface.flags.contains(InterfaceFlags::IFF_UP), addr) else { continue };
        let ifindex = match if_nametoindex(interface.interface_name.as_str()) {
            Ok(ifindex) => ifindex,
            // The interface has been removed meanwhile.
            Err(Errno::ENODEV | Errno::ENXIO) => continue,
            Err(error) => return Err(OpenError::unlisted(error)),
        };
        let loopback = interface.flags.contains(InterfaceFlags::IFF_LOOPBACK);
        addresses.push(LocalAddress { gid: Gid::new(addr, interface.interface_name, ifindex), loopback });
    }
    Ok(addresses)
}

fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(v4.ip().into()),
        (_, Some(v6)) => Some(v6.ip().into()),
        _ => None,
    }
}

/// The GID table for the requested address. The first entry is that address. The others are one address of each other
/// kind on its interface: IPv4, global IPv6, link-local IPv6.
pub(super) fn choose(requested: Option<IpAddr>, all: &[LocalAddress]) -> Result<Vec<Gid>, OpenError> {
    let chosen = match requested {
        Some(addr) => find(addr.to_canonical(), all)?,
        None => default(all).ok_or(OpenError::NoInterface)?,
    };
    // An unlisted loopback address is a separate host, so it shares no other addresses.
    let listed = all.iter().any(|local| local.gid == chosen);
    let mut gids = vec![chosen];
    for kind in [Kind::V4, Kind::Global, Kind::LinkLocal] {
        let other = all.iter().map(|local| &local.gid).find(|gid| {
            listed
                && gid.interface == gids[0].interface
                && kind == Kind::of(gid.addr)
                && kind != Kind::of(gids[0].addr)
        });
        gids.extend(other.cloned());
    }
    Ok(gids)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    V4,
    Global,
    LinkLocal,
}

impl Kind {
    fn of(addr: IpAddr) -> Kind {
        match addr {
            IpAddr::V4(_) => Kind::V4,
            IpAddr::V6(v6) if is_link_local(v6) => Kind::LinkLocal,
            IpAddr::V6(_) => Kind::Global,
        }
    }
}

pub(super) fn is_link_local(addr: Ipv6Addr) -> bool {
    addr.segments()[0] & 0xffc0 == 0xfe80
}

fn find(addr: IpAddr, all: &[LocalAddress]) -> Result<Gid, OpenError> {
    let not_unicast = |kind| Err(OpenError::NotUnicast { addr, kind });
    if addr.is_unspecified() {
        return not_unicast("the wildcard");
    }
    if addr.is_multicast() {
        return not_unicast("a multicast address");
    }
    if let Some(local) = all.iter().find(|local| local.gid.addr == addr) {
        return Ok(local.gid.clone());
    }
    // Every address in 127.0.0.0/8 is local, whether it is listed or not.
    match all.iter().find(|local| local.loopback) {
        Some(loopback) if addr.is_ipv4() && addr.is_loopback() => {
            Ok(Gid::new(addr, loopback.gid.interface.clone(), loopback.gid.ifindex))
        }
        _ => Err(OpenError::NotLocal { addr, available: describe(all) }),
    }
}

fn default(all: &[LocalAddress]) -> Option<Gid> {
    let network = all.iter().find(|local| !local.loopback && local.gid.addr.is_ipv4());
    let loopback = || all.iter().find(|local| local.loopback && local.gid.addr.is_ipv4());
    network.or_else(loopback).or_else(|| all.first()).map(|local| local.gid.clone())
}

fn describe(all: &[LocalAddress]) -> String {
    let names: Vec<String> =
        all.iter().map(|local| format!("{} on {}", local.gid.addr, local.gid.interface)).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// The port's largest path MTU, in bytes of payload.
pub(super) fn mtu_limit(requested: Option<u32>, interface: &str) -> Result<u32, OpenError> {
    let interface_mtu = interface_mtu(interface);
    let largest = PATH_MTUS.into_iter().find(|mtu| mtu + OVERHEAD_BYTES <= interface_mtu);
    match requested {
        Some(mtu) if !PATH_MTUS.contains(&mtu) => Err(OpenError::BadMtu { mtu }),
        Some(mtu) => {
            // Packets between processes of one host use the loopback interface, which supports every path MTU.
            if largest.is_none_or(|largest| mtu > largest) {
                tracing::warn!(
                    "path MTU {mtu} does not fit the MTU of {interface} ({interface_mtu} bytes); \
                     it works only between processes of this host"
                );
            }
            Ok(mtu)
        }
        None => {
            largest.ok_or_else(|| OpenError::InterfaceMtu { interface: interface.to_owned(), interface_mtu })
        }
    }
}

/// Bytes per IP packet. Ethernet's default if the kernel does not report it.
fn interface_mtu(interface: &str) -> u32 {
    std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu"))
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(1500)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Vec<LocalAddress> {
        let local = |addr: &str, interface: &str, ifindex| LocalAddress {
            gid: Gid::new(addr.parse().unwrap(), interface, ifindex),
            loopback: interface == "lo",
        };
        vec![
            local("127.0.0.1", "lo", 1),
            local("::1", "lo", 1),
            local("fe80::9", "eth0", 2),
            local("fd00::2", "eth0", 2),
            local("192.0.2.2", "eth0", 2),
            local("192.0.2.3", "eth0", 2),
            local("192.0.2.130", "eth1", 3),
        ]
    }

    fn table(requested: Option<&str>) -> Vec<String> {
        let gids = choose(requested.map(|addr| addr.parse().unwrap()), &machine()).unwrap();
        gids.iter().map(|gid| gid.addr.to_string()).collect()
    }

    #[test]
    fn the_first_ipv4_address_of_another_interface_than_the_loopback_is_the_default() {
        assert_eq!(table(None), ["192.0.2.2", "fd00::2", "fe80::9"]);
    }

    #[test]
    fn the_requested_address_is_first_and_other_kinds_of_its_interface_follow() {
        assert_eq!(table(Some("fd00::2")), ["fd00::2", "192.0.2.2", "fe80::9"]);
        assert_eq!(table(Some("::ffff:192.0.2.3")), ["192.0.2.3", "fd00::2", "fe80::9"]);
        assert_eq!(table(Some("127.0.0.1")), ["127.0.0.1", "::1"]);
        assert_eq!(table(Some("127.0.0.9")), ["127.0.0.9"]);
    }

    #[test]
    fn without_another_interface_the_loopback_is_the_default() {
        let loopback_only = &machine()[..2];
        assert_eq!(choose(None, loopback_only).unwrap()[0].addr.to_string(), "127.0.0.1");
        assert!(matches!(choose(None, &[]), Err(OpenError::NoInterface)));
    }

    #[test]
    fn a_gid_maps_ipv4_into_ipv6() {
        let gid = Gid::new("192.0.2.2".parse().unwrap(), "eth0", 2);
        assert_eq!(gid.raw, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 2]);
    }
}
