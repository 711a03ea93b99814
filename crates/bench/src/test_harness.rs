//! Test harnesses: environments of measurements, with servers or with memory of this process.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::application::Application;
use crate::disk::DiskLimit;
use crate::plan::{Mode, Settings, Storage};
use crate::target::{Connect, MemoryTarget, SharedBytes};

/// The granularity in which servers count misses.
const PAGE_BYTES: u64 = 4096;

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
    /// The application that the region's content is for.
    pub application: Application,
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
            application: settings.application,
            threads: settings.server_threads,
            // In other modes the server fills its memory fast, or has none. Tmpfs is in memory anyway.
            preload: (settings.preload
                && matches!(mode, Mode::Odp | Mode::Rpc | Mode::RpcBuffer | Mode::RpcTiering)
                && settings.storage != Storage::Tmpfs)
                .then(|| Preload { access_bytes: settings.size, theta_bits: settings.theta.to_bits() }),
        }
    }
}

/// A server's counters since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerCounts {
    /// Accesses to one page each, or parts of them, that were not to resident memory.
    pub misses: u64,
    /// Pages of the region's file that were read, and that were written; `None` if the server does not count them.
    pub ios: Option<u64>,
    /// Bytes in the server's memory that the file lacks; `None` if the server does not count them.
    pub dirty_bytes: Option<u64>,
}

impl ServerCounts {
    /// The share of the pages of `accesses` accesses since `before` that were not misses; `None` without accesses. The
    /// clients count the accesses, because the server cannot count one-sided ones. The share is below 0 if the server
    /// counts more misses than there were pages: its counters are wrong then, or it counts what happened before.
    pub fn hit_ratio(&self, before: ServerCounts, accesses: u64, access_bytes: u64) -> Option<f64> {
        let pages = accesses * access_bytes.div_ceil(PAGE_BYTES);
        let misses = self.misses as f64 - before.misses as f64;
        (pages > 0).then(|| 1.0 - misses / pages as f64)
    }

    /// The pages read and written since `before`.
    pub fn ios_since(&self, before: ServerCounts) -> Option<u64> {
        Some(self.ios?.saturating_sub(before.ios?))
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
    /// The processor time that the server has used, if known.
    fn processor_time(&self) -> Option<Duration>;
    /// The server's peak memory use, if known.
    fn peak_bytes(&self) -> Option<u64>;
    /// The exit status as text, if the server has ended by itself.
    fn exit_status_text(&mut self) -> Option<String>;
}

/// Starts servers, one at a time.
pub trait TestHarness {
    /// Starts a server. The previous one has been dropped.
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn TestServer>, TestHarnessError>;
    /// Measures how many random reads of the server's file the disk allows, with `in_flight` of them in flight. The
    /// server is idle meanwhile.
    fn measure_disk(&mut self, spec: &ServerSpec, in_flight: usize) -> DiskLimit;
    /// Which processors the ends are on.
    fn processors(&self) -> String;
}

/// A harness over memory of this process, without meaningful numbers. It checks plans, files and plots.
#[derive(Default)]
pub struct Rehearsal {
    region: Option<(Application, SharedBytes)>,
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

    fn processor_time(&self) -> Option<Duration> {
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
        let kept = self.region.take_if(|(application, region)| {
            *application == spec.application
                && region.lock().map_or(0, |bytes| bytes.len() as u64) == spec.region
        });
        let region = kept.map_or_else(
            || MemoryTarget::region(spec.region as usize, spec.application),
            |(_, region)| region,
        );
        self.region = Some((spec.application, Arc::clone(&region)));
        Ok(Box::new(MemoryServer(region)))
    }

    fn measure_disk(&mut self, _: &ServerSpec, _: usize) -> DiskLimit {
        DiskLimit::NotMeasured("a rehearsal has no disk".into())
    }

    fn processors(&self) -> String {
        "a rehearsal, on any processor".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hit_ratio_is_of_pages_between_two_samples() {
        let counts = |misses, ios| ServerCounts { misses, ios, dirty_bytes: None };
        let (before, after) = (counts(10, Some(5)), counts(35, Some(45)));
        assert_eq!(after.hit_ratio(before, 100, 256), Some(0.75));
        assert_eq!(after.hit_ratio(before, 25, 16384), Some(0.75));
        assert_eq!(after.hit_ratio(before, 0, 4096), None);
        assert_eq!(after.hit_ratio(before, 20, 4096), Some(-0.25), "what is wrong is shown");
        assert_eq!((after.ios_since(before), after.ios_since(counts(0, None))), (Some(40), None));
    }
}
