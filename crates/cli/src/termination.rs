//! The signals that end a server in an orderly manner.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, poll};

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

/// A descriptor by which blocked signals come; it does not block.
pub fn descriptor(signals: &SigSet) -> io::Result<SignalFd> {
    Ok(SignalFd::with_flags(signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?)
}

/// Sleeps until a signal comes, or the other end of `pipe` is closed: then it returns `None`.
pub fn wait(signals: &SignalFd, pipe: BorrowedFd<'_>) -> Option<Signal> {
    loop {
        if let Ok(Some(received)) = signals.read_signal() {
            return Signal::try_from(received.ssi_signo as i32).ok();
        }
        let signals = signals.as_fd();
        let mut descriptors = [PollFd::new(&signals, PollFlags::IN), PollFd::new(&pipe, PollFlags::empty())];
        // It fails if a signal that is not blocked interrupts it.
        if poll(&mut descriptors, None).is_ok() && !descriptors[1].revents().is_empty() {
            return None;
        }
    }
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
    fn a_wait_ends_by_a_signal_or_by_the_end_of_the_pipe() {
        let signals = SigSet::from_iter([Signal::SIGUSR2]);
        signals.thread_block().unwrap();
        let descriptor = descriptor(&signals).unwrap();
        let (pipe, other_end) = io::pipe().unwrap();
        nix::sys::signal::raise(Signal::SIGUSR2).unwrap();
        assert_eq!(wait(&descriptor, pipe.as_fd()), Some(Signal::SIGUSR2));
        let closing = std::thread::spawn(move || drop(other_end));
        assert_eq!(wait(&descriptor, pipe.as_fd()), None);
        closing.join().unwrap();
    }

    #[test]
    fn ignored_signals_are_found_in_the_status() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000180000000\n";
        assert!(is_ignored(status, Signal::SIGHUP) && is_ignored(status, Signal::SIGPIPE));
        assert!(!is_ignored(status, Signal::SIGTERM) && !is_ignored("", Signal::SIGHUP));
    }
}
