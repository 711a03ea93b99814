//! What the registry publishes to same-host peers, and how a region that they may be accessing is changed.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use terrace_hostmem::HostRange;
use terrace_shm::{GracePeriod, PublishedQueuePair, PublishedRegion, ReaderTimeout, SharedRegistry, Version};

use crate::access::RegisterError;
use crate::entry::{Entry, Kind};
use crate::paging::Pager;
use crate::pin::Closed;
use crate::registry::Registry;
use crate::table::tag_of;
use crate::translation::{PeerTables, SharedFile};

/// The memory behind a key, for the code that tells other processes how to access it.
#[derive(Clone, Debug)]
pub struct RegionMemory {
    /// The version of its record.
    pub version: Version,
    /// The program's addresses.
    pub range: HostRange,
    /// Whether peers may change it.
    pub is_writable: bool,
    /// Its pager.
    pub pager: Option<std::sync::Arc<dyn Pager>>,
}

impl RegionMemory {
    /// The addresses that its pager translates; without a pager, its own.
    pub fn range_of_pager(&self) -> HostRange {
        self.pager.as_ref().map_or(self.range, |pager| pager.translation().range())
    }

    /// What peers need to map it, if it is a file.
    pub fn shared_file(&self) -> Option<SharedFile> {
        self.pager.as_ref()?.translation().shared_file(self.is_writable)
    }

    /// Whether its bytes are in frames that peers can map.
    pub fn is_framed(&self) -> bool {
        let tables = self.pager.as_ref().and_then(|pager| pager.translation().peer_tables());
        matches!(tables, Some(PeerTables::Frames { .. }))
    }
}

impl Registry {
    /// Publishes all regions, from now on, to processes that receive this descriptor: a segment that they can only
    /// read.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left; `Unsupported` in a forked child.
    pub fn publish(&self) -> io::Result<BorrowedFd<'_>> {
        if self.is_detached.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // No region is registered meanwhile.
        let changes = self.changes.close();
        if self.shared_registry.get().is_none() {
            let shared = SharedRegistry::new(self.table.key_order())?;
            for (index, slot) in self.table.slots() {
                let entry = slot.pin();
                if let Some(region) = published(&entry) {
                    shared.publish_region(self.number(index), &region);
                }
            }
            // No other thread can have set it: that takes the lock.
            let _ = self.shared_registry.set(shared);
        }
        drop(changes);
        self.shared_registry.get().map(SharedRegistry::file).ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Whether registered regions are published.
    #[inline]
    pub fn is_published(&self) -> bool {
        self.shared_registry().is_some()
    }

    /// The number of a key's slot.
    fn number(&self, key: u32) -> u32 {
        self.table.key_order().number_of(key)
    }

    #[inline]
    fn shared_registry(&self) -> Option<&SharedRegistry> {
        self.shared_registry.get().filter(|_| !self.is_detached.load(Ordering::Relaxed))
    }

    /// Publishes a queue pair that gives access to regions, or withdraws it. The caller has the queue pair locked.
    /// Accesses that other processes have begun may still be under way, until [`GracePeriod::of_queue_pair`] is over.
    pub fn set_queue_pair(&self, qpn: u32, queue_pair: Option<&PublishedQueuePair>) {
        if let Some(shared) = self.shared_registry() {
            shared.set_queue_pair(qpn, queue_pair);
        }
    }

    /// Publishes a region as it is now, if it is to be published. The caller has its slot closed.
    pub(crate) fn publish_region(&self, key: u32, entry: &Entry) {
        if let (Some(shared), Some(region)) = (self.shared_registry(), published(entry)) {
            shared.publish_region(self.number(key), &region);
        }
    }

    /// Changes a region while no other process accesses it. If `check` passes, the region is withdrawn, and `wait` waits for
    /// other processes' accesses to it; then `change` has exclusive access. The wait for those accesses holds no lock:
    /// the region serves packets meanwhile. If other processes cannot access the region themselves
    /// ([`Translation::is_open_to_peers`](crate::Translation::is_open_to_peers)), nothing is waited for.
    ///
    /// # Errors
    /// Those of `check` and `change`; `Busy` when another thread changes it as well; `ReaderTimeout` when another
    /// process does not end an access in time. The region is then as it was.
    pub(crate) fn change_region<R>(
        &self,
        key: u32,
        check: impl Fn(&Entry) -> Result<(), RegisterError>,
        wait: impl FnOnce(&mut GracePeriod) -> Result<(), ReaderTimeout>,
        change: impl FnOnce(&mut Closed<'_, Entry>) -> Result<R, RegisterError>,
    ) -> Result<R, RegisterError> {
        let slot = self.table.slot_of(key).ok_or(RegisterError::UnknownKey)?;
        let mut grace = {
            let _changing = self.changes.pin();
            let mut entry = slot.close();
            check(&entry)?;
            let Some(shared) = self.shared_registry() else { return change(&mut entry) };
            entry.withdrawals += 1;
            shared.withdraw_region(self.number(key));
            let is_open = entry.pager.as_ref().is_none_or(|pager| pager.translation().is_open_to_peers());
            let pages = HostRange { addr: entry.start.wrapping_add(entry.to_host), len: entry.len };
            if is_open { GracePeriod::of_region(entry.pd, pages) } else { GracePeriod::default() }
        };
        let over = wait(&mut grace);
        let _changing = self.changes.pin();
        let mut entry = slot.close();
        entry.withdrawals -= 1;
        let result = match over {
            // Another thread may have changed it meanwhile, or wait to do so.
            Ok(()) if entry.withdrawals == 0 => check(&entry).and_then(|()| change(&mut entry)),
            Ok(()) => Err(RegisterError::Busy),
            Err(timeout) => Err(RegisterError::ReaderTimeout(timeout)),
        };
        self.publish_region(key, &entry);
        result
    }

    /// The version with which other processes see the region of a key; `None` if they do not.
    pub fn region_version(&self, key: u32) -> Option<Version> {
        self.version_of(key, &self.slot(key).ok()?.pin())
    }

    fn version_of(&self, key: u32, entry: &Entry) -> Option<Version> {
        let is_region = entry.kind == Kind::Region && entry.tag == tag_of(key);
        self.shared_registry().filter(|_| is_region)?.region_version(self.number(key))
    }

    /// What another process needs to access a region that it sees with this version.
    pub fn memory_of(&self, key: u32, version: Version) -> Option<RegionMemory> {
        let slot = self.slot(key).ok()?;
        let entry = slot.pin();
        if self.version_of(key, &entry)? != version {
            return None;
        }
        let range = HostRange { addr: entry.start.wrapping_add(entry.to_host), len: entry.len };
        let is_writable = entry.access.writes_remotely();
        Some(RegionMemory { version, range, is_writable, pager: entry.pager.clone() })
    }
}

fn published(entry: &Entry) -> Option<PublishedRegion> {
    (entry.kind == Kind::Region && entry.bound && entry.withdrawals == 0).then_some(PublishedRegion {
        tag: entry.tag,
        access: entry.access.rights(),
        pd: entry.pd,
        start: entry.start,
        len: entry.len,
        to_host: entry.to_host,
    })
}
