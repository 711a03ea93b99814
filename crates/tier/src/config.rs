//! The configuration of a tier.

use std::sync::Arc;
use std::time::Duration;

use terrace_faults::Faults;

use crate::device::{Best, DeviceFactory};

/// How misses are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoMethod {
    /// By copies to and from the mapping, including page faults. A baseline: the caller waits for the disk.
    Mapping,
    /// Through the page cache. A baseline.
    Buffered,
    /// Bypassing the page cache. A baseline.
    Direct,
    /// From the page cache if it has the bytes, else bypassing it.
    Tiering,
}

/// The configuration of a tier.
#[derive(Clone, Debug)]
pub struct TierConfig {
    /// The limit on locked memory over all regions, in bytes.
    pub dram_bytes: u64,
    /// How misses are carried out.
    pub io: IoMethod,
    /// Threads for the copies of [`IoMethod::Mapping`], which wait for the disk in page faults. With 1, the thread that
    /// requests an access makes its copies. With more, this many threads do, and the requesting thread does not wait.
    /// All other methods do not wait.
    pub threads: usize,
    /// The interval between two cleanings, and between two counts of accesses.
    pub period: Duration,
    /// Opens the device that reads and writes the files.
    pub device: Arc<dyn DeviceFactory>,
    /// A fault plan that delays reads and writes of the files, or fails them.
    pub faults: Option<Arc<Faults>>,
}

impl TierConfig {
    /// TeRM's settings, with the given budget.
    pub fn new(dram_bytes: u64) -> TierConfig {
        TierConfig {
            dram_bytes,
            io: IoMethod::Tiering,
            threads: 1,
            period: Duration::from_millis(125),
            device: Arc::new(Best),
            faults: None,
        }
    }

    /// The size of the buffer pool in bytes: small beside the budget.
    pub(crate) fn pool_bytes(&self) -> u64 {
        (self.dram_bytes / 64).clamp(2 << 20, 32 << 20)
    }
}
