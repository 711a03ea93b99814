//! What an access costs: processor time at both ends, and pages of the file that are read or written.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::test_harness::{ServerCounts, TestServer};

/// The most that the time between two samples differs from the measured time, as a share of it.
const LATE_MAX: f64 = 0.1;

/// Counters of both ends at one time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// The server's counters.
    counts: Option<ServerCounts>,
    /// When all counters had been read. On a busy machine that is late.
    at: Option<Instant>,
    server_time: Option<Duration>,
    client_time: Option<Duration>,
}

impl Sample {
    /// The counters now. This process contains the clients.
    pub fn take(server: &dyn TestServer) -> Sample {
        Sample {
            counts: server.counts(),
            server_time: server.processor_time(),
            client_time: Some(own_time()),
            at: Some(Instant::now()),
        }
    }
}

/// Whether two samples are of the beginning and the end of the measured time.
fn are_timely(before: &Sample, after: &Sample, measured: Duration) -> bool {
    before.at.zip(after.at).is_some_and(|(before, after)| {
        let window = after.saturating_duration_since(before).as_secs_f64();
        (window - measured.as_secs_f64()).abs() <= LATE_MAX * measured.as_secs_f64()
    })
}

/// The server's counters at the beginning and at the end of the measured time; `None` if it has none, or they were read
/// too late to be of that time.
pub fn counts_of(
    before: &Sample,
    after: &Sample,
    measured: Duration,
) -> Option<(ServerCounts, ServerCounts)> {
    before.counts.zip(after.counts).filter(|_| are_timely(before, after, measured))
}

/// The processor time of this process, threads that have ended included: clients end with the measured time.
fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// The costs of an access, on average. Each is `None` where it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Costs {
    /// Processor time of the server, all of its threads, in microseconds.
    pub server_us: Option<f64>,
    /// Processor time of the clients, in microseconds. It includes the verification of what they read.
    pub client_us: Option<f64>,
    /// Pages of the region's file that were read or written.
    pub ios: Option<f64>,
}

impl Costs {
    /// The costs of `accesses` accesses between two samples, of the beginning and the end of the measured time. None is known
    /// if the samples are late.
    pub fn between(before: &Sample, after: &Sample, accesses: u64, measured: Duration) -> Costs {
        if accesses == 0 || !are_timely(before, after, measured) {
            return Costs::default();
        }
        let each = |total: f64| total / accesses as f64;
        let time = |before: Option<Duration>, after: Option<Duration>| {
            Some(each(after?.saturating_sub(before?).as_secs_f64() * 1e6))
        };
        let ios = before.counts.zip(after.counts).and_then(|(before, after)| after.ios_since(before));
        Costs {
            server_us: time(before.server_time, after.server_time),
            client_us: time(before.client_time, after.client_time),
            ios: ios.map(|ios| each(ios as f64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn sample(at: Instant, micros: u64, ios: u64) -> Sample {
        Sample {
            counts: Some(ServerCounts { misses: 0, ios: Some(ios), dirty_bytes: None }),
            server_time: Some(Duration::from_micros(micros)),
            client_time: None,
            at: Some(at),
        }
    }

    #[test]
    fn costs_are_of_one_access() {
        let begin = Instant::now();
        let (before, after) = (sample(begin, 100, 7), sample(begin + SECOND, 600, 57));
        let costs = Costs::between(&before, &after, 200, SECOND);
        assert_eq!(costs, Costs { server_us: Some(2.5), client_us: None, ios: Some(0.25) });
        assert_eq!(Costs::between(&before, &after, 0, SECOND), Costs::default());
        assert_eq!(Costs::between(&Sample::default(), &after, 1, SECOND), Costs::default());
    }

    #[test]
    fn late_samples_are_of_no_use() {
        let begin = Instant::now();
        let after = sample(begin + SECOND, 600, 57);
        for (late_ms, is_known) in [(0, true), (90, true), (110, false), (999, false)] {
            let before = sample(begin + Duration::from_millis(late_ms), 100, 7);
            let costs = Costs::between(&before, &after, 200, SECOND);
            assert_eq!(costs != Costs::default(), is_known, "{late_ms} ms");
        }
    }
}
