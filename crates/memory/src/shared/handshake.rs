//! The orders of stores and loads on which processes of one host rely towards each other. `tests/handshake_model.rs` tries them in
//! every interleaving.

use crate::sync::{AtomicU32, AtomicU64, Ordering, full_fence};

/// Shows a ring's reader what was written, by the word that it looks at. Whether the reader slept at the time, as a number: odd if it
/// did.
#[inline]
pub(crate) fn publish(word: &AtomicU64, value: u64, sleep: &AtomicU64) -> u64 {
    // Release: all else comes first.
    word.store(value, Ordering::Release);
    // Between this and the load: either the reader sees the word before it sleeps, or this sees that it sleeps.
    full_fence();
    sleep.load(Ordering::Relaxed)
}

/// A reader says that it is about to sleep, and looks once more after this.
pub(crate) fn fall_asleep(sleep: &AtomicU64) {
    change_sleep(sleep, 1);
    full_fence();
}

/// A reader says that it is awake.
pub(crate) fn wake_up(sleep: &AtomicU64) {
    change_sleep(sleep, 0);
}

fn change_sleep(sleep: &AtomicU64, parity: u64) {
    let now = sleep.load(Ordering::Relaxed);
    if now % 2 != parity {
        sleep.store(now.wrapping_add(1), Ordering::Relaxed);
    }
}

/// Raises the word of somebody who is about to read another process's records, and to copy. Returns what [`lower`] wants.
#[inline]
pub(crate) fn raise(word: &AtomicU32) -> u32 {
    let odd = word.load(Ordering::Relaxed).wrapping_add(1) | 1;
    // Release: who waits for an earlier copy to end, and sees only this, knows that it has.
    word.store(odd, Ordering::Release);
    // Either the records are seen as they were withdrawn, or whoever withdrew them sees the word.
    full_fence();
    odd.wrapping_add(1)
}

/// Lowers it again.
#[inline]
pub(crate) fn lower(word: &AtomicU32, even: u32) {
    // Release: the copy is over before the word says so.
    word.store(even, Ordering::Release);
}

/// To be called between withdrawing a record and looking at words.
pub(crate) fn withdrawn() {
    full_fence();
}

/// Whether the owner of a word may still copy what was withdrawn before: the word as it was then, to be waited for.
pub(crate) fn raised(word: &AtomicU32) -> Option<u32> {
    let seen = word.load(Ordering::SeqCst);
    (seen % 2 == 1).then_some(seen)
}

/// Whether the owner of a word has come to the end of what it did when [`raised`] saw it.
pub(crate) fn has_moved(word: &AtomicU32, seen: u32) -> bool {
    // Acquire: the copy is over, for everybody.
    word.load(Ordering::Acquire) != seen
}
