//! Intervals, attempts and timeouts.

/// Intervals in nanoseconds, and numbers of attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The interval before the first retransmission; each later interval is twice the previous one.
    pub first_interval_ns: u64,
    /// Upper bound of the intervals.
    pub interval_ns_max: u64,
    /// Transmissions of a REQ, a REP or a SIDR_REQ.
    pub attempts: u32,
    /// Transmissions of a DREQ.
    pub dreq_attempts: u32,
    /// Duration of TIME_WAIT: the IDs of an ended connection stay reserved, and late messages are still answered.
    pub time_wait_ns: u64,
    /// Interval of keepalive probes of an established connection. Jitter shortens it by up to a quarter.
    pub keepalive_ns: u64,
    /// Upper bound of the timeout that a peer's MRA can request.
    pub mra_timeout_ns_max: u64,
}

impl Default for Timing {
    /// The attempts to reach an unresponsive peer end after about half a minute.
    fn default() -> Timing {
        Timing {
            first_interval_ns: 250_000_000,
            interval_ns_max: 4_000_000_000,
            attempts: 10,
            dreq_attempts: 7,
            time_wait_ns: 1_000_000_000,
            keepalive_ns: 20_000_000_000,
            mra_timeout_ns_max: 120_000_000_000,
        }
    }
}

/// The time of a code in CM messages: 4.096 µs · 2^n.
pub(crate) fn code_to_ns(code: u8) -> u64 {
    4096 << code.min(31)
}

/// Timeout in our MRAs: 69 seconds, as in the kernel's. Programs may take long to accept.
pub(crate) const MRA_TIMEOUT_CODE: u8 = 24;

/// Response timeouts in our REQs: 4.3 seconds, as in the kernel's.
pub(crate) const RESPONSE_CODE: u8 = 20;

/// Retry count in our REQs: the most that the field can hold.
pub(crate) const RETRIES_CODE: u8 = 15;
