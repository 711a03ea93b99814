//! The signals that end a server in an orderly manner.

use nix::sys::signal::{SigSet, Signal};

/// Blocks SIGINT, SIGTERM, SIGHUP (unless it is ignored, as behind `nohup`) and `others`. To be called before threads
/// start, so that no thread receives them; the caller waits for them.
pub fn block(others: &[Signal]) -> SigSet {
    let mut signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    signals.extend(others.iter().copied());
    // A blocked signal waits for its receiver even if it is ignored.
    if !is_ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), Signal::SIGHUP) {
        signals.add(Signal::SIGHUP);
    }
    // Blocking existing signals cannot fail.
    let _ = signals.thread_block();
    signals
}

/// Whether the process with this `/proc/PID/status` ignores a signal.
fn is_ignored(status: &str, signal: Signal) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal as u32 - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_found_in_the_status() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000180000000\n";
        assert!(is_ignored(status, Signal::SIGHUP) && is_ignored(status, Signal::SIGPIPE));
        assert!(!is_ignored(status, Signal::SIGTERM) && !is_ignored("", Signal::SIGHUP));
    }
}
