//! The progress line, with the current step and the time left.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::runner::Clock;

/// Reports progress on standard error: on a terminal one line that is overwritten, elsewhere a line for each point.
pub struct Progress {
    bar: ProgressBar,
    is_terminal: bool,
    count: usize,
    done: usize,
    clock: Clock,
    estimates: Vec<Duration>,
}

impl Progress {
    /// A progress line for points with these estimated times.
    pub fn new(estimates: Vec<Duration>) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(estimates.len() as u64), ProgressDrawTarget::stderr());
        // The template is constant; if it were wrong, the default would do.
        if let Ok(style) = ProgressStyle::with_template("[{elapsed_precise}] {bar:24} {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        let is_terminal = !bar.is_hidden();
        Progress {
            bar,
            is_terminal,
            count: estimates.len(),
            done: 0,
            clock: Clock::new(&estimates),
            estimates,
        }
    }

    /// Begins a point.
    pub fn begin(&self, what: &str) {
        self.bar.set_message(self.line(what));
    }

    fn line(&self, what: &str) -> String {
        format!("{}/{} {what}, {} left", self.done + 1, self.count, show(self.clock.left()))
    }

    /// Ends the point; `result` is one line.
    pub fn end(&mut self, what: &str, result: &str) {
        if let Some(&estimate) = self.estimates.get(self.done) {
            self.clock.advance(estimate);
        }
        self.done += 1;
        self.bar.set_position(self.done as u64);
        if !self.is_terminal {
            let left = show(self.clock.left());
            eprintln!("bench: {}/{} {what}: {result}, {left} left", self.done, self.count);
        }
    }

    /// Prints a line that stays on the screen.
    pub fn say(&self, text: &str) {
        match self.is_terminal {
            true => self.bar.suspend(|| eprintln!("bench: {text}")),
            false => eprintln!("bench: {text}"),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// A progress line for one long step, measured in bytes.
pub struct Step {
    bar: ProgressBar,
    begun: Instant,
}

impl Step {
    /// A step of `total` bytes.
    pub fn new(what: &str, total: u64) -> Step {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{msg} {bar:24} {bytes} of {total_bytes}, {eta} left")
        {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        Step { bar, begun: Instant::now() }
    }

    /// Sets the bytes done.
    pub fn at(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    /// Ends the step, and returns its duration.
    pub fn end(self) -> Duration {
        self.bar.finish_and_clear();
        self.begun.elapsed()
    }
}

/// Formats a time: `95 s`, `12 min`.
fn show(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 0..=119 => format!("{seconds} s"),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        assert_eq!(show(Duration::from_secs(95)), "95 s");
        assert_eq!(show(Duration::from_secs(700)), "12 min");
    }

    #[test]
    fn the_line_counts_points_and_time() {
        let mut progress = Progress::new(vec![Duration::from_secs(60); 4]);
        assert_eq!(progress.line("term 4K"), "1/4 term 4K, 4 min left");
        progress.end("term 4K", "ok");
        assert!(progress.line("pin 4K").starts_with("2/4 pin 4K, "));
    }
}
