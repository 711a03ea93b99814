//! How a tier behaves.

use std::sync::Arc;
use std::time::Duration;

use terrace_faults::Faults;

use crate::device::{Best, DeviceFactory};

/// How misses are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoMethod {
    /// By copying to and from the mapping, page faults and all. A baseline: the caller waits for the disk.
    Mapping,
    /// Through the page cache. A baseline.
    Buffered,
    /// Past the page cache. A baseline.
    Direct,
    /// From the page cache what is there, past it what is not.
    Tiering,
}

/// How a tier behaves.
#[derive(Clone, Debug)]
pub struct TierConfig {
    /// How much memory may be locked, over all regions, in bytes.
    pub dram_bytes: u64,
    /// How misses are carried out.
    pub io: IoMethod,
    /// Threads for the copies of [`IoMethod::Mapping`], which wait for the disk in page faults. With one, whoever asks for an
    /// access makes its copies; with more, that many threads do, and it goes on. All other ways to the file do not wait.
    pub threads: usize,
    /// How often the hottest units are looked for.
    pub period: Duration,
    /// Whether hot units are brought into memory.
    pub promote: bool,
    /// What reads and writes the files.
    pub device: Arc<dyn DeviceFactory>,
    /// A plan by which reading and writing the files is slow, or fails.
    pub faults: Option<Arc<Faults>>,
}

impl TierConfig {
    /// Everything as TeRM has it, within a budget.
    pub fn new(dram_bytes: u64) -> TierConfig {
        TierConfig {
            dram_bytes,
            io: IoMethod::Tiering,
            threads: 1,
            period: Duration::from_millis(125),
            promote: true,
            device: Arc::new(Best),
            faults: None,
        }
    }

    /// How much memory bounce buffers may take: little beside the budget.
    pub(crate) fn pool_bytes(&self) -> u64 {
        (self.dram_bytes / 64).clamp(2 << 20, 32 << 20)
    }
}
