//! What a slot of the key table holds, and the checks that an access must pass.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use terrace_hostmem::HostRange;

use crate::access::{Access, AccessError, AccessNeed, Accessor, Side};
use crate::changes::PendingChanges;
use crate::paging::{Pager, Pattern, RegionPolicy, Transfer};

/// Makes a region's bytes durable, where `msync` on the mapping will not do.
///
/// It may run while, or shortly after, the region is deregistered: it owns what it needs.
pub trait FlushHook: Send + Sync + std::fmt::Debug {
    /// Returns when the bytes would survive a crash.
    ///
    /// # Errors
    /// Any error that kept them from being written; the peer sees a remote operation error.
    fn flush(&self, range: HostRange) -> std::io::Result<()>;
}

/// What a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nothing; the slot is free.
    Free,
    /// A memory region.
    Region,
    /// A type 1 window: bound by a verb, lives in a protection domain.
    WindowType1,
    /// A type 2 window: bound by a work request, tied to its queue pair.
    WindowType2,
}

/// A slot's content. The fields that every access looks at come first and share a cache line with the pin count.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Entry {
    /// The low 8 bits of the key; the bits above are the slot's index, so comparing these is comparing keys.
    pub(crate) tag: u8,
    pub(crate) kind: Kind,
    /// Whether there is a range: always for a region, only while bound for a window.
    pub(crate) bound: bool,
    /// The pager's addresses are offsets in a file: local accesses go by it, too.
    pub(crate) is_by_offset: bool,
    pub(crate) access: Access,
    pub(crate) pd: u32,
    /// Type 2 windows: the queue pair that they are bound through.
    pub(crate) qpn: u32,
    /// First address of the range as keys see it.
    pub(crate) start: u64,
    /// Length of the range in bytes.
    pub(crate) len: u64,
    /// What to add (modulo 2^64) to an address that the key's user gives, to get the program's own address.
    pub(crate) to_host: u64,
    /// The pager, if the bytes need not be in memory.
    pub(crate) pager: Option<Arc<dyn Pager>>,
    /// Windows: index of the slot of the region underneath.
    pub(crate) region: u32,
    /// Regions: how many windows are bound to it. Changed while the region is pinned, or by a window that is bound.
    pub(crate) windows: AtomicU32,
    /// Windows: changes through it that pagers have not carried out yet.
    pub(crate) changes: Option<Box<PendingChanges>>,
    /// Makes the bytes durable, where the default does not.
    pub(crate) flush: Option<Arc<dyn FlushHook>>,
    /// The signature page for absent bytes.
    pub(crate) pattern: Option<Pattern>,
    /// The fault policy.
    pub(crate) policy: RegionPolicy,
    /// How far the tag moves when the slot is freed.
    pub(crate) step: u8,
    /// Regions: how many changes wait for a grace period. The region is withdrawn meanwhile.
    pub(crate) withdrawals: u32,
}

impl Entry {
    /// An entry of a free slot, with the tag of the next key and the step to the one after that.
    pub(crate) fn free(tag: u8, step: u8) -> Entry {
        Entry {
            tag,
            kind: Kind::Free,
            bound: false,
            is_by_offset: false,
            access: Access::empty(),
            pd: 0,
            qpn: 0,
            start: 0,
            len: 0,
            to_host: 0,
            pager: None,
            region: 0,
            windows: AtomicU32::new(0),
            changes: None,
            flush: None,
            pattern: None,
            policy: RegionPolicy::Wait,
            step,
            withdrawals: 0,
        }
    }

    /// Whether this is a window of either type.
    pub(crate) fn is_window(&self) -> bool {
        matches!(self.kind, Kind::WindowType1 | Kind::WindowType2)
    }

    /// Records a pending change of a window.
    pub(crate) fn note_change(&self, change: &Arc<dyn Transfer>) {
        if let Some(changes) = &self.changes {
            changes.add(change);
        }
    }

    /// Takes the range and all that depends on it away from a window.
    pub(crate) fn unbind(&mut self) {
        self.bound = false;
        self.is_by_offset = false;
        self.access = Access::empty();
        self.len = 0;
        self.flush = None;
        self.pager = None;
        self.pattern = None;
    }

    /// Whether `tag` is the current key's, and the accessor may use the key at all.
    #[inline(always)]
    pub(crate) fn admit(&self, tag: u8, who: Accessor) -> Result<(), AccessError> {
        if !self.bound || self.tag != tag || (who.side == Side::Local && self.kind != Kind::Region) {
            return Err(AccessError::UnknownKey);
        }
        if self.pd != who.pd {
            return Err(AccessError::WrongPd);
        }
        if self.kind == Kind::WindowType2 && self.qpn != who.qpn {
            return Err(AccessError::WrongQp);
        }
        Ok(())
    }

    /// The program's address for `va`, when `len` bytes from there lie within the range.
    #[inline(always)]
    pub(crate) fn translate(&self, va: u64, len: u64) -> Result<u64, AccessError> {
        // `start + self.len` does not overflow (registration checks that), so a `va` before the start wraps to an
        // offset beyond the length, and an access that passes both comparisons ends within the range.
        let offset = va.wrapping_sub(self.start);
        if offset > self.len || len > self.len - offset {
            return Err(AccessError::OutOfRange);
        }
        Ok(va.wrapping_add(self.to_host))
    }

    /// The pager for this accessor's accesses.
    #[inline]
    pub(crate) fn pager_for(&self, who: Accessor) -> Option<&Arc<dyn Pager>> {
        self.pager.as_ref().filter(|_| who.side == Side::Remote || self.is_by_offset)
    }

    /// All checks on an access, in the order key, protection domain, queue pair, permission, range.
    #[inline(always)]
    pub(crate) fn locate(
        &self,
        tag: u8,
        who: Accessor,
        need: AccessNeed,
        va: u64,
        len: u64,
    ) -> Result<u64, AccessError> {
        self.check_right(tag, who, need)?;
        self.translate(va, len)
    }

    /// Checks the key and its rights.
    #[inline(always)]
    pub(crate) fn check_right(&self, tag: u8, who: Accessor, need: AccessNeed) -> Result<(), AccessError> {
        self.admit(tag, who)?;
        if !self.access.contains(need.permission(who.side)) {
            return Err(AccessError::Permission);
        }
        Ok(())
    }
}
