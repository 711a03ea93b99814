//! Memory of this process that work requests name: found registered, and kept so during a copy.

use smallvec::{SmallVec, smallvec};
use terrace_hostmem::HostRange;
use terrace_shm::{Direction, EpochGuard, KeyMemo, LocalMemory, Refusal};

use crate::access::{AccessError, AccessNeed, Accessor};
use crate::entry::Entry;
use crate::pin::Pinned;
use crate::registry::Registry;
use crate::table::tag_of;

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

/// A piece of this process's memory that is yet to be found registered, as the local end of a copy from or to another
/// process's memory.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a> {
    /// The registry.
    pub registry: &'a Registry,
    /// The queue pair that accesses it.
    pub who: Accessor,
    /// For the next access of the same kind.
    pub memo: &'a KeyMemo,
    /// The piece.
    pub piece: LocalPiece,
}

/// A short copy looks at the region's slot under the reader's epoch, a long one pins it.
// SAFETY: both give only what is registered for the direction, and it stays registered meanwhile.
unsafe impl LocalMemory for Local<'_> {
    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.piece.len
    }

    #[inline(always)]
    fn slot(&self) -> Option<u32> {
        Some(self.registry.table.number_again(self.piece.lkey, self.memo))
    }

    #[inline(always)]
    fn locate(&self, direction: Direction, guard: &EpochGuard<'_>) -> Result<HostRange, Refusal> {
        let need = AccessNeed::of_local_end(direction);
        let found = self.registry.locate_piece(guard, self.who, need, self.piece);
        found.map_err(|_| Refusal::NotHere)
    }

    #[inline]
    fn hold(
        &self,
        direction: Direction,
        act: impl FnOnce(HostRange) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let need = AccessNeed::of_local_end(direction);
        let acted = self.registry.with_piece(self.who, need, self.memo, self.piece, act);
        acted.unwrap_or(Err(Refusal::NotHere))
    }
}

impl Registry {
    /// Keeps the memory that a local work request names registered while `act` uses its addresses. `memo` is for the
    /// next work request of the same kind.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `NotReady` while one of the regions is being changed, and for regions that are files:
    /// those have no addresses.
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
    fn locate_piece(
        &self,
        guard: &EpochGuard<'_>,
        who: Accessor,
        need: AccessNeed,
        piece: LocalPiece,
    ) -> Result<HostRange, AccessError> {
        let entry = self.table.entry_under(guard).filter(|entry| !entry.is_by_offset);
        let entry = entry.ok_or(AccessError::NotReady)?;
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
        let entry = slot.try_pin().filter(|entry| !entry.is_by_offset).ok_or(AccessError::NotReady)?;
        let addr = entry.locate(tag_of(piece.lkey), who, need, piece.addr, piece.len)?;
        Ok((entry, HostRange { addr, len: piece.len }))
    }
}
