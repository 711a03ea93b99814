//! Making bytes visible or durable, and fetching them ahead.

use std::sync::atomic::{Ordering, fence};

use terrace_hostmem::{HostRange, PAGE_BYTES, fault, pages_of};

use crate::access::{Access, AccessError, AccessNeed, Accessor, Side};
use crate::entry::Entry;
use crate::registry::Registry;
use crate::sync_mapping::sync_mapping;
use crate::table::tag_of;

/// How much a FLUSH covers (IBTA volume 1 annex A19: the FETH's selectivity level).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushScope {
    /// The bytes that the request names.
    Range,
    /// The whole region or window; the request's address and length mean nothing.
    Region,
}

impl FlushScope {
    /// From the FETH's selectivity field; `None` for reserved values.
    pub fn from_selectivity(selectivity: u8) -> Option<FlushScope> {
        match selectivity {
            0 => Some(FlushScope::Range),
            1 => Some(FlushScope::Region),
            _ => None,
        }
    }
}

/// Placement bit of the FETH: make writes visible to every observer.
const PLACEMENT_GLOBAL: u8 = 1;
/// Placement bit of the FETH: make writes durable.
const PLACEMENT_PERSISTENT: u8 = 2;

/// The advice of `ibv_advise_mr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Have the pages ready for reading.
    Prefetch,
    /// Have the pages ready for writing.
    PrefetchWrite,
    /// Use what is in memory already; the advice is only checked.
    PrefetchNoFault,
}

impl Registry {
    /// FLUSH: returns when the bytes are visible, or durable, as `placement` (the FETH's bits) asks.
    /// With [`FlushScope::Region`] `va` and `len` are ignored. Waits for storage, without a limit.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `Flush` when no or an unknown placement is asked for or the flush failed; `Fault`
    /// when part of the range is not mapped; `NotReady` when the region's pager has to do it.
    pub fn flush(
        &self,
        who: Accessor,
        key: u32,
        va: u64,
        len: u64,
        placement: u8,
        scope: FlushScope,
    ) -> Result<(), AccessError> {
        let entry = self.slot(key)?.pin();
        let range = entry.locate_flush(tag_of(key), who, va, len, placement, scope)?;
        let hook = entry.flush.clone();
        let is_paged = entry.pager_for(who).is_some();
        drop(entry);
        // Every store was made by a processor of this machine: ordering them is all that visibility takes.
        fence(Ordering::SeqCst);
        if placement & PLACEMENT_PERSISTENT == 0 || range.len == 0 {
            return Ok(());
        }
        if is_paged {
            return Err(AccessError::NotReady);
        }
        match hook {
            Some(hook) => hook.flush(range).map_err(|_| AccessError::Flush),
            None => sync_mapping(range),
        }
    }

    /// `ibv_advise_mr` for one element of its list: fetches pages ahead. Best effort: pages may leave again.
    ///
    /// # Errors
    /// `UnknownKey`, `WrongPd`, `OutOfRange` as for any access; `Permission` when the region is not on-demand, or
    /// writing is advised and not permitted; `Fault` when part of the range is not mapped or not accessible.
    pub fn advise(&self, pd: u32, lkey: u32, va: u64, len: u64, advice: Advice) -> Result<(), AccessError> {
        let entry = self.table.slot_of(lkey).ok_or(AccessError::UnknownKey)?.pin();
        entry.admit(tag_of(lkey), Accessor::local(pd, 0))?;
        let needed = match advice {
            Advice::PrefetchWrite => Access::ON_DEMAND | Access::LOCAL_WRITE,
            Advice::Prefetch | Advice::PrefetchNoFault => Access::ON_DEMAND,
        };
        if !entry.access.contains(needed) {
            return Err(AccessError::Permission);
        }
        let range = HostRange { addr: entry.translate(va, len)?, len };
        // The file system reads ahead by itself where a region is a file.
        let advice = if entry.is_by_offset { Advice::PrefetchNoFault } else { advice };
        drop(entry);
        match advice {
            Advice::PrefetchNoFault => Ok(()),
            Advice::Prefetch => populate(range, libc::MADV_POPULATE_READ),
            Advice::PrefetchWrite => populate(range, libc::MADV_POPULATE_WRITE),
        }
    }
}

impl Entry {
    /// Checks a flush and returns the range that it covers.
    pub(crate) fn locate_flush(
        &self,
        tag: u8,
        who: Accessor,
        va: u64,
        len: u64,
        placement: u8,
        scope: FlushScope,
    ) -> Result<HostRange, AccessError> {
        if placement == 0 || placement & !(PLACEMENT_GLOBAL | PLACEMENT_PERSISTENT) != 0 {
            return Err(AccessError::Flush);
        }
        self.admit(tag, who)?;
        for (bit, need) in
            [(PLACEMENT_GLOBAL, AccessNeed::FlushGlobal), (PLACEMENT_PERSISTENT, AccessNeed::FlushPersistent)]
        {
            if placement & bit != 0 && !self.access.contains(need.permission(Side::Remote)) {
                return Err(AccessError::Permission);
            }
        }
        let (va, len) = match scope {
            FlushScope::Range => (va, len),
            FlushScope::Region => (self.start, self.len),
        };
        Ok(HostRange { addr: self.translate(va, len)?, len })
    }
}

/// Makes the kernel take all pages of a range that are in memory for dirty, whatever they hold, and while other threads
/// store to them. The range begins at a page.
///
/// # Errors
/// When part of the range is not mapped, or a page cannot be stored to.
pub fn make_dirty(range: HostRange) -> std::io::Result<()> {
    /// Pages that are queried at a time.
    const PAGES: usize = 1024;
    let mut cached = [0u8; PAGES];
    let end = range.addr + range.len;
    for start in (range.addr..end).step_by(PAGES * PAGE_BYTES as usize) {
        let len = (end - start).min(PAGES as u64 * PAGE_BYTES);
        // SAFETY: the kernel checks the range, and writes one byte for each of its pages; there is room for them.
        if unsafe { libc::mincore(start as *mut _, len as usize, cached.as_mut_ptr().cast()) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        let pages = (start..start + len).step_by(PAGE_BYTES as usize).zip(cached);
        for page in pages.filter_map(|(page, is_cached)| (is_cached & 1 != 0).then_some(page)) {
            // SAFETY: the program registered these bytes; an atomic addition of 0 changes none, and loses no other
            // store. What is not mapped any more is a fault.
            let stored = unsafe { fault::fetch_add(page, 0) };
            stored.map_err(|_| std::io::Error::other("a page in memory cannot be stored to"))?;
        }
    }
    Ok(())
}

/// Whether the whole range is mapped. Walks mappings, never pages, so the length costs nothing.
pub(crate) fn is_mapped(range: HostRange) -> bool {
    let Some((start, len)) = pages_of(range) else { return false };
    // SAFETY: an asynchronous msync does nothing but walk the mappings; the kernel checks the range.
    unsafe { libc::msync(start as *mut _, len as usize, libc::MS_ASYNC) == 0 }
}

/// Faults the pages in, as `advice` says; on kernels that cannot (before 5.14) asks for read-ahead instead.
fn populate(range: HostRange, advice: libc::c_int) -> Result<(), AccessError> {
    let Some((start, len)) = pages_of(range) else { return Ok(()) };
    // SAFETY: none of the advice given here changes content; the kernel checks the range.
    let advise = |advice| unsafe { libc::madvise(start as *mut _, len as usize, advice) } == 0;
    if advise(advice) {
        return Ok(());
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EINVAL) if advise(libc::MADV_WILLNEED) => Ok(()),
        // Too little memory, or interrupted: the advice was best effort.
        Some(libc::EAGAIN | libc::EINTR) => Ok(()),
        _ => Err(AccessError::Fault),
    }
}
