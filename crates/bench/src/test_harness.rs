//! Test harnesses: environments of measurements, with servers or with memory of this process.

use std::sync::Arc;

use serde::Serialize;

use crate::plan::{Mode, Settings, Storage};
use crate::target::{Connect, MemoryTarget, SharedBytes};

/// The parameters of a server. Points with equal parameters can share a server.
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
    /// The threads for RPCs.
    pub threads: usize,
    /// The pages to preload before the first measurement, in modes that fill memory too slowly.
    pub preload: Option<Preload>,
}

/// The pages to preload: the hottest ones of these accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preload {
    /// Bytes of each access.
    pub access_bytes: u64,
    /// The bits of Zipf's theta. The hottest pages do not depend on it, but the resident pages after a measurement do, so
    /// that points with different exponents do not share a server.
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
            // In other modes the server fills its memory fast. Tmpfs is in memory anyway.
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
    /// Accesses to one unit each that were executed on the file: by mapping, buffered or direct I/O.
    pub misses: u64,
}

impl ServerCounts {
    /// The share of `accesses` since `before` that were not misses; `None` without accesses. The clients count the
    /// accesses, because the server cannot count one-sided ones.
    pub fn hit_ratio(&self, before: ServerCounts, accesses: u64) -> Option<f64> {
        let misses = self.misses.saturating_sub(before.misses).min(accesses);
        (accesses > 0).then(|| 1.0 - misses as f64 / accesses as f64)
    }
}

/// An error of starting a server, as one line of text.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TestHarnessError(pub String);

/// A running server.
pub trait TestServer {
    /// Connections to the server's region.
    fn connect(&self) -> &dyn Connect;
    /// The server's counters, if it has any.
    fn counts(&self) -> Option<ServerCounts>;
    /// The server's peak memory use, if known.
    fn peak_bytes(&self) -> Option<u64>;
    /// The exit status as text, if the server has ended by itself.
    fn exit_status_text(&mut self) -> Option<String>;
}

/// Starts servers, one at a time.
pub trait TestHarness {
    /// Starts a server. The previous one has been dropped.
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn TestServer>, TestHarnessError>;
}

/// A harness over memory of this process, without meaningful numbers. It checks plans, files and plots.
#[derive(Default)]
pub struct Rehearsal {
    region: Option<SharedBytes>,
}

/// The size to which a rehearsal reduces regions.
pub const REHEARSAL_REGION_BYTES: u64 = 64 << 20;

struct MemoryServer(SharedBytes);

impl TestServer for MemoryServer {
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
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn TestServer>, TestHarnessError> {
        let region =
            self.region.take_if(|region| region.lock().map_or(0, |bytes| bytes.len() as u64) == spec.region);
        let region = region.unwrap_or_else(|| MemoryTarget::region(spec.region as usize));
        self.region = Some(Arc::clone(&region));
        Ok(Box::new(MemoryServer(region)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hit_ratio_is_of_accesses_between_two_samples() {
        let (before, after) = (ServerCounts { misses: 10 }, ServerCounts { misses: 35 });
        assert_eq!(after.hit_ratio(before, 100), Some(0.75));
        assert_eq!(after.hit_ratio(before, 0), None);
        // An access at the end of the measured time may be counted by the server only.
        assert_eq!(after.hit_ratio(before, 24), Some(0.0));
    }
}
