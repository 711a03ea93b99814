//! The configuration of a pool.

use std::path::PathBuf;
use std::sync::Arc;

use terrace_faults::Faults;

use crate::store::{Best, Injected, StoreFactory};

/// The configuration of a pool.
#[derive(Clone, Debug)]
pub struct PagesConfig {
    /// The limit on the memory for frames, in bytes. What is kept about each takes 15 bytes more.
    pub budget_bytes: u64,
    /// The name of the pool: a process that opens the pool of the same name takes its pages over.
    pub name: String,
    /// The directory of the pool's file. `None`: hugetlbfs if pages are set aside, else tmpfs.
    pub directory: Option<PathBuf>,
    /// Whether the pool's file stays when it is closed. The next process is warm at once then, and the memory stays in
    /// use until then. A process that is killed leaves the file in any case.
    pub is_kept: bool,
    /// Threads that write pages back.
    pub writers: usize,
    /// Opens the store that reads and writes the files.
    pub store: Arc<dyn StoreFactory>,
    /// A fault plan that delays reads and writes of the files, or fails them.
    pub faults: Option<Arc<Faults>>,
}

impl PagesConfig {
    /// The usual settings.
    pub fn new(name: &str, budget_bytes: u64) -> PagesConfig {
        PagesConfig {
            budget_bytes,
            name: name.into(),
            directory: None,
            is_kept: true,
            writers: 4,
            store: Arc::new(Best),
            faults: None,
        }
    }

    /// The store, with the faults of the plan if it covers storage.
    pub(crate) fn store(&self) -> Arc<dyn StoreFactory> {
        let faults = self.faults.clone().filter(|faults| faults.plan().has_storage_faults());
        match faults {
            Some(faults) => Arc::new(Injected { inner: self.store.clone(), faults }),
            None => self.store.clone(),
        }
    }

    /// The most memory that accesses under way take: small beside the budget.
    pub(crate) fn quota_bytes(&self) -> usize {
        (self.budget_bytes / 16).clamp(1 << 20, 64 << 20) as usize
    }
}
