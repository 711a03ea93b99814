//! Keys that a queue pair keeps: of regions with signature pages, of tables, and of the memory that it used last.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use terrace_shm::KeyMemo;
use terrace_sync::RwLock;

/// Keys of a queue pair: of the regions of which its peer gets signature pages in place of absent memory, or of tables that
/// the peer may READ.
#[derive(Debug, Default)]
pub(crate) struct KeySet {
    /// Whether there are any, for a check without the lock.
    any: AtomicBool,
    keys: RwLock<SmallVec<[u32; 4]>>,
}

impl KeySet {
    #[inline]
    pub fn contains(&self, rkey: u32) -> bool {
        self.any.load(Ordering::Relaxed) && self.keys.read().contains(&rkey)
    }

    /// Removes all keys.
    pub fn clear(&self) {
        let mut keys = self.keys.write();
        keys.clear();
        self.any.store(false, Ordering::Relaxed);
    }

    /// Adds a key, or removes it.
    pub fn set(&self, rkey: u32, is_member: bool) {
        let mut keys = self.keys.write();
        keys.retain(|key| *key != rkey);
        if is_member {
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
