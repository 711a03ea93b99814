//! Copies to and from mapped frames beside evictions, without a lock. `tests/mapping_model.rs` tries them in every
//! interleaving.
//!
//! ```text
//!   a reader                a writer                    the owner, with the page's shard locked
//!   entry: readable?        entry: writable?            entry = unmapped (version even)
//!   copies                  pins += 1                   -- full fence --
//!   -- acquire fence --     -- full fence --            pins of the frame = 0?
//!   entry: same mapping?    entry: still writable?        yes: the frame may be reused
//!                           copies, pins -= 1             no: later
//! ```
//! A reader does not keep the frame: it discards what it copied if the entry has changed. A writer must not write to a
//! frame that holds another page by now, so it pins the frame. Either the writer sees that the page is unmapped, or the
//! owner sees the pin. Other processes of the host have a reader epoch with a hazard pointer instead of the pin.

use terrace_shm::PageEntry;

use crate::sync::{AtomicU16, AtomicU64, Ordering, fence};

/// More pins of one frame than this are refused. It keeps the counter from overflowing.
const PINS_MAX: u16 = 1 << 15;

/// Reads by `copy` from the page's frame. `None` if the page was not mapped all the time: what was copied is then
/// meaningless.
#[inline]
pub(crate) fn read<R>(entry: &AtomicU64, copy: impl FnOnce(u32) -> R) -> Option<R> {
    // Acquire: what was stored to the frame before it was mapped is seen.
    let before = PageEntry::from_word(entry.load(Ordering::Acquire));
    if !before.is_readable() {
        return None;
    }
    let copied = copy(before.frame());
    // If any load of the copy saw a store to the frame by its next user, the load below sees the entry changed.
    fence(Ordering::Acquire);
    let after = PageEntry::from_word(entry.load(Ordering::Relaxed));
    before.is_same_mapping(after).then_some(copied)
}

/// A pin on a frame. The frame keeps its page until this is dropped.
#[must_use = "the frame is pinned only until this is dropped"]
pub(crate) struct Pin<'a>(&'a AtomicU16);

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: the copy is over before the owner reuses the frame.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Pins the page's frame for a write; returns the frame, too. `None` if the page is not mapped for writes.
#[inline]
pub(crate) fn pin_writable<'a>(
    entry: &AtomicU64,
    pins_of: impl FnOnce(u32) -> &'a AtomicU16,
) -> Option<(u32, Pin<'a>)> {
    let before = PageEntry::from_word(entry.load(Ordering::Acquire));
    if !before.is_writable() {
        return None;
    }
    let pins = pins_of(before.frame());
    let others = pins.fetch_add(1, Ordering::Relaxed);
    let pin = Pin(pins);
    fence(Ordering::SeqCst);
    let after = PageEntry::from_word(entry.load(Ordering::Acquire));
    (after == before && others < PINS_MAX).then_some((before.frame(), pin))
}

/// Stores an entry under which copies, or writes, are no longer permitted.
pub(crate) fn revoke(entry: &AtomicU64, to: PageEntry) {
    entry.store(to.word(), Ordering::Release);
    // Also keeps later stores to the frame behind the store of the entry.
    fence(Ordering::SeqCst);
}

/// Whether a copy may be under way that began before [`revoke`].
pub(crate) fn is_pinned(pins: &AtomicU16) -> bool {
    // Acquire: copies that have ended come before what the caller does next.
    pins.load(Ordering::Acquire) != 0
}

/// Stores an entry under which copies are permitted.
pub(crate) fn publish(entry: &AtomicU64, to: PageEntry) {
    // Release: what was stored to the frame comes first.
    entry.store(to.word(), Ordering::Release);
}
