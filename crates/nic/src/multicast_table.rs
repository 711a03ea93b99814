//! The queue pairs of multicast groups.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use terrace_sync::{Mutex, RwLock};

/// The queue pairs that are attached to groups.
pub(crate) struct MulticastTable<Q> {
    /// Held while a queue pair is attached or detached, which takes system calls. Datagrams are delivered meanwhile.
    pub changes: Mutex<()>,
    pub groups: RwLock<BTreeMap<IpAddr, Vec<Arc<Q>>>>,
}

impl<Q> Default for MulticastTable<Q> {
    fn default() -> Self {
        MulticastTable { changes: Mutex::default(), groups: RwLock::new(BTreeMap::new()) }
    }
}

impl<Q> MulticastTable<Q> {
    /// Takes all queue pairs out, one that is attached to several groups as often.
    pub fn take_all(&self) -> Vec<Arc<Q>> {
        std::mem::take(&mut *self.groups.write()).into_values().flatten().collect()
    }

    /// The queue pairs that are attached to a group, each group's counted.
    pub fn attached_count(&self) -> usize {
        self.groups.read().values().map(Vec::len).sum()
    }
}
