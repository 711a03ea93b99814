//! The sockets of keepalive probes. The kernel reports an ICMP error to the socket that has sent the probe.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use terrace_nic::Probe;
use terrace_wire::Time;

/// Time after which a probe's socket is closed.
const PROBE_TIMEOUT_NS: u64 = 1_000_000_000;

/// Time after which another probe to the same peer gets a socket. An error concerns all connections to a peer, which are probed together; but a
/// probe that a process received just before its end brings none, so the next one has to be noticed.
const REPLACED_AFTER_NS: u64 = 100_000_000;

/// Most sockets. ICMP errors of further probes are not noticed.
const PROBES_MAX: usize = 32;

/// A probe that may still fail with an ICMP error.
struct Sent<P> {
    probe: P,
    peer: SocketAddr,
    at: Time,
}

/// The probes of a process: at most one for each peer.
pub struct Probes<P = Probe>(Vec<Sent<P>>);

impl<P> Default for Probes<P> {
    fn default() -> Probes<P> {
        Probes(Vec::new())
    }
}

impl<P> Probes<P> {
    /// Whether a probe that is sent to this peer now is to have a socket.
    pub fn wants(&self, peer: SocketAddr, now: Time) -> bool {
        match self.0.iter().find(|sent| sent.peer == peer) {
            Some(sent) => sent.at.after_ns(REPLACED_AFTER_NS) <= now,
            None => self.0.len() < PROBES_MAX,
        }
    }

    /// Adds a probe in place of an earlier one to the same peer.
    pub fn add(&mut self, probe: P, peer: SocketAddr, now: Time) {
        self.0.retain(|sent| sent.peer != peer);
        self.0.push(Sent { probe, peer, at: now });
    }

    /// When the first of them expires.
    pub fn deadline(&self) -> Option<Time> {
        self.0.iter().map(|sent| sent.at.after_ns(PROBE_TIMEOUT_NS)).min()
    }

    /// Drops the probes that have failed or expired. Returns the peers whose port is closed.
    fn take_failed(&mut self, now: Time, error_of: impl Fn(&P) -> Option<io::Error>) -> Vec<SocketAddr> {
        let mut refused = Vec::new();
        self.0.retain(|sent| {
            let error = error_of(&sent.probe);
            if error.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
                refused.push(sent.peer);
            }
            error.is_none() && sent.at.after_ns(PROBE_TIMEOUT_NS) > now
        });
        refused
    }
}

impl Probes {
    /// The descriptors, which report `POLLERR` after an ICMP error.
    pub fn fds(&self) -> Vec<RawFd> {
        self.0.iter().map(|sent| sent.probe.as_fd().as_raw_fd()).collect()
    }

    /// Drops the probes that have failed or expired. Returns the peers whose port is closed.
    pub fn take_refused(&mut self, now: Time) -> Vec<SocketAddr> {
        self.take_failed(now, Probe::take_error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn refused(_: &u8) -> Option<io::Error> {
        Some(io::ErrorKind::ConnectionRefused.into())
    }

    #[test]
    fn the_next_probe_of_a_peer_is_noticed_though_the_first_one_brought_no_error() {
        let mut probes = Probes::<u8>::default();
        probes.add(1, peer(1), Time(0));
        assert!(!probes.wants(peer(1), Time(REPLACED_AFTER_NS - 1)), "connections are probed together");
        let next = Time(REPLACED_AFTER_NS);
        assert!(probes.wants(peer(1), next));
        probes.add(2, peer(1), next);
        assert_eq!(probes.deadline(), Some(next.after_ns(PROBE_TIMEOUT_NS)));
        assert_eq!(probes.take_failed(next, |_| None), []);
        assert_eq!(probes.take_failed(next, refused), [peer(1)], "a peer has one socket");
        assert_eq!(probes.take_failed(next, refused), [], "which has one error");
    }

    #[test]
    fn the_sockets_are_limited_and_expire() {
        let mut probes = Probes::<u8>::default();
        for port in 0..PROBES_MAX as u16 {
            assert!(probes.wants(peer(port), Time(0)));
            probes.add(0, peer(port), Time(0));
        }
        assert!(!probes.wants(peer(u16::MAX), Time(0)));
        assert_eq!(probes.take_failed(Time(PROBE_TIMEOUT_NS), |_| None), []);
        assert!(probes.wants(peer(u16::MAX), Time(PROBE_TIMEOUT_NS)));
    }
}
