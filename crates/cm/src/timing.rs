//! When things are sent again, and when they are given up.

/// How long to wait for what, in nanoseconds, and how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Before the first repetition; each later interval is twice the one before.
    pub first_interval_ns: u64,
    /// The longest interval.
    pub interval_ns_max: u64,
    /// How often a REQ or REP is sent, and a question about datagrams asked.
    pub attempts: u32,
    /// How often a DREQ is sent.
    pub goodbye_attempts: u32,
    /// How long the names of a connection that has ended are not used again, and what arrives late is still answered.
    pub time_wait_ns: u64,
    /// How often the peer of a connection that stands is asked whether it still has it; up to a quarter sooner.
    pub keepalive_ns: u64,
    /// The longest patience that a peer's MRA can ask for.
    pub patience_ns_max: u64,
}

impl Default for Timing {
    /// A peer that does not answer is given up after about half a minute.
    fn default() -> Timing {
        Timing {
            first_interval_ns: 250_000_000,
            interval_ns_max: 4_000_000_000,
            attempts: 10,
            goodbye_attempts: 7,
            time_wait_ns: 1_000_000_000,
            keepalive_ns: 20_000_000_000,
            patience_ns_max: 120_000_000_000,
        }
    }
}

/// The code of a time in datagrams of the class: 4.096 µs · 2^n.
pub(crate) fn code_to_ns(code: u8) -> u64 {
    4096 << code.min(31)
}

/// What an MRA of ours asks for: 69 seconds, as the kernel's does. Programs may think before they accept.
pub(crate) const PATIENCE_CODE: u8 = 24;

/// What our REQs promise and ask for: 4.3 seconds, as the kernel's do.
pub(crate) const RESPONSE_CODE: u8 = 20;

/// How often we say that we repeat: the most that the field has room for.
pub(crate) const RETRIES_CODE: u8 = 15;
