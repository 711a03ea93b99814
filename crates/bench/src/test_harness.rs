//! What measurements run against: a server that is started for them, or memory of this process to try a plan out.

use std::sync::Arc;

use serde::Serialize;

use crate::plan::{Mode, Settings, Storage};
use crate::target::{Connect, MemoryTarget, SharedBytes};

/// What distinguishes one server from another. Points that agree in it can share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerSpec {
    /// `--mode`
    pub mode: Mode,
    /// Size of its region.
    pub region: u64,
    /// `--dram`
    pub dram: u64,
    /// Where the region's file lies.
    pub storage: Storage,
    /// Threads that serve RPCs.
    pub threads: usize,
    /// What its memory is filled with before the first measurement, where that would take too long otherwise.
    pub preload: Option<Preload>,
}

/// What a server's memory is filled with: the pages that these accesses meet most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preload {
    /// Bytes of each access.
    pub access_bytes: u64,
    /// The bits of Zipf's theta. It does not matter to what is hottest, but to what a measurement leaves in memory: those that
    /// differ in it do not share a server.
    theta_bits: u64,
}

impl ServerSpec {
    /// The server that a point needs.
    pub fn new(mode: Mode, settings: &Settings) -> ServerSpec {
        ServerSpec {
            mode,
            region: settings.region,
            dram: settings.dram_bytes(),
            storage: settings.storage,
            threads: settings.server_threads,
            // In the others the server decides what is in memory, and that soon. What is in tmpfs is in memory anyway.
            preload: (settings.preload
                && matches!(mode, Mode::Odp | Mode::Rpc | Mode::RpcBuffer)
                && settings.storage != Storage::Tmpfs)
                .then(|| Preload { access_bytes: settings.size, theta_bits: settings.theta.to_bits() }),
        }
    }
}

/// A server's counters since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerCounts {
    /// Accesses, each to one unit, that had to be carried out with the file: by mapping, buffered or direct IO.
    pub misses: u64,
}

impl ServerCounts {
    /// The share of `accesses` between `before` and this that were no misses; nothing when there were none. Clients know best how
    /// many accesses there were: the server does not see all that they do in the same place.
    pub fn hit_ratio(&self, before: ServerCounts, accesses: u64) -> Option<f64> {
        let misses = self.misses.saturating_sub(before.misses).min(accesses);
        (accesses > 0).then(|| 1.0 - misses as f64 / accesses as f64)
    }
}

/// Why there is no server; one line for people.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TestHarnessError(pub String);

/// A running server.
pub trait Served {
    /// Connections to its region.
    fn connect(&self) -> &dyn Connect;
    /// Its counters; nothing when it has none.
    fn counts(&self) -> Option<ServerCounts>;
    /// The most memory that it has held; nothing when that is not known.
    fn peak_bytes(&self) -> Option<u64>;
    /// What is known about its end, when it has ended although nobody asked it to.
    fn exit_status_text(&mut self) -> Option<String>;
}

/// Starts servers, one at a time.
pub trait TestHarness {
    /// Starts one. The one before has been dropped.
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn Served>, TestHarnessError>;
}

/// Memory of this process. The numbers mean nothing; plans, files and plots can be tried out.
#[derive(Default)]
pub struct Rehearsal {
    region: Option<SharedBytes>,
}

/// A region need not be as large as the plan's to try the plan out.
pub const REHEARSAL_REGION_BYTES: u64 = 64 << 20;

struct Rehearsed(SharedBytes);

impl Served for Rehearsed {
    fn connect(&self) -> &dyn Connect {
        &self.0
    }

    fn counts(&self) -> Option<ServerCounts> {
        None
    }

    fn peak_bytes(&self) -> Option<u64> {
        None
    }

    fn exit_status_text(&mut self) -> Option<String> {
        None
    }
}

impl TestHarness for Rehearsal {
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn Served>, TestHarnessError> {
        let region =
            self.region.take_if(|region| region.lock().map_or(0, |bytes| bytes.len() as u64) == spec.region);
        let region = region.unwrap_or_else(|| MemoryTarget::region(spec.region as usize));
        self.region = Some(Arc::clone(&region));
        Ok(Box::new(Rehearsed(region)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_missed_between_two_looks_did_not_hit() {
        let (before, after) = (ServerCounts { misses: 10 }, ServerCounts { misses: 35 });
        assert_eq!(after.hit_ratio(before, 100), Some(0.75));
        assert_eq!(after.hit_ratio(before, 0), None);
        // An access at the edge of the time may count on one side only.
        assert_eq!(after.hit_ratio(before, 24), Some(0.0));
    }
}
