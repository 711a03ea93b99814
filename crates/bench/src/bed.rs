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
        }
    }
}

/// A server's counters since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerCounts {
    /// Accesses to units that were resident.
    pub hits: u64,
    /// Others.
    pub misses: u64,
}

impl ServerCounts {
    /// The share of hits between `before` and this; nothing when nothing was counted.
    pub fn hit_ratio_since(&self, before: ServerCounts) -> Option<f64> {
        let (hits, misses) =
            (self.hits.saturating_sub(before.hits), self.misses.saturating_sub(before.misses));
        (hits + misses > 0).then(|| hits as f64 / (hits + misses) as f64)
    }
}

/// Why there is no server; one line for people.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BedError(pub String);

/// A running server.
pub trait Served {
    /// Connections to its region.
    fn connect(&self) -> &dyn Connect;
    /// Its counters; nothing when it has none.
    fn counts(&self) -> Option<ServerCounts>;
    /// The most memory that it has held; nothing when that is not known.
    fn peak_bytes(&self) -> Option<u64>;
    /// What is known about its end, when it has ended although nobody asked it to.
    fn obituary(&mut self) -> Option<String>;
}

/// Starts servers, one at a time.
pub trait Bed {
    /// Starts one. The one before has been dropped.
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn Served>, BedError>;
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

    fn obituary(&mut self) -> Option<String> {
        None
    }
}

impl Bed for Rehearsal {
    fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn Served>, BedError> {
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
    fn hits_are_those_between_two_looks() {
        let before = ServerCounts { hits: 10, misses: 10 };
        let after = ServerCounts { hits: 40, misses: 20 };
        assert_eq!(after.hit_ratio_since(before), Some(0.75));
        assert_eq!(after.hit_ratio_since(after), None);
    }
}
