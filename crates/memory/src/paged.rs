//! The data path of regions whose bytes need not be in memory: what is present is copied at once; an access to what is
//! absent is refused, answered with the signature page, dropped, or handed to the pager.

use std::ops::Range;
use std::sync::Arc;

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES, prefetch};

use crate::access::{Absence, AccessError, AccessNeed, Accessor, Side};
use crate::entry::Entry;
use crate::flush::FlushScope;
use crate::paging::{Pager, Pattern, RegionPolicy, Transfer, Waker};
use crate::registry::{Registry, locate_atomic};
use crate::table::{Slot, tag_of};
use crate::translation::{LocalCopies, Translation};

/// Longest range that a pager is asked to bring into memory at a time, in bytes.
const FAULT_BYTES_MAX: u64 = 64 << 10;

/// What [`Registry::paged_key`] finds.
pub type PagedKey = (u64, HostRange, Arc<dyn Pager>);

/// Copies a range if all of it is present. Otherwise the peer gets the signature page for the absent part, if it asked
/// for that. A local work request waits for what is absent.
pub(crate) fn read(
    entry: &Entry,
    pager: &dyn Pager,
    who: Accessor,
    host: u64,
    out: &mut [u8],
) -> Result<(), AccessError> {
    let part = HostRange { addr: host, len: out.len() as u64 };
    let translation = pager.translation();
    if who.side == Side::Local {
        return local_copies(translation)?.read_now(part, out);
    }
    if let Some(result) = translation.read(part, out) {
        return result;
    }
    match pattern_for(entry, who) {
        Some(pattern) => read_around(translation, pattern, part, out),
        None => Err(refuse(entry, pager, part)),
    }
}

/// Copies to memory that is present; for a local work request, to any memory.
pub(crate) fn write(
    entry: &Entry,
    pager: &dyn Pager,
    who: Accessor,
    host: u64,
    data: &[u8],
) -> Result<(), AccessError> {
    if who.side == Side::Local {
        return local_copies(pager.translation())?.write_now(host, data);
    }
    let part = HostRange { addr: host, len: data.len() as u64 };
    pager.translation().write(host, data).unwrap_or_else(|| match pattern_for_all(entry, who) {
        Some(_) => write_present(pager.translation(), host, data),
        None => Err(refuse(entry, pager, part)),
    })
}

/// What copies for local work requests, which have a pager only where it exists.
fn local_copies(translation: &dyn Translation) -> Result<&dyn LocalCopies, AccessError> {
    translation.local_copies().ok_or(AccessError::Fault)
}

/// Performs an atomic operation on memory that is present, and counts it.
pub(crate) fn atomic(
    entry: &Entry,
    pager: &dyn Pager,
    who: Accessor,
    host: u64,
    op: AtomicOp,
) -> Result<u64, AccessError> {
    let part = HostRange { addr: host, len: 8 };
    let result = pager.translation().atomic(host, op);
    pager.translation().count(part, result.is_some());
    result.unwrap_or_else(|| match pattern_for_all(entry, who) {
        Some(pattern) if !pager.translation().is_present(part) => {
            let mut before = [0; 8];
            fill(&mut before, pattern, host - pager.translation().range().addr);
            Ok(u64::from_ne_bytes(before))
        }
        Some(_) => Err(AccessError::NotReady),
        None => Err(refuse(entry, pager, part)),
    })
}

/// The signature page, if this peer gets it for absent bytes instead of waiting for them.
fn pattern_for(entry: &Entry, who: Accessor) -> Option<&Pattern> {
    let wanted = who.absence == Absence::Magic && entry.policy == RegionPolicy::Wait && !entry.is_by_offset;
    pattern_for_all(entry, who).or_else(|| entry.pattern.as_ref().filter(|_| wanted))
}

/// The signature page, if peers get it for absent bytes, and this one does not refuse it. Offsets in a file have no pages that could be absent.
fn pattern_for_all(entry: &Entry, who: Accessor) -> Option<&Pattern> {
    let is_mapped = entry.policy == RegionPolicy::Commodity && who.absence != Absence::Refuse;
    entry.pattern.as_ref().filter(|_| is_mapped && !entry.is_by_offset)
}

/// Copies unit by unit, with the signature page in place of absent ones.
fn read_around(
    translation: &dyn Translation,
    pattern: &Pattern,
    part: HostRange,
    out: &mut [u8],
) -> Result<(), AccessError> {
    let (mut rest, mut out) = (part, out);
    while rest.len > 0 {
        let here = translation.first_part(rest);
        let (piece, others) = out.split_at_mut(here.len as usize);
        match translation.read(here, piece) {
            Some(result) => result?,
            None => fill(piece, pattern, here.addr - translation.range().addr),
        }
        rest = HostRange { addr: here.addr + here.len, len: rest.len - here.len };
        out = others;
    }
    Ok(())
}

/// Writes to the units that are present; what is for the others vanishes. A page's version is odd while it is present, and
/// a peer takes the same odd version before and after its WRITE for success, so nothing for a present page may vanish.
///
/// # Errors
/// `NotReady` when a present page cannot be written at the moment: the pager carries the write out then.
fn write_present(translation: &dyn Translation, addr: u64, data: &[u8]) -> Result<(), AccessError> {
    let (mut rest, mut data) = (HostRange { addr, len: data.len() as u64 }, data);
    while rest.len > 0 {
        let here = translation.first_part(rest);
        let (piece, others) = data.split_at(here.len as usize);
        match translation.write(here.addr, piece) {
            Some(result) => result?,
            None if translation.is_present(here) => return Err(AccessError::NotReady),
            None => {}
        }
        rest = HostRange { addr: here.addr + here.len, len: rest.len - here.len };
        data = others;
    }
    Ok(())
}

/// Writes to the present units at either end of a range, and returns the part between them, which has at least one
/// unit. A write to a present unit must not be deferred: it would undo what is written there meanwhile.
fn write_around(translation: &dyn Translation, addr: u64, data: &[u8]) -> Result<Range<usize>, AccessError> {
    let mut rest = 0..data.len();
    for last in [false, true] {
        loop {
            let whole = HostRange { addr: addr + rest.start as u64, len: rest.len() as u64 };
            let piece = if last { translation.last_part(whole) } else { translation.first_part(whole) };
            if piece == whole {
                return Ok(rest);
            }
            let (start, len) = ((piece.addr - addr) as usize, piece.len as usize);
            let Some(result) = translation.write(piece.addr, &data[start..start + len]) else { break };
            result?;
            rest = if last { rest.start..start } else { start + len..rest.end };
        }
    }
    Ok(rest)
}

/// Fills `out`, which begins at `offset` of the range, from the signature page.
fn fill(mut out: &mut [u8], pattern: &Pattern, offset: u64) {
    let mut start = (offset % PAGE_BYTES) as usize;
    while !out.is_empty() {
        let len = out.len().min(pattern.len() - start);
        let (piece, others) = out.split_at_mut(len);
        piece.copy_from_slice(&pattern[start..start + len]);
        (out, start) = (others, 0);
    }
}

/// The error for a range of which part is absent, or does not exist.
#[cold]
fn refuse(entry: &Entry, pager: &dyn Pager, part: HostRange) -> AccessError {
    if let Err(error) = pager.translation().check(part) {
        return error;
    }
    match entry.policy {
        RegionPolicy::Wait | RegionPolicy::Commodity => AccessError::NotReady,
        RegionPolicy::Fault if bring(pager, part) => AccessError::NotReady,
        RegionPolicy::Fault => AccessError::Retry,
    }
}

/// Asks the pager for the first absent bytes. Nothing waits for the answer: the peer retries, and the pager is asked
/// again if it was full or more is absent. True if the pager has the bytes at hand without their being present: then it
/// can be asked to perform the access.
fn bring(pager: &dyn Pager, part: HostRange) -> bool {
    let translation = pager.translation();
    let mut rest = part;
    while rest.len > 0 {
        let here = translation.first_part(rest);
        if !translation.is_present(here) {
            let wanted = HostRange { len: here.len.min(FAULT_BYTES_MAX), ..here };
            let nobody: Waker = Arc::new(|| {});
            return pager.read(wanted, &nobody).is_ok_and(|transfer| transfer.outcome().is_some());
        }
        rest = HostRange { addr: here.addr + here.len, len: rest.len - here.len };
    }
    false
}

impl Registry {
    /// The first address that a key names, the addresses of its pager that it covers, and the pager. `None` for a key of
    /// memory without pager, or whose addresses are offsets in a file.
    ///
    /// # Errors
    /// `UnknownKey`, `WrongPd`, `WrongQp`.
    pub fn paged_key(&self, who: Accessor, key: u32) -> Result<Option<PagedKey>, AccessError> {
        let entry = self.slot(key)?.pin();
        entry.admit(tag_of(key), who)?;
        let range = HostRange { addr: entry.start.wrapping_add(entry.to_host), len: entry.len };
        let pager = entry.pager_for(who).filter(|_| !entry.is_by_offset);
        Ok(pager.map(|pager| (entry.start, range, pager.clone())))
    }

    /// Checks an access that a peer's READ or WRITE announces, as [`Registry::check`] does, and counts it where the
    /// region has a pager. Touches nothing, and the answer can be outdated when it arrives.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `NotReady` when part of it is absent and the peer does not want the signature page;
    /// `Retry` when part of it is absent and on its way.
    pub fn announce(
        &self,
        who: Accessor,
        key: u32,
        va: u64,
        len: u64,
        need: AccessNeed,
    ) -> Result<(), AccessError> {
        if len == 0 && need.needs_no_key_for_nothing() {
            return Ok(());
        }
        let entry = self.slot(key)?.pin();
        let host = entry.locate(tag_of(key), who, need, va, len)?;
        let Some(pager) = entry.pager_for(who) else {
            // The access follows once the other packets of the burst have been handled.
            prefetch(host);
            return Ok(());
        };
        let part = HostRange { addr: host, len };
        let is_hit = pager.translation().is_present(part);
        let is_answered = match need {
            AccessNeed::Read => pattern_for(&entry, who).is_some(),
            _ => pattern_for_all(&entry, who).is_some(),
        };
        if !is_hit && is_answered {
            // The peer requests again, by other means, what was absent, and is counted then.
            return Ok(());
        }
        pager.translation().count(part, is_hit);
        if is_hit { Ok(()) } else { Err(refuse(&entry, &**pager, part)) }
    }

    /// Has the processor load what [`Registry::announce`] will need of a range that begins at `va`: a hint, for a key and
    /// an address that nobody has checked. Changes nothing that can be observed but time.
    #[inline]
    pub fn prefetch_announced(&self, key: u32, va: u64) {
        let Some(entry) = self.table.slot_of(key).and_then(Slot::try_pin) else { return };
        if let (Some(pager), Ok(host)) = (&entry.pager, entry.translate(va, 1)) {
            pager.translation().prefetch(host);
        }
    }

    /// Has the pager read a range, present or not. The waker is called when the transfer has ended or, after
    /// `NotReady`, when the pager has space.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `NotReady` when the pager is full; `Retry` when the region has no pager any more, so
    /// that [`Registry::read`] will do.
    pub fn fetch(
        &self,
        who: Accessor,
        key: u32,
        va: u64,
        len: u64,
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        let entry = self.slot(key)?.pin();
        let addr = entry.locate(tag_of(key), who, AccessNeed::Read, va, len)?;
        entry.pager_for(who).ok_or(AccessError::Retry)?.read(HostRange { addr, len }, waker)
    }

    /// Writes what is present, and has the pager write what is absent: one range, of which the middle may be present.
    /// The waker is called as for [`Registry::fetch`].
    ///
    /// # Errors
    /// As for [`Registry::fetch`]; bytes may have been written then.
    pub fn put(
        &self,
        who: Accessor,
        key: u32,
        va: u64,
        data: &[u8],
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        let entry = self.slot(key)?.pin();
        let addr = entry.locate(tag_of(key), who, AccessNeed::Write, va, data.len() as u64)?;
        let pager = entry.pager_for(who).ok_or(AccessError::Retry)?;
        let absent = write_around(pager.translation(), addr, data)?;
        let change = pager.write(addr + absent.start as u64, &data[absent], waker)?;
        entry.note_change(&change);
        Ok(change)
    }

    /// Has the pager perform an atomic operation. The waker is called as for [`Registry::fetch`].
    ///
    /// # Errors
    /// As for [`Registry::fetch`], and `Misaligned`.
    pub fn put_atomic(
        &self,
        who: Accessor,
        key: u32,
        va: u64,
        op: AtomicOp,
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        let entry = self.slot(key)?.pin();
        let addr = locate_atomic(&entry, key, who, va, op)?;
        let change = entry.pager_for(who).ok_or(AccessError::Retry)?.atomic(addr, op, waker)?;
        entry.note_change(&change);
        Ok(change)
    }

    /// Has the pager make a range durable, where [`Registry::flush`] has answered `NotReady`. The waker is called as
    /// for [`Registry::fetch`].
    ///
    /// # Errors
    /// As for [`Registry::flush`] and [`Registry::fetch`].
    #[expect(clippy::too_many_arguments, reason = "the fields of the request, and who wants to know")]
    pub fn flush_paged(
        &self,
        who: Accessor,
        key: u32,
        va: u64,
        len: u64,
        placement: u8,
        scope: FlushScope,
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        let entry = self.slot(key)?.pin();
        let range = entry.locate_flush(tag_of(key), who, va, len, placement, scope)?;
        entry.pager_for(who).ok_or(AccessError::Retry)?.flush(range, waker)
    }
}
