//! What the processes report at one time, and rates between two times.

use std::io;
use std::time::Instant;

use terrace_nic::stat::{Counts, DeviceSnapshot, fetch_all, processes};

use crate::stat::program_name;

/// A process that runs with Terrace.
pub struct Process {
    pub pid: u32,
    pub program: String,
    /// Its devices, or why it does not answer.
    pub answer: Result<Vec<DeviceSnapshot>, String>,
}

/// What all processes report.
pub struct Sample {
    pub at: Instant,
    pub processes: Vec<Process>,
}

impl Sample {
    /// Asks the processes, or one of them.
    ///
    /// # Errors
    /// When the kernel's list of sockets cannot be read.
    pub fn take(pid: Option<u32>) -> io::Result<Sample> {
        let mut pids = processes()?;
        pids.retain(|other| pid.is_none_or(|pid| pid == *other));
        let mut answers: Vec<Process> = fetch_all(&pids).into_iter().map(process).collect();
        // Without devices, the process has ended since it was listed.
        answers.retain(|process| !process.answer.as_ref().is_ok_and(Vec::is_empty));
        Ok(Sample { at: Instant::now(), processes: answers })
    }

    /// The devices of a process.
    pub fn devices(&self, pid: u32) -> &[DeviceSnapshot] {
        let process = self.processes.iter().find(|process| process.pid == pid);
        process.and_then(|process| process.answer.as_ref().ok()).map_or(&[], Vec::as_slice)
    }
}

fn process((pid, answer): (u32, io::Result<Vec<DeviceSnapshot>>)) -> Process {
    Process { pid, program: program_name(pid), answer: answer.map_err(|error| error.to_string()) }
}

/// How much a count has grown in a second.
pub fn rate(now: u64, before: Option<u64>, seconds: f64) -> Option<f64> {
    before.filter(|_| seconds > 0.0).map(|before| now.saturating_sub(before) as f64 / seconds)
}

/// A rate of a counter, if both samples have it.
pub fn rate_of(name: &str, now: &Counts, before: Option<&Counts>, seconds: f64) -> Option<f64> {
    rate(*now.get(name)?, before.and_then(|before| before.get(name).copied()), seconds)
}

/// A number in at most six characters; `-` without one.
pub fn short(number: Option<f64>) -> String {
    let Some(number) = number else { return "-".into() };
    let scaled = [(1e9, "G"), (1e6, "M"), (1e4, "k")].into_iter().find(|(least, _)| number >= *least);
    match scaled {
        // Thousands are written out up to 9999.
        Some((1e4, unit)) => format!("{:.1}{unit}", number / 1e3),
        Some((least, unit)) => format!("{:.1}{unit}", number / least),
        None if number < 10.0 && number.fract() != 0.0 => format!("{number:.1}"),
        None => format!("{number:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_need_two_samples() {
        assert_eq!(rate(30, Some(10), 2.0), Some(10.0));
        assert_eq!((rate(30, None, 2.0), rate(30, Some(10), 0.0)), (None, None));
        let counts = |value: u64| Counts::from([("a".to_owned(), value)]);
        assert_eq!(rate_of("a", &counts(9), Some(&counts(3)), 3.0), Some(2.0));
        assert_eq!(rate_of("b", &counts(9), Some(&counts(3)), 3.0), None);
        // A counter of a process that was replaced by another one with its number.
        assert_eq!(rate(3, Some(10), 1.0), Some(0.0));
    }

    #[test]
    fn numbers_are_short() {
        let texts = [0.0, 0.25, 9999.0, 12_345.0, 1.5e6, 2e9].map(|number| short(Some(number)));
        assert_eq!(texts, ["0", "0.2", "9999", "12.3k", "1.5M", "2.0G"]);
        assert_eq!(short(None), "-");
    }
}
