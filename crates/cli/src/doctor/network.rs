//! The address, UDP at it, and the buffers of its sockets.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use terrace_fabric::Port;
use terrace_fabric::udp::{Buffers, UdpConfig, UdpPort};

use super::check::Check;

/// The UDP ports of the processes of an address.
const PORTS: std::ops::RangeInclusive<u16> = 4791..=5046;
/// How long a datagram over the loopback may take.
const ARRIVAL_TIMEOUT: Duration = Duration::from_millis(500);

pub fn checks(config: &UdpConfig) -> Vec<Check> {
    let mut checks = Vec::new();
    match UdpPort::open(config) {
        Ok(port) => {
            let addr = port.gids()[0].addr;
            // The port is free again before the trial of UDP takes it.
            let (udp_port, mtu) = (port.udp_port(), port.mtu_limit());
            drop(port);
            let meaning = format!("programs get {addr}, path MTU {mtu} bytes, and next UDP port {udp_port}");
            checks.push(Check::ok("address", meaning).necessary());
            checks.push(check_udp(addr).necessary());
        }
        Err(error) => {
            let advice = "give an address of this host by --addr, or bring an interface up";
            checks.push(
                Check::missing("address", format!("{error}; no program gets a device"), advice).necessary(),
            );
            checks
                .push(Check::missing("udp", "not tried, without an address", "see the address").necessary());
        }
    }
    checks.extend(check_buffers());
    checks
}

fn check_udp(addr: IpAddr) -> Check {
    match exchange(addr) {
        Ok(port) => {
            Check::ok("udp", format!("a datagram to {addr}, UDP port {port}, has arrived (from this host)"))
        }
        Err(error) => Check::missing(
            "udp",
            format!(
                "no datagram arrives at {addr}, UDP ports from 4791 up: {error}; peers cannot reach a program"
            ),
            "let the firewall pass UDP 4791 and the ports after it (nft list ruleset; iptables -S); if the loopback is \
             down: ip link set lo up",
        ),
    }
}

/// Sends a datagram to the first free port of programs, and waits for it. Returns the port.
fn exchange(addr: IpAddr) -> io::Result<u16> {
    let receiver = bind_first_free(addr)?;
    let to = receiver.local_addr()?;
    receiver.set_read_timeout(Some(ARRIVAL_TIMEOUT))?;
    // Link-local addresses have a scope, which the receiver's own address has, too.
    let mut from = to;
    from.set_port(0);
    UdpSocket::bind(from)?.send_to(b"terrace doctor", to)?;
    let mut bytes = [0; 64];
    match receiver.recv(&mut bytes) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("it was sent to port {} and is lost", to.port()),
        )),
        other => other.map(|_| to.port()),
    }
}

fn bind_first_free(addr: IpAddr) -> io::Result<UdpSocket> {
    let mut result = Err(io::ErrorKind::AddrInUse.into());
    for port in PORTS {
        result = UdpSocket::bind(SocketAddr::new(addr, port));
        if !matches!(&result, Err(error) if error.kind() == io::ErrorKind::AddrInUse) {
            break;
        }
    }
    result
}

fn check_buffers() -> Vec<Check> {
    let (granted, wanted) = match Buffers::granted() {
        Ok(granted) => (granted, Buffers::WANTED),
        // Without a socket there is no address either, and that check says why.
        Err(_) => return Vec::new(),
    };
    vec![
        check_buffer(
            "net.core.rmem_max",
            "receive",
            granted.receive_bytes,
            wanted.receive_bytes,
            "bursts are lost (rx_overflows), and sent again",
        ),
        check_buffer(
            "net.core.wmem_max",
            "send",
            granted.send_bytes,
            wanted.send_bytes,
            "senders wait more often",
        ),
    ]
}

fn check_buffer(name: &'static str, kind: &str, granted: usize, wanted: usize, consequence: &str) -> Check {
    if granted >= wanted {
        return Check::ok(name, format!("sockets get {kind} buffers of {} KiB", granted >> 10));
    }
    Check::limited(
        name,
        format!("sockets get {kind} buffers of {} of {} KiB: {consequence}", granted >> 10, wanted >> 10),
        format!("sysctl -w {name}={wanted}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::State;

    #[test]
    fn a_datagram_arrives_over_the_loopback() {
        assert_eq!(check_udp("127.0.0.1".parse().unwrap()).state, State::Ok);
        // An address of documentation, which no host has.
        assert_eq!(check_udp("192.0.2.1".parse().unwrap()).state, State::Missing);
    }

    #[test]
    fn a_small_buffer_is_a_limit() {
        let small = check_buffer("net.core.rmem_max", "receive", 200 << 10, 16 << 20, "bursts are lost");
        assert_eq!(small.meaning, "sockets get receive buffers of 200 of 16384 KiB: bursts are lost");
        assert_eq!(small.advice.as_deref(), Some("sysctl -w net.core.rmem_max=16777216"));
        assert_eq!(check_buffer("net.core.rmem_max", "receive", 16 << 20, 16 << 20, "").state, State::Ok);
    }
}
