//! How a thread polls while operations are in flight.

use std::time::{Duration, Instant};

/// How long a thread polls without a result before it lets others run.
const POLL_TIME: Duration = Duration::from_micros(50);

/// When a thread that polls has had a result.
pub(crate) struct Polling {
    last_progress: Instant,
}

impl Polling {
    pub(crate) fn begin() -> Polling {
        Polling { last_progress: Instant::now() }
    }

    /// Lets other threads run, if there has been no result for some time.
    pub(crate) fn pause(&mut self, now: Instant, has_progressed: bool) {
        if has_progressed {
            self.last_progress = now;
        } else if now - self.last_progress > POLL_TIME {
            std::thread::yield_now();
        }
    }
}
