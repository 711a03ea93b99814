//! How a thread polls while operations are in flight.

use std::time::{Duration, Instant};

/// How long a thread polls without a result before it lets others run in between, and before it sleeps: a sleep takes longer than
/// most results do.
const POLL_TIME: Duration = Duration::from_micros(50);
const YIELD_TIME: Duration = Duration::from_micros(500);
/// It sleeps for this part of the time without a result, so that a result is not found much later than it came.
const SLEEP_PART: u32 = 4;
/// The longest of these sleeps.
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// When a thread that polls has had a result.
///
/// The thread may have real-time priority: ordinary threads get its processor when it sleeps, and not when it yields. On a machine
/// with one processor those have to run by which the results come.
pub(crate) struct Polling {
    last_progress: Instant,
}

impl Polling {
    pub(crate) fn begin() -> Polling {
        Polling { last_progress: Instant::now() }
    }

    /// Lets other threads run, if there has been no result for some time, or returns how long the thread is to sleep before it polls
    /// again, unless it is woken.
    pub(crate) fn pause(&mut self, now: Instant, has_progressed: bool) -> Duration {
        if has_progressed {
            self.last_progress = now;
        }
        match now.saturating_duration_since(self.last_progress) {
            without_result if without_result < POLL_TIME => Duration::ZERO,
            without_result if without_result < YIELD_TIME => {
                std::thread::yield_now();
                Duration::ZERO
            }
            without_result => (without_result / SLEEP_PART).min(SLEEP_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_grow_with_the_time_without_a_result() {
        let mut polling = Polling::begin();
        let start = Instant::now() + POLL_TIME;
        assert_eq!(polling.pause(start, true), Duration::ZERO);
        let mut sleep_after = |us| polling.pause(start + Duration::from_micros(us), false).as_micros();
        assert_eq!([0, 49, 499, 500, 2_000, 60_000_000].map(&mut sleep_after), [0, 0, 0, 125, 500, 1_000]);
        assert_eq!(polling.pause(start + Duration::from_secs(60), true), Duration::ZERO);
        assert_eq!(polling.pause(start + Duration::from_secs(60), false), Duration::ZERO);
    }
}
