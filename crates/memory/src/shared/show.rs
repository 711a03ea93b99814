//! What the registry publishes to other processes.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use smallvec::{SmallVec, smallvec};
use terrace_hostmem::HostRange;

use super::{GracePeriod, Reaching, SharedRegistry, ShownQueuePair, ShownRegion, Version};
use crate::access::{AccessError, AccessNeed, Accessor, RegisterError};
use crate::entry::{Entry, Kind};
use crate::paging::Pager;
use crate::pin::{Closed, Pinned};
use crate::registry::Registry;
use crate::table::{KeyMemo, tag_of};

/// Memory of the program that a local work request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalPiece {
    /// Key of its region.
    pub lkey: u32,
    /// First byte, as the key's users name it.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

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

impl Registry {
    /// Publishes all regions, from now on, to processes that receive this descriptor: a segment that they can only
    /// read.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left; `Unsupported` in a forked child.
    pub fn show(&self) -> io::Result<BorrowedFd<'_>> {
        if self.is_detached.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // No region is registered meanwhile.
        let changes = self.changes.close();
        if self.board.get().is_none() {
            let board = SharedRegistry::new(self.table.key_order())?;
            for (index, slot) in self.table.slots() {
                let entry = slot.pin();
                if let Some(region) = shown(&entry) {
                    board.show_region(self.number(index), &region);
                }
            }
            // No other thread can have set it: that takes the lock.
            let _ = self.board.set(board);
        }
        drop(changes);
        self.board.get().map(SharedRegistry::file).ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// Whether registered regions are published.
    #[inline]
    pub fn is_shown(&self) -> bool {
        self.board().is_some()
    }

    /// The number of a key's slot.
    fn number(&self, key: u32) -> u32 {
        self.table.key_order().inward(key >> 8)
    }

    #[inline]
    fn board(&self) -> Option<&SharedRegistry> {
        self.board.get().filter(|_| !self.is_detached.load(Ordering::Relaxed))
    }

    /// Publishes a queue pair that gives access to regions, or withdraws it. The caller has the queue pair locked.
    /// Accesses that other processes have begun may still be under way, until [`GracePeriod::of_queue_pair`] is over.
    pub fn set_queue_pair(&self, qpn: u32, queue_pair: Option<&ShownQueuePair>) {
        if let Some(board) = self.board() {
            board.set_queue_pair(qpn, queue_pair);
        }
    }

    /// Publishes a region as it is now, if it is to be published. The caller has its slot closed.
    pub(crate) fn show_region(&self, key: u32, entry: &Entry) {
        if let (Some(board), Some(region)) = (self.board(), shown(entry)) {
            board.show_region(self.number(key), &region);
        }
    }

    /// Changes a region while no other process accesses it. If `check` passes, the region is withdrawn, and other
    /// processes' accesses to it end; then `change` has exclusive access. The wait for those accesses holds no lock:
    /// the region serves packets meanwhile.
    ///
    /// # Errors
    /// Those of `check` and `change`; `Busy` when another thread changes it as well; `StillReached` when another
    /// process does not end an access in time. The region is then as it was.
    pub(crate) fn change_region<R>(
        &self,
        key: u32,
        check: impl Fn(&Entry) -> Result<(), RegisterError>,
        change: impl FnOnce(&mut Closed<'_, Entry>) -> Result<R, RegisterError>,
    ) -> Result<R, RegisterError> {
        let slot = self.table.slot_of(key).ok_or(RegisterError::UnknownKey)?;
        let pages = {
            let _changing = self.changes.pin();
            let mut entry = slot.close();
            check(&entry)?;
            let Some(board) = self.board() else { return change(&mut entry) };
            entry.withdrawals += 1;
            board.hide_region(self.number(key));
            HostRange { addr: entry.start.wrapping_add(entry.to_host), len: entry.len }
        };
        let over = GracePeriod::of_pages(pages).wait_long();
        let _changing = self.changes.pin();
        let mut entry = slot.close();
        entry.withdrawals -= 1;
        let result = match over {
            // Another thread may have changed it meanwhile, or wait to do so.
            Ok(()) if entry.withdrawals == 0 => check(&entry).and_then(|()| change(&mut entry)),
            Ok(()) => Err(RegisterError::Busy),
            Err(reached) => Err(RegisterError::StillReached(reached)),
        };
        self.show_region(key, &entry);
        result
    }

    /// What another process needs to access a region that it sees with this version.
    pub fn memory_of(&self, key: u32, version: Version) -> Option<RegionMemory> {
        let slot = self.slot(key).ok()?;
        let entry = slot.pin();
        let current = self.board()?.region_version(self.number(key))?;
        if entry.kind != Kind::Region || entry.tag != tag_of(key) || current != version {
            return None;
        }
        let range = HostRange { addr: entry.start.wrapping_add(entry.to_host), len: entry.len };
        let is_writable = entry.access.writes_remotely();
        Some(RegionMemory { version, range, is_writable, pager: entry.pager.clone() })
    }

    /// Keeps the memory that a local work request names registered while `act` uses its addresses. `memo` is for the
    /// next work request of the same kind.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `NotReady` while one of the regions is being changed.
    #[inline]
    pub fn with_local<R>(
        &self,
        who: Accessor,
        need: AccessNeed,
        memo: &KeyMemo,
        pieces: impl Iterator<Item = LocalPiece>,
        act: impl FnOnce(&[HostRange]) -> R,
    ) -> Result<R, AccessError> {
        let pin = |piece| self.pin_piece(who, need, memo, piece);
        let mut pieces = pieces.filter(|piece| piece.len > 0);
        let Some(first) = pieces.next() else { return Ok(act(&[])) };
        let (first_pin, first_range) = pin(first)?;
        // Most requests have one piece.
        let Some(second) = pieces.next() else { return Ok(act(&[first_range])) };
        let mut pins: SmallVec<[Pinned<'_, Entry>; 4]> = smallvec![first_pin];
        let mut ranges: SmallVec<[HostRange; 4]> = smallvec![first_range];
        for piece in std::iter::once(second).chain(pieces) {
            let (entry, range) = pin(piece)?;
            ranges.push(range);
            pins.push(entry);
        }
        Ok(act(&ranges))
    }
}

impl Registry {
    /// The same as [`Registry::with_local`] for one piece, which is not empty.
    ///
    /// # Errors
    /// The same.
    #[inline]
    pub fn with_piece<R>(
        &self,
        who: Accessor,
        need: AccessNeed,
        memo: &KeyMemo,
        piece: LocalPiece,
        act: impl FnOnce(HostRange) -> R,
    ) -> Result<R, AccessError> {
        let (_pin, range) = self.pin_piece(who, need, memo, piece)?;
        Ok(act(range))
    }

    /// Where a piece is, as long as the epoch is odd that protects its slot.
    #[inline(always)]
    pub(super) fn look_at_piece(
        &self,
        reaching: &Reaching<'_>,
        who: Accessor,
        need: AccessNeed,
        piece: LocalPiece,
    ) -> Result<HostRange, AccessError> {
        let entry = self.table.look(reaching).ok_or(AccessError::NotReady)?;
        let addr = entry.locate(tag_of(piece.lkey), who, need, piece.addr, piece.len)?;
        Ok(HostRange { addr, len: piece.len })
    }

    #[inline]
    fn pin_piece(
        &self,
        who: Accessor,
        need: AccessNeed,
        memo: &KeyMemo,
        piece: LocalPiece,
    ) -> Result<(Pinned<'_, Entry>, HostRange), AccessError> {
        // A thread that waits for a change of one region while it has another one, or the same one, pinned could wait
        // for ever.
        let slot = self.table.slot_again(piece.lkey, memo).ok_or(AccessError::UnknownKey)?;
        let entry = slot.try_pin().ok_or(AccessError::NotReady)?;
        let addr = entry.locate(tag_of(piece.lkey), who, need, piece.addr, piece.len)?;
        Ok((entry, HostRange { addr, len: piece.len }))
    }
}

fn shown(entry: &Entry) -> Option<ShownRegion> {
    (entry.kind == Kind::Region && entry.bound && entry.withdrawals == 0).then_some(ShownRegion {
        tag: entry.tag,
        access: entry.access,
        pd: entry.pd,
        start: entry.start,
        len: entry.len,
        to_host: entry.to_host,
    })
}
