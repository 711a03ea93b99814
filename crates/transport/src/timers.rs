//! The protocol's two timer encodings, and the backoff of the ACK timeout.

/// RNR NAK timer values in units of 10 µs, by the five-bit code of the syndrome (IBTA volume 1, 9.7.5).
const RNR_TIMER_10US: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// The RNR wait of this timer code, in nanoseconds.
pub fn rnr_timer_ns(code: u8) -> u64 {
    u64::from(RNR_TIMER_10US[usize::from(code & 0x1f)]) * 10_000
}

/// Shortest local ACK timeout in nanoseconds. The responder's process may have to be woken and scheduled first, which
/// takes milliseconds on a busy machine. Hardware has a higher floor for the same reason.
const ACK_TIMEOUT_FLOOR_NS: u64 = 8_000_000;

/// The local ACK timeout in nanoseconds: 4.096 µs * 2^exponent but at least 8 ms, or `None` for exponent 0, which
/// means never (IBTA volume 1, 9.9, which lets a NIC wait up to four times the configured timeout).
pub fn ack_timeout_ns(exponent: u8) -> Option<u64> {
    match exponent & 0x1f {
        0 => None,
        exponent => Some((4096 << exponent).max(ACK_TIMEOUT_FLOOR_NS)),
    }
}

/// Longest backoff after consecutive timeouts, unless the configured timeout is longer.
const BACKOFF_MAX_NS: u64 = 250_000_000;

/// Backoff after `timeout_count` consecutive timeouts of `timeout_ns`: twice the timeout after the first, and four
/// times, the most that IBTA allows, after more. The responder's process may share its processor with many others. Lost
/// packets are found at the first timeout or by a NAK.
pub(crate) fn backoff_ns(timeout_ns: u64, timeout_count: u8) -> u64 {
    (timeout_ns << timeout_count.min(2)).min(timeout_ns.max(BACKOFF_MAX_NS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_codes_span_ten_microseconds_to_655_milliseconds() {
        assert_eq!(rnr_timer_ns(1), 10_000);
        assert_eq!(rnr_timer_ns(0), 655_360_000);
        assert_eq!(rnr_timer_ns(12), 640_000);
        assert_eq!(rnr_timer_ns(31), 491_520_000);
    }

    #[test]
    fn backoff_grows_to_four_times_or_a_quarter_of_a_second() {
        let ms = 1_000_000;
        assert_eq!([0, 1, 2, 3, 7].map(|count| backoff_ns(8 * ms, count) / ms), [8, 16, 32, 32, 32]);
        assert_eq!([0, 1, 2, 3, 7].map(|count| backoff_ns(67 * ms, count) / ms), [67, 134, 250, 250, 250]);
        assert_eq!([0, 1, 7].map(|count| backoff_ns(1000 * ms, count) / ms), [1000; 3]);
    }

    #[test]
    fn ack_timeout_doubles_with_each_step() {
        assert_eq!(ack_timeout_ns(0), None);
        assert_eq!(ack_timeout_ns(1), Some(ACK_TIMEOUT_FLOOR_NS));
        assert_eq!(ack_timeout_ns(14), Some(67_108_864));
        assert_eq!(ack_timeout_ns(31), Some(4096 << 31));
    }
}
