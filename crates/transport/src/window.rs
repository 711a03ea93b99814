//! Congestion control: a window over the bytes in flight, reduced by loss and by congestion notifications, grown by
//! acknowledgements. RoCEv2 leaves the algorithm to the implementation. The aim here is not to overrun a socket's
//! receive buffer, the scarcest resource of a software NIC, for long.

/// Bytes charged for a packet besides its payload, so that a flood of small packets fills the window too: a
/// kernel's socket buffer charges hundreds of bytes for the smallest datagram.
pub(crate) const PACKET_OVERHEAD: u64 = 512;

/// The window never falls below this many full packets: fewer would make every loss wait for the timer.
const FLOOR_PACKETS: u64 = 4;

#[derive(Debug)]
pub(crate) struct Window {
    limit: u64,
    current: u64,
    /// Bytes acknowledged since the window last grew.
    credit: u64,
}

impl Window {
    pub(crate) fn new(limit_bytes: u32) -> Window {
        let limit = u64::from(limit_bytes).max(FLOOR_PACKETS * (256 + PACKET_OVERHEAD));
        Window { limit, current: limit, credit: 0 }
    }

    /// Bytes that may be in flight now.
    pub(crate) fn bytes(&self) -> u64 {
        self.current
    }

    /// Whether `cost` more bytes fit beside those in flight. One packet always may be in flight.
    pub(crate) fn admits(&self, in_flight: u64, cost: u64) -> bool {
        in_flight == 0 || in_flight + cost <= self.current
    }

    /// Grows by one packet for each window's worth of acknowledged bytes.
    pub(crate) fn on_acknowledged(&mut self, bytes: u64, mtu: u64) {
        if self.current == self.limit {
            return;
        }
        self.credit += bytes;
        if self.credit >= self.current {
            self.credit = 0;
            self.current = (self.current + mtu + PACKET_OVERHEAD).min(self.limit);
        }
    }

    /// Halves after a loss or a congestion notification.
    pub(crate) fn on_congestion(&mut self, mtu: u64) {
        let floor = (FLOOR_PACKETS * (mtu + PACKET_OVERHEAD)).min(self.limit);
        self.current = (self.current / 2).max(floor);
        self.credit = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_on_loss_and_recovers_with_acknowledgements() {
        let mut window = Window::new(256 * 1024);
        window.on_congestion(4096);
        assert_eq!(window.bytes(), 128 * 1024);
        for _ in 0..1000 {
            window.on_acknowledged(64 * 1024, 4096);
        }
        assert_eq!(window.bytes(), 256 * 1024);
    }

    #[test]
    fn keeps_a_floor_and_admits_one_packet_whatever_its_size() {
        let mut window = Window::new(256 * 1024);
        for _ in 0..100 {
            window.on_congestion(4096);
        }
        assert_eq!(window.bytes(), 4 * (4096 + PACKET_OVERHEAD));
        assert!(window.admits(0, u64::MAX / 2));
        assert!(!window.admits(1, window.bytes()));
    }
}
