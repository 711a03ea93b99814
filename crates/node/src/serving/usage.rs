//! Counters of a client's requests, for display.

use std::collections::HashMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use terrace_access::proto::Status;
use terrace_tier::{Histogram, LatencyStats};

/// A client's counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStats {
    /// Its address, and the number of its end of the control queue pair.
    pub client: String,
    /// One-sided requests that the NIC has received from it: READs, WRITEs, atomics, flushes.
    pub one_sided: u64,
    /// How often the NIC had memory fetched or written back for one of them; more than once for long ones.
    pub fetched: u64,
    /// Its requests by message, by region.
    pub regions: Vec<ClientRegionStats>,
}

/// A client's requests by message for one region: for memory that it knows or has found to be absent, or for all, by
/// mode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientRegionStats {
    /// Its name, or its rkey when it has none.
    pub region: String,
    /// Requests to read.
    pub reads: u64,
    /// Requests to write.
    pub writes: u64,
    /// Requests that were refused, or failed.
    pub failed: u64,
    /// Bytes of reads that have ended.
    pub bytes_read: u64,
    /// Bytes of writes that have ended.
    pub bytes_written: u64,
    /// The time from a request's arrival to its answer.
    pub latency: LatencyStats,
}

/// A request, for counting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub rkey: u32,
    pub is_write: bool,
    pub len: u64,
    pub since: Instant,
}

impl Asked {
    /// A request that has just arrived.
    pub fn new(rkey: u32, is_write: bool, length: u32) -> Asked {
        Asked { rkey, is_write, len: length.into(), since: Instant::now() }
    }
}

/// A client's requests so far, by rkey.
#[derive(Default)]
pub(super) struct Usage(HashMap<u32, OfRegion>);

#[derive(Default)]
struct OfRegion {
    reads: u64,
    writes: u64,
    failed: u64,
    bytes_read: u64,
    bytes_written: u64,
    latency: Histogram,
}

impl Usage {
    /// A request has been answered.
    pub fn note(&mut self, asked: Asked, status: Status) {
        let region = self.0.entry(asked.rkey).or_default();
        let (count, bytes) = match asked.is_write {
            true => (&mut region.writes, &mut region.bytes_written),
            false => (&mut region.reads, &mut region.bytes_read),
        };
        *count += 1;
        match status {
            Status::Ok => *bytes += asked.len,
            _ => region.failed += 1,
        }
        region.latency.add(asked.since.elapsed());
    }

    /// The counters, in the order of the regions' names.
    pub fn read(&self, name: impl Fn(u32) -> Option<String>) -> Vec<ClientRegionStats> {
        let stats = |(&rkey, region): (&u32, &OfRegion)| ClientRegionStats {
            region: name(rkey).unwrap_or_else(|| format!("{rkey:#x}")),
            reads: region.reads,
            writes: region.writes,
            failed: region.failed,
            bytes_read: region.bytes_read,
            bytes_written: region.bytes_written,
            latency: region.latency.read(),
        };
        let mut regions: Vec<ClientRegionStats> = self.0.iter().map(stats).collect();
        regions.sort_by(|one, other| one.region.cmp(&other.region));
        regions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_region_and_by_how_they_ended() {
        let mut usage = Usage::default();
        let mut note = |rkey, is_write, status| {
            usage.note(Asked { rkey, is_write, len: 100, since: Instant::now() }, status);
        };
        note(1, false, Status::Ok);
        note(1, true, Status::Ok);
        note(1, true, Status::OutOfRange);
        note(2, false, Status::Ok);
        let regions = usage.read(|rkey| (rkey == 2).then(|| "table".to_owned()));
        assert_eq!(regions.len(), 2);
        assert_eq!((regions[0].region.as_str(), regions[1].region.as_str()), ("0x1", "table"));
        let first = &regions[0];
        assert_eq!((first.reads, first.writes, first.failed), (1, 2, 1));
        assert_eq!((first.bytes_read, first.bytes_written, first.latency.count), (100, 100, 3));
    }
}
