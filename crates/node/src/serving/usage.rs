//! Counters of a client's requests, for display.

use std::collections::HashMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use terrace_access::proto::Status;
use terrace_pages::{Histogram, LatencyStats};

/// A client's counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientStats {
    /// Its address, and the QPN of its end of the control queue pair.
    pub client: String,
    /// One-sided requests that the NIC has received from it: READs, WRITEs, atomics, flushes.
    pub one_sided: u64,
    /// Reads and writes of absent memory that the NIC requested from the pager for them; several for long requests.
    pub fetched: u64,
    /// Its RPCs, by region.
    pub regions: Vec<ClientRegionStats>,
}

/// A client's RPCs for one region: for absent memory, or for all memory, depending on the mode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientRegionStats {
    /// The region's name, or its rkey if it has none.
    pub region: String,
    /// Requests to read.
    pub reads: u64,
    /// Requests to write.
    pub writes: u64,
    /// Requests that were refused, or failed.
    pub failed: u64,
    /// Bytes of successful reads.
    pub bytes_read: u64,
    /// Bytes of successful writes.
    pub bytes_written: u64,
    /// The time from a request's arrival to its answer.
    pub latency: LatencyStats,
}

/// A request to count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub rkey: u32,
    pub is_write: bool,
    pub len: u64,
    pub since: Instant,
}

impl Request {
    /// A request that has just arrived.
    pub fn new(rkey: u32, is_write: bool, length: u32) -> Request {
        Request { rkey, is_write, len: length.into(), since: Instant::now() }
    }
}

/// The counters of a client's requests, by rkey.
#[derive(Default)]
pub(super) struct Usage(HashMap<u32, RegionCounters>);

#[derive(Default)]
struct RegionCounters {
    reads: u64,
    writes: u64,
    failed: u64,
    bytes_read: u64,
    bytes_written: u64,
    latency: Histogram,
}

impl Usage {
    /// Counts an answered request.
    pub fn count(&mut self, request: Request, status: Status) {
        let region = self.0.entry(request.rkey).or_default();
        let (requests, bytes) = match request.is_write {
            true => (&mut region.writes, &mut region.bytes_written),
            false => (&mut region.reads, &mut region.bytes_read),
        };
        *requests += 1;
        match status {
            Status::Ok => *bytes += request.len,
            _ => region.failed += 1,
        }
        region.latency.add(request.since.elapsed());
    }

    /// The counters, in the order of the regions' names.
    pub fn read(&self, name: impl Fn(u32) -> Option<String>) -> Vec<ClientRegionStats> {
        let stats = |(&rkey, region): (&u32, &RegionCounters)| ClientRegionStats {
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
    fn requests_are_counted_by_region_and_outcome() {
        let mut usage = Usage::default();
        let mut count = |rkey, is_write, status| {
            usage.count(Request { rkey, is_write, len: 100, since: Instant::now() }, status);
        };
        count(1, false, Status::Ok);
        count(1, true, Status::Ok);
        count(1, true, Status::OutOfRange);
        count(2, false, Status::Ok);
        let regions = usage.read(|rkey| (rkey == 2).then(|| "table".to_owned()));
        assert_eq!(regions.len(), 2);
        assert_eq!((regions[0].region.as_str(), regions[1].region.as_str()), ("0x1", "table"));
        let first = &regions[0];
        assert_eq!((first.reads, first.writes, first.failed), (1, 2, 1));
        assert_eq!((first.bytes_read, first.bytes_written, first.latency.count), (100, 100, 3));
    }
}
