//! Exit statuses.

use terrace_fabric::udp;
use terrace_nic::OpenError;

/// The exit status for a wrong command line. The parser of the command line has the same.
pub const USAGE: u8 = 2;

/// The exit status of a command other than `run`.
pub fn usage_or_1(is_usage: bool) -> u8 {
    if is_usage { USAGE } else { 1 }
}

/// Whether address or path MTU of a port are wrong on every machine.
pub fn is_usage_of_port(error: &OpenError) -> bool {
    matches!(error, OpenError::Udp(error) if is_usage_of_udp(error))
}

/// The same, for a port of which no device was made.
pub fn is_usage_of_udp(error: &udp::OpenError) -> bool {
    matches!(error, udp::OpenError::NotUnicast { .. } | udp::OpenError::BadMtu { .. })
}
