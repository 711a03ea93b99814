//! The sources of a queue pair's packets, for a check without its lock.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use terrace_transport::may_come_from;

/// In place of a port: packets may come from nowhere, or from anywhere.
const NOWHERE: u32 = u32::MAX;
const ANYWHERE: u32 = NOWHERE - 1;

/// The address and port of a queue pair's peer. Changed under the queue pair's lock, where every packet that passes
/// here is checked again: one that is checked in the middle of a change may pass or be dropped.
#[derive(Debug)]
pub(crate) struct SourceFilter {
    /// As an IPv6 address.
    address: [AtomicU64; 2],
    port: AtomicU32,
    /// Packets that were dropped here.
    dropped: AtomicU64,
}

impl SourceFilter {
    /// For a queue pair without a peer. Datagrams may come from anywhere.
    pub fn new(takes_datagrams: bool) -> SourceFilter {
        SourceFilter {
            address: Default::default(),
            port: AtomicU32::new(if takes_datagrams { ANYWHERE } else { NOWHERE }),
            dropped: AtomicU64::new(0),
        }
    }

    /// Sets the peer that the queue pair is connected to, or none. Not for datagrams.
    pub fn set(&self, peer: Option<SocketAddr>) {
        let bits = match peer.map(|peer| peer.ip()) {
            None => 0,
            Some(IpAddr::V4(address)) => address.to_ipv6_mapped().to_bits(),
            Some(IpAddr::V6(address)) => address.to_bits(),
        };
        let port = peer.map_or(NOWHERE, |peer| peer.port().into());
        if (self.address(), self.port.load(Ordering::Relaxed)) == (bits, port) {
            // The same peer: its packets pass meanwhile.
            return;
        }
        self.port.store(NOWHERE, Ordering::Relaxed);
        self.address[0].store((bits >> 64) as u64, Ordering::Relaxed);
        self.address[1].store(bits as u64, Ordering::Relaxed);
        self.port.store(port, Ordering::Release);
    }

    #[inline]
    fn address(&self) -> u128 {
        let [high, low] = [0, 1].map(|half: usize| self.address[half].load(Ordering::Relaxed));
        u128::from(high) << 64 | u128::from(low)
    }

    /// Whether a packet with this source may be for the queue pair. Counts it otherwise.
    #[inline]
    pub fn admits(&self, source: SocketAddr) -> bool {
        let admitted = match self.port.load(Ordering::Acquire) {
            NOWHERE => false,
            ANYWHERE => true,
            port => {
                let peer = SocketAddr::new(Ipv6Addr::from_bits(self.address()).into(), port as u16);
                may_come_from(source, peer)
            }
        };
        if !admitted {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        admitted
    }

    /// Packets that were dropped here.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}
