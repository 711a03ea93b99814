//! The rate limiter of unreliable services. Their packets are not acknowledged, so no window shows when the receiver
//! falls behind. On hardware the link holds the sender back; on UDP the receiver's socket buffer overflows. A device
//! therefore sends such packets no faster than a receiver with a processor of its own can follow, except for a short
//! burst.

use std::sync::atomic::{AtomicU64, Ordering};

use terrace_transport::Time;

/// A receiver's time for a packet besides its bytes, in nanoseconds.
const PACKET_NS: u64 = 600;

/// Bytes that a receiver takes in a nanosecond.
const BYTES_PER_NS: u64 = 2;

/// How far ahead of the rate a burst may run, in nanoseconds: about 70 packets of 4 KiB.
const BURST_NS: u64 = 200_000;

/// The rate that all queue pairs of a device share.
#[derive(Debug, Default)]
pub(crate) struct RateLimiter {
    /// When a receiver will have taken everything that was sent, in nanoseconds.
    done_at: AtomicU64,
}

impl RateLimiter {
    /// Reserves a packet of `len` bytes. Returns until when its queue pair has to wait, if the burst is used up.
    pub fn reserve(&self, now: Time, len: usize) -> Option<Time> {
        let cost_ns = PACKET_NS + len as u64 / BYTES_PER_NS;
        // Two threads that reserve at once may lose one reservation: a packet too many in the burst, and no more.
        let done_at = self.done_at.load(Ordering::Relaxed).max(now.0).saturating_add(cost_ns);
        self.done_at.store(done_at, Ordering::Relaxed);
        (done_at > now.0.saturating_add(BURST_NS)).then(|| Time(done_at - BURST_NS / 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_leaves_undelayed_and_the_rest_at_the_rate() {
        let limiter = RateLimiter::default();
        let mut now = Time(1_000_000);
        let mut packets = 0;
        while now < Time(101_000_000) {
            packets += 1;
            now = limiter.reserve(now, 4096).unwrap_or(now);
        }
        let paced = 100_000_000 / (PACKET_NS + 4096 / BYTES_PER_NS);
        assert!((paced..paced + 100).contains(&packets), "{packets} packets in 100 ms, {paced} at the rate");
    }

    #[test]
    fn an_idle_sender_may_burst_again() {
        let limiter = RateLimiter::default();
        assert!((0..60).all(|_| limiter.reserve(Time(0), 4096).is_none()));
        assert!((0..60).all(|_| limiter.reserve(Time(1_000_000), 4096).is_none()));
    }
}
