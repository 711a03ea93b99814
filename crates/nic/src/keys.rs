//! Keys that a queue pair keeps: of regions with signature pages, and of the memory that it used last.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use terrace_memory::Absence;
use terrace_shm::KeyMemo;
use terrace_sync::RwLock;

/// The regions of which a queue pair's peer gets signature pages in place of absent memory.
#[derive(Debug, Default)]
pub(crate) struct MagicKeys {
    /// Whether there are any, for a check without the lock.
    any: AtomicBool,
    keys: RwLock<SmallVec<[u32; 4]>>,
}

impl MagicKeys {
    #[inline]
    pub fn contains(&self, rkey: u32) -> bool {
        self.any.load(Ordering::Relaxed) && self.keys.read().contains(&rkey)
    }

    /// Removes all regions.
    pub fn clear(&self) {
        let mut keys = self.keys.write();
        keys.clear();
        self.any.store(false, Ordering::Relaxed);
    }

    /// Adds a region, or removes it.
    pub fn set(&self, rkey: u32, absence: Absence) {
        let mut keys = self.keys.write();
        keys.retain(|key| *key != rkey);
        if absence == Absence::Magic {
            keys.push(rkey);
        }
        self.any.store(!keys.is_empty(), Ordering::Relaxed);
    }
}

/// The slots of the local keys that a queue pair's work requests used last.
#[derive(Default)]
pub(crate) struct LastKeys {
    /// Of send work requests.
    pub sent: KeyMemo,
    /// Of memory that data arrives for.
    pub received: KeyMemo,
    /// Of work queues in memory.
    pub entries: KeyMemo,
}
