//! The progress line: the current point and the remaining time.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::runner::Clock;

/// Reports progress on standard error: on a terminal one line that is overwritten, elsewhere a line for each point.
pub struct Progress {
    line: ProgressBar,
    is_terminal: bool,
    count: usize,
    done: usize,
    clock: Clock,
    estimates: Vec<Duration>,
}

impl Progress {
    /// A progress line for points with these estimated times.
    pub fn new(estimates: Vec<Duration>) -> Progress {
        let line = ProgressBar::with_draw_target(Some(estimates.len() as u64), ProgressDrawTarget::stderr());
        // The template is constant and valid.
        if let Ok(style) = ProgressStyle::with_template("[{elapsed_precise}] {bar:24} {msg}") {
            line.set_style(style);
        }
        line.enable_steady_tick(Duration::from_millis(500));
        let is_terminal = !line.is_hidden();
        Progress {
            line,
            is_terminal,
            count: estimates.len(),
            done: 0,
            clock: Clock::new(&estimates),
            estimates,
        }
    }

    /// Begins a point.
    pub fn begin(&self, name: &str) {
        self.line.set_message(self.message(name));
    }

    fn message(&self, name: &str) -> String {
        format!("{}/{} {name}, {} left", self.done + 1, self.count, format_duration(self.clock.remaining()))
    }

    /// Ends the point. `result` is one line.
    pub fn end(&mut self, name: &str, result: &str) {
        if let Some(&estimate) = self.estimates.get(self.done) {
            self.clock.advance(estimate);
        }
        self.done += 1;
        self.line.set_position(self.done as u64);
        if !self.is_terminal {
            let left = format_duration(self.clock.remaining());
            eprintln!("bench: {}/{} {name}: {result}, {left} left", self.done, self.count);
        }
    }

    /// Prints a line above the progress line.
    pub fn print_line(&self, text: &str) {
        match self.is_terminal {
            true => self.line.suspend(|| eprintln!("bench: {text}")),
            false => eprintln!("bench: {text}"),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.line.finish_and_clear();
    }
}

/// A progress line for one long operation, measured in bytes.
pub struct ByteProgress {
    line: ProgressBar,
    begun: Instant,
}

impl ByteProgress {
    /// An operation of `total` bytes.
    pub fn new(name: &str, total: u64) -> ByteProgress {
        let line = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{msg} {bar:24} {bytes} of {total_bytes}, {eta} left")
        {
            line.set_style(style);
        }
        line.set_message(name.to_owned());
        ByteProgress { line, begun: Instant::now() }
    }

    /// Sets the bytes done.
    pub fn set_bytes(&self, bytes: u64) {
        self.line.set_position(bytes);
    }

    /// Ends the operation, and returns its duration.
    pub fn end(self) -> Duration {
        self.line.finish_and_clear();
        self.begun.elapsed()
    }
}

/// Formats a duration: `95 s`, `12 min`.
fn format_duration(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 0..=119 => format!("{seconds} s"),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_in_seconds_or_minutes() {
        assert_eq!(format_duration(Duration::from_secs(95)), "95 s");
        assert_eq!(format_duration(Duration::from_secs(700)), "12 min");
    }

    #[test]
    fn the_message_has_points_and_remaining_time() {
        let mut progress = Progress::new(vec![Duration::from_secs(60); 4]);
        assert_eq!(progress.message("term 4K"), "1/4 term 4K, 4 min left");
        progress.end("term 4K", "ok");
        assert!(progress.message("pin 4K").starts_with("2/4 pin 4K, "));
    }
}
