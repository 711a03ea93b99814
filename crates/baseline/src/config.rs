//! The configuration of a baseline.

use std::sync::Arc;

use terrace_faults::Faults;

use crate::device::{Best, DeviceFactory};

/// How accesses are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoMethod {
    /// The regions are locked into memory: by copies to and from the mapping, as the NIC does by itself.
    Pinned,
    /// By copies to and from the mapping, including page faults: the caller waits for the disk.
    Mapping,
    /// Through the page cache.
    Buffered,
    /// Bypassing the page cache.
    Direct,
    /// Through the page cache if it has the bytes, else bypassing it (TeRM, section 4.3).
    Tiering,
}

/// The configuration of a baseline.
#[derive(Clone, Debug)]
pub struct BaselineConfig {
    /// The limit on locked memory over all regions, in bytes.
    pub dram_bytes: u64,
    /// How accesses are carried out.
    pub io: IoMethod,
    /// Threads for the copies of [`IoMethod::Mapping`], which wait for the disk in page faults. With 1, the thread that
    /// requests an access makes its copies. With more, this many threads do, and the requesting thread does not wait.
    /// All other methods do not wait.
    pub threads: usize,
    /// Opens the device that reads and writes the files.
    pub device: Arc<dyn DeviceFactory>,
    /// A fault plan that delays reads and writes of the files, or fails them.
    pub faults: Option<Arc<Faults>>,
}

impl BaselineConfig {
    /// One thread, and no faults.
    pub fn new(io: IoMethod, dram_bytes: u64) -> BaselineConfig {
        BaselineConfig { dram_bytes, io, threads: 1, device: Arc::new(Best), faults: None }
    }

    /// The size of the buffer pool in bytes: small beside the budget.
    pub(crate) fn pool_bytes(&self) -> u64 {
        (self.dram_bytes / 64).clamp(2 << 20, 32 << 20)
    }
}
