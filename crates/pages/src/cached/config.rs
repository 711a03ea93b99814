//! The configuration of a budget.

use std::sync::Arc;

use terrace_faults::Faults;
use terrace_hostmem::PAGE_BYTES;

use crate::budget::check_memory;
use crate::error::PagesError;
use crate::store::{Best, Injected, StoreFactory};

/// A budget has at least so many pages: a few accesses at a time must not evict each other's.
const SLOTS_MIN: u64 = 64;
/// The kernel's metadata of pages in the page cache take one in so many parts of them at most: on ext4, 104 bytes for the
/// buffer head of a page that was written, and some 20 for its entries in the page table and the page cache.
const KERNEL_SHARE: u64 = 32;

/// The configuration of a budget.
#[derive(Clone, Debug)]
pub struct CachedConfig {
    /// The limit on pages in memory over all regions, in bytes.
    pub budget_bytes: u64,
    /// Opens the store that reads the files.
    pub store: Arc<dyn StoreFactory>,
    /// A fault plan that delays reads and writes of the files, or fails them.
    pub faults: Option<Arc<Faults>>,
}

impl CachedConfig {
    /// The usual settings.
    pub fn new(budget_bytes: u64) -> CachedConfig {
        CachedConfig { budget_bytes, store: Arc::new(Best), faults: None }
    }

    /// Checks the budget against the machine and the control group.
    ///
    /// # Errors
    /// `MachineMemory`, `CgroupLimit`.
    pub fn check(&self) -> Result<(), PagesError> {
        check_memory(self.budget_bytes, self.quota_bytes() as u64 + self.budget_bytes / KERNEL_SHARE)
    }

    pub(super) fn slot_count(&self) -> u32 {
        u32::try_from((self.budget_bytes / PAGE_BYTES).max(SLOTS_MIN)).unwrap_or(u32::MAX)
    }

    /// The store, with the faults of the plan if it covers storage.
    pub(super) fn store(&self) -> Arc<dyn StoreFactory> {
        let faults = self.faults.clone().filter(|faults| faults.plan().has_storage_faults());
        match faults {
            Some(faults) => Arc::new(Injected { inner: self.store.clone(), faults }),
            None => self.store.clone(),
        }
    }

    /// The most memory that accesses under way take: small beside the budget.
    pub(super) fn quota_bytes(&self) -> usize {
        (self.budget_bytes / 16).clamp(1 << 20, 64 << 20) as usize
    }
}
