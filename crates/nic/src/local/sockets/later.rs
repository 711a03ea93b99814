//! Commands that could not be carried out when they came: a peer's socket or backlog is full, or a descriptor is missing.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::local::Command;

/// How long after its first attempt a command is tried again.
const FIRST: Duration = Duration::from_millis(10);
/// Each further attempt comes after twice the time, but not after more than this.
const LONGEST: Duration = Duration::from_secs(10);

/// When a command is tried again.
#[derive(Debug)]
struct Attempt {
    delay: Duration,
    due: Instant,
}

/// The commands that are tried again, each once.
#[derive(Debug, Default)]
pub(super) struct Later(HashMap<Command, Attempt>);

impl Later {
    /// Has a command tried again: soon, or if it was tried after `delay`, after twice that time.
    pub fn add(&mut self, command: Command, delay: Option<Duration>, now: Instant) {
        let delay = delay.map_or(FIRST, |delay| (2 * delay).min(LONGEST));
        self.0.entry(command).or_insert(Attempt { delay, due: now + delay });
    }

    /// Whether a command is going to be tried again.
    pub fn contains(&self, command: &Command) -> bool {
        self.0.contains_key(command)
    }

    /// Takes the commands that are due, each with the time that it has waited.
    pub fn take_due(&mut self, now: Instant) -> Vec<(Command, Duration)> {
        let due = self.0.extract_if(|_, attempt| attempt.due <= now);
        due.map(|(command, attempt)| (command, attempt.delay)).collect()
    }

    /// How long it is until the next one is due; `None` if there is none.
    pub fn until_next(&self, now: Instant) -> Option<Duration> {
        self.0.values().map(|attempt| attempt.due.saturating_duration_since(now)).min()
    }
}

#[cfg(test)]
mod tests {
    use terrace_shm::Version;

    use super::*;

    #[test]
    fn a_command_is_tried_after_ever_longer_times() {
        let start = Instant::now();
        let address = ([127, 0, 0, 1], 4791).into();
        let (connect, ask) = (Command::Connect(address), Command::Ask(address, 1, Version(2)));
        let mut later = Later::default();
        assert_eq!(later.until_next(start), None);
        later.add(connect, None, start);
        later.add(connect, None, start);
        later.add(ask, Some(Duration::from_secs(1)), start);
        assert_eq!(later.until_next(start), Some(FIRST));
        assert_eq!(later.take_due(start), []);
        assert!(later.contains(&ask));
        let mut now = start + FIRST;
        assert_eq!(later.take_due(now), [(connect, FIRST)], "once, although it was added twice");
        assert_eq!(later.until_next(now), Some(Duration::from_millis(1990)), "the question");
        let mut waited = FIRST;
        while waited < LONGEST {
            later.add(connect, Some(waited), now);
            now += LONGEST;
            let due = later.take_due(now);
            let (_, last) = *due.iter().find(|(command, _)| *command == connect).expect("due");
            assert!(last == 2 * waited || last == LONGEST);
            waited = last;
        }
    }
}
