//! Exit statuses.

/// The exit status for a wrong command line. The parser of the command line has the same.
pub const USAGE: u8 = 2;

/// The exit status of a command other than `run`.
pub fn usage_or_1(is_usage: bool) -> u8 {
    if is_usage { USAGE } else { 1 }
}
