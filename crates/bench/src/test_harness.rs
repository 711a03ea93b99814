//! The environments of measurements: servers started for them, or memory of this process for a rehearsal.

use std::sync::Arc;

use serde::Serialize;

use crate::plan::{Mode, Settings, Storage};
use crate::target::{Connect, MemoryTarget, SharedBytes};

/// The parameters of a server. Points with equal parameters can share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerSpec {
    /// `--mode`
    pub mode: Mode,
    /// Size of the region.
    pub region: u64,
    /// `--dram`
    pub dram: u64,
    /// The storage of the region's file.
    pub storage: Storage,
    /// Threads that serve RPCs.
    pub threads: usize,
    /// The pages to read into memory before the first measurement, in modes that would fill it too slowly.
    pub preload: Option<Preload>,
}

/// The pages to preload: those that these accesses use most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preload {
    /// Bytes of each access.
    pub access_bytes: u64,
    /// The bits of Zipf's theta. It does not change which pages are hottest, but which pages a measurement leaves in
    /// memory: points that differ in it do not share a server.
    theta_bits: u64,
}

impl ServerSpec {
    /// The server for a point.
    pub fn new(mode: Mode, settings: &Settings) -> ServerSpec {
        ServerSpec {
            mode,
            region: settings.region,
            dram: settings.dram_bytes(),
            storage: settings.storage,
            threads: settings.server_threads,
            // In the other modes the server itself fills its memory, and soon. Tmpfs is in memory anyway.
            preload: (settings.preload
                && matches!(mode, Mode::Odp | Mode::Rpc | Mode::RpcBuffer)
                && settings.storage != Storage::Tmpfs)
                .then(|| Preload { access_bytes: settings.size, theta_bits: settings.theta.to_bits() }),
        }
    }
}

/// A server's counters since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerCounts {
    /// Accesses, each to one unit, that were carried out on the file: by mapping, buffered or direct I/O.
    pub misses: u64,
}

impl ServerCounts {
    /// The share of `accesses` since `before` that were no misses; `None` without accesses. The clients count the
    /// accesses, because no place in the server sees all of them.
    pub fn hit_ratio(&self, before: ServerCounts, accesses: u64) -> Option<f64> {
        let misses = self.misses.saturating_sub(before.misses).min(accesses);
        (accesses > 0).then(|| 1.0 - misses as f64 / accesses as f64)
    }
}

/// Why a server cannot be started; one line for people.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TestHarnessError(pub String);

/// A running server.
pub trait Served {
    /// Connections to the server's region.
    fn connect(&self) -> &dyn Connect;
    /// The server's counters; `None` when it has none.
    fn counts(&self) -> Option<ServerCounts>;
    /// The most memory that the server has held; `None` when that is not known.
    fn peak_bytes(&self) -> Option<u64>;
    /// The exit status as text, if the server has ended on its own.
    fn exit_status_text(&mut self) -> Option<String>;
}

/// Starts servers, one at a time.
pub trait TestHarness {
    /// Starts a server. The previous one has been dropped.
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn Served>, TestHarnessError>;
}

/// A harness over memory of this process. The numbers mean nothing; it is for checking plans, files and plots.
#[derive(Default)]
pub struct Rehearsal {
    region: Option<SharedBytes>,
}

/// The size to which a rehearsal reduces regions.
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
