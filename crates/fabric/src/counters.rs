//! Counters of a port.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::Serialize;

/// Counters of a port. Relaxed atomics: each value is exact, but a snapshot is not atomic.
#[derive(Debug, Default)]
pub struct PortCounters {
    /// Sent packets.
    pub tx: TxCounters,
    /// Received packets.
    pub rx: RxCounters,
}

/// Counters of the sending side, on separate cache lines, because several threads write them.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct TxCounters {
    /// Packets sent.
    pub packets: AtomicU64,
    /// Bytes of those packets from the BTH to the ICRC.
    pub bytes: AtomicU64,
    /// System calls (or simulated ones) for sending.
    pub calls: AtomicU64,
    /// Sends that would have blocked.
    pub would_block: AtomicU64,
    /// Packets lost because a send failed for any other reason.
    pub send_errors: AtomicU64,
}

/// Counters of the receiving side, written by one thread at a time.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct RxCounters {
    /// Packets with a good ICRC.
    pub packets: AtomicU64,
    /// Bytes of those packets from the BTH to the ICRC.
    pub bytes: AtomicU64,
    /// System calls that returned a datagram.
    pub calls: AtomicU64,
    /// Packets whose ICRC does not match their bytes and addresses. Dropped.
    pub bad_icrc: AtomicU64,
    /// Packets too short to hold a BTH and an ICRC, or longer than the receive buffer. Dropped.
    pub truncated: AtomicU64,
    /// Datagrams that the kernel dropped because the receive buffer was full.
    pub overflows: AtomicU64,
    /// System calls that failed for a reason other than an empty socket.
    pub receive_errors: AtomicU64,
}

/// The values of [`PortCounters`] at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[allow(missing_docs)] // The names are those of the counters above.
pub struct CountersSnapshot {
    pub tx_packets: u64,
    pub tx_bytes: u64,
    pub tx_calls: u64,
    pub tx_would_block: u64,
    pub send_errors: u64,
    pub rx_packets: u64,
    pub rx_bytes: u64,
    pub rx_calls: u64,
    pub bad_icrc: u64,
    pub truncated: u64,
    pub rx_overflows: u64,
    pub receive_errors: u64,
}

impl PortCounters {
    /// Reads all counters.
    pub fn snapshot(&self) -> CountersSnapshot {
        CountersSnapshot {
            tx_packets: self.tx.packets.load(Relaxed),
            tx_bytes: self.tx.bytes.load(Relaxed),
            tx_calls: self.tx.calls.load(Relaxed),
            tx_would_block: self.tx.would_block.load(Relaxed),
            send_errors: self.tx.send_errors.load(Relaxed),
            rx_packets: self.rx.packets.load(Relaxed),
            rx_bytes: self.rx.bytes.load(Relaxed),
            rx_calls: self.rx.calls.load(Relaxed),
            bad_icrc: self.rx.bad_icrc.load(Relaxed),
            truncated: self.rx.truncated.load(Relaxed),
            rx_overflows: self.rx.overflows.load(Relaxed),
            receive_errors: self.rx.receive_errors.load(Relaxed),
        }
    }
}

/// Adds to a counter.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Relaxed);
}
