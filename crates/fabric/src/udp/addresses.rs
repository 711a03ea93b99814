//! The machine's local addresses, and the selection of a port's GIDs.

use std::net::{IpAddr, Ipv6Addr};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::{InterfaceFlags, if_nametoindex};
use nix::sys::socket::SockaddrStorage;

use super::OpenError;
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

/// Every address of every interface that is up, in the system's order.
pub(super) fn list() -> Result<Vec<LocalAddress>, OpenError> {
    let mut addresses = Vec::new();
    for interface in getifaddrs().map_err(OpenError::unlisted)? {
        let addr = interface.address.as_ref().and_then(ip_of);
        let (true, Some(addr)) = (interface.flags.contains(InterfaceFlags::IFF_UP), addr) else { continue };
        let ifindex = match if_nametoindex(interface.interface_name.as_str()) {
            Ok(ifindex) => ifindex,
            // It has vanished meanwhile.
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

/// The GID table for the requested address: that one first, then one of each other kind on its interface: IPv4,
/// global IPv6, link-local IPv6.
pub(super) fn choose(wanted: Option<IpAddr>, all: &[LocalAddress]) -> Result<Vec<Gid>, OpenError> {
    let chosen = match wanted {
        Some(addr) => find(addr.to_canonical(), all)?,
        None => default(all).ok_or(OpenError::NoInterface)?,
    };
    // An unlisted address of the loopback stands for a host of its own: it shares no others.
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
    // All of 127.0.0.0/8 belongs to the loopback, listed or not.
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

/// The largest path MTU to offer, in bytes of payload.
pub(super) fn mtu_limit(wanted: Option<u32>, interface: &str) -> Result<u32, OpenError> {
    let interface_mtu = interface_mtu(interface);
    let fitting = PATH_MTUS.into_iter().find(|mtu| mtu + OVERHEAD_BYTES <= interface_mtu);
    match wanted {
        Some(mtu) if !PATH_MTUS.contains(&mtu) => Err(OpenError::BadMtu { mtu }),
        Some(mtu) => {
            // Packets between processes of one host use the loopback, which carries every path MTU.
            if fitting.is_none_or(|fitting| mtu > fitting) {
                tracing::warn!(
                    "path MTU {mtu} is more than {interface} carries ({interface_mtu} bytes); \
                     it will only work between processes of this machine"
                );
            }
            Ok(mtu)
        }
        None => {
            fitting.ok_or_else(|| OpenError::InterfaceMtu { interface: interface.to_owned(), interface_mtu })
        }
    }
}

/// Bytes per IP packet; Ethernet's if the system does not report it.
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

    fn table(wanted: Option<&str>) -> Vec<String> {
        let gids = choose(wanted.map(|addr| addr.parse().unwrap()), &machine()).unwrap();
        gids.iter().map(|gid| gid.addr.to_string()).collect()
    }

    #[test]
    fn the_first_ipv4_address_off_the_loopback_is_the_default() {
        assert_eq!(table(None), ["192.0.2.2", "fd00::2", "fe80::9"]);
    }

    #[test]
    fn the_chosen_address_comes_first_and_brings_the_other_kinds_of_its_interface() {
        assert_eq!(table(Some("fd00::2")), ["fd00::2", "192.0.2.2", "fe80::9"]);
        assert_eq!(table(Some("::ffff:192.0.2.3")), ["192.0.2.3", "fd00::2", "fe80::9"]);
        assert_eq!(table(Some("127.0.0.1")), ["127.0.0.1", "::1"]);
        assert_eq!(table(Some("127.0.0.9")), ["127.0.0.9"]);
    }

    #[test]
    fn without_a_network_the_loopback_serves() {
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
