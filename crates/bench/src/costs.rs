//! What an access costs: processor time at both ends, and pages of the file that are read or written.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::test_harness::{ServerCounts, TestServer};

/// Counters of both ends at one time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// The server's counters.
    pub counts: Option<ServerCounts>,
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
        }
    }
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
    /// The costs of `accesses` accesses between two samples.
    pub fn between(before: Sample, after: Sample, accesses: u64) -> Costs {
        if accesses == 0 {
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

    #[test]
    fn costs_are_of_one_access() {
        let sample = |micros, ios| Sample {
            counts: Some(ServerCounts { misses: 0, ios: Some(ios), dirty_bytes: None }),
            server_time: Some(Duration::from_micros(micros)),
            client_time: None,
        };
        let costs = Costs::between(sample(100, 7), sample(600, 57), 200);
        assert_eq!(costs, Costs { server_us: Some(2.5), client_us: None, ios: Some(0.25) });
        assert_eq!(Costs::between(sample(0, 0), sample(1, 1), 0), Costs::default());
        let without_server = Costs::between(Sample::default(), sample(1, 1), 1);
        assert_eq!(without_server, Costs::default());
    }
}
