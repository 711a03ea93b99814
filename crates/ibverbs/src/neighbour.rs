//! Ethernet addresses of peers, for programs that construct address handles themselves.

use std::ffi::c_int;
use std::fs;
use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::thread::sleep;
use std::time::Duration;

use crate::abi::{ibv_ah_attr, ibv_context};
use crate::context::Context;
use crate::errno::{EINVAL, Errno, Result};
use crate::object::{self, read};

/// An Ethernet address.
type Mac = [u8; 6];

/// A frame without a VLAN tag.
const NO_VLAN: u16 = 0xffff;

/// Number of reads of the kernel's table after the datagram, and the pause before each.
const ATTEMPTS: u32 = 30;
const PAUSE: Duration = Duration::from_millis(10);

/// The discard service: a datagram to it makes the kernel resolve the address and does nothing else.
const DISCARD_PORT: u16 = 9;

/// `ibv_resolve_eth_l2_from_gid(3)`: 0, or a negative errno.
///
/// # Safety
/// `context` is null or open, `attr` null or an address, `mac` null or 6 writable bytes, `vlan` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    context: *mut ibv_context,
    attr: *mut ibv_ah_attr,
    mac: *mut Mac,
    vlan: *mut u16,
) -> c_int {
    let resolve = || {
        // SAFETY: the caller's.
        let (context, attr) = unsafe { (Context::borrow(context)?, read(attr)?) };
        let gids = context.device().gids();
        let source = gids.get(usize::from(attr.grh.sgid_index)).ok_or(EINVAL)?;
        // SAFETY: every view of the union is 16 plain bytes.
        let peer = Ipv6Addr::from(unsafe { attr.grh.dgid.raw }).to_canonical();
        let found = find(source.addr, &source.interface, peer)?;
        // SAFETY: the caller's.
        unsafe {
            if !vlan.is_null() {
                vlan.write(NO_VLAN);
            }
            object::write(mac, found)
        }
    };
    resolve().map_or_else(|errno: Errno| -errno.0, |()| 0)
}

fn find(source: IpAddr, interface: &str, peer: IpAddr) -> Result<Mac> {
    if peer == source || peer.is_loopback() {
        let own = fs::read_to_string(format!("/sys/class/net/{interface}/address"));
        return own.ok().and_then(|text| parse(text.trim())).ok_or(Errno(libc::ENODEV));
    }
    match peer {
        IpAddr::V4(_) => resolve(source, peer),
        IpAddr::V6(address) => from_interface_id(address).map_or_else(|| Err(Errno(libc::EHOSTUNREACH)), Ok),
    }
}

/// Reads the kernel's table, after a datagram that makes it resolve the address.
fn resolve(source: IpAddr, peer: IpAddr) -> Result<Mac> {
    let known = || lookup(&fs::read_to_string("/proc/net/arp").unwrap_or_default(), peer);
    if let Some(mac) = known() {
        return Ok(mac);
    }
    let probe = UdpSocket::bind((source, 0)).and_then(|socket| socket.send_to(&[], (peer, DISCARD_PORT)));
    probe.map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EHOSTUNREACH)))?;
    for _ in 0..ATTEMPTS {
        sleep(PAUSE);
        if let Some(mac) = known() {
            return Ok(mac);
        }
    }
    Err(Errno(libc::EHOSTUNREACH))
}

/// The complete entry of an address in `/proc/net/arp`: address, type, flags, Ethernet address, mask, interface.
fn lookup(table: &str, peer: IpAddr) -> Option<Mac> {
    let peer = peer.to_string();
    table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).find_map(
        |fields| match fields[..] {
            [address, _, flags, mac, ..] if address == peer && flags != "0x0" => parse(mac),
            _ => None,
        },
    )
}

fn parse(text: &str) -> Option<Mac> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

/// The Ethernet address from which a link-local address was formed (RFC 4291, appendix A).
fn from_interface_id(address: Ipv6Addr) -> Option<Mac> {
    let raw = address.octets();
    let made = address.is_unicast_link_local() && raw[11..13] == [0xff, 0xfe];
    made.then(|| [raw[8] ^ 2, raw[9], raw[10], raw[13], raw[14], raw[15]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_entries_of_the_table_are_found() {
        let table = "IP address HW type Flags HW address Mask Device\n\
            192.0.2.1 0x1 0x2 02:00:00:00:00:07 * eth0\n\
            192.0.2.2 0x1 0x0 00:00:00:00:00:00 * eth0\n";
        assert_eq!(lookup(table, IpAddr::from([192, 0, 2, 1])), Some([2, 0, 0, 0, 0, 7]));
        assert_eq!(lookup(table, IpAddr::from([192, 0, 2, 2])), None);
        assert_eq!(lookup("", IpAddr::from([192, 0, 2, 1])), None);
    }

    #[test]
    fn link_local_addresses_contain_the_ethernet_address() {
        let address: Ipv6Addr = "fe80::a8bb:ccff:fedd:eeff".parse().expect("an address");
        assert_eq!(from_interface_id(address), Some([0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff]));
        assert_eq!(from_interface_id("2001:db8::1".parse().expect("an address")), None);
    }

    #[test]
    fn only_six_bytes_are_an_address() {
        assert_eq!(parse("01:02:03:04:05:06"), Some([1, 2, 3, 4, 5, 6]));
        assert_eq!(parse("01:02:03:04:05"), None);
        assert_eq!(parse("01:02:03:04:05:06:07"), None);
        assert_eq!(parse("xx:02:03:04:05:06"), None);
    }
}
