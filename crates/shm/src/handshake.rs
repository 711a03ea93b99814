//! The orders of stores and loads by which processes of one host synchronize. `tests/handshake_model.rs` tries them in
//! every interleaving.

use crate::sync::{AtomicU32, AtomicU64, Ordering, full_fence};

/// Publishes a batch by the word that a ring's consumer polls. Returns `sleep` as it was then: odd if the consumer
/// slept.
#[inline]
pub(crate) fn publish(word: &AtomicU64, value: u64, sleep: &AtomicU64) -> u64 {
    // Release: all earlier stores come first.
    word.store(value, Ordering::Release);
    // Either the consumer sees the word before it sleeps, or this load sees that the consumer sleeps.
    full_fence();
    sleep.load(Ordering::Relaxed)
}

/// A consumer announces that it is about to sleep. It checks the ring once more after this.
pub(crate) fn fall_asleep(sleep: &AtomicU64) {
    change_sleep(sleep, 1);
    full_fence();
}

/// A consumer announces that it is awake.
pub(crate) fn wake_up(sleep: &AtomicU64) {
    change_sleep(sleep, 0);
}

fn change_sleep(sleep: &AtomicU64, parity: u64) {
    let now = sleep.load(Ordering::Relaxed);
    if now % 2 != parity {
        sleep.store(now.wrapping_add(1), Ordering::Relaxed);
    }
}

/// Makes a reader's epoch odd before the reader reads another process's records and copies. Returns the argument for
/// [`leave`].
#[inline]
pub(crate) fn enter(epoch: &AtomicU32) -> u32 {
    let odd = epoch.load(Ordering::Relaxed).wrapping_add(1) | 1;
    // Release: a grace period that waits for an earlier copy, and sees only this store, knows that the copy has ended.
    epoch.store(odd, Ordering::Release);
    // Either the reader sees that the records are withdrawn, or the process that withdrew them sees the odd epoch.
    full_fence();
    odd.wrapping_add(1)
}

/// Makes the epoch even again.
#[inline]
pub(crate) fn leave(epoch: &AtomicU32, even: u32) {
    // Release: the copy is over before the epoch says so.
    epoch.store(even, Ordering::Release);
}

/// To be called between withdrawing a record and reading epochs.
pub(crate) fn fence_after_withdrawal() {
    full_fence();
}

/// Whether a reader may still copy what was withdrawn before: its epoch at this time, to be waited for.
pub(crate) fn odd_epoch(epoch: &AtomicU32) -> Option<u32> {
    let seen = epoch.load(Ordering::SeqCst);
    (seen % 2 == 1).then_some(seen)
}

/// Whether a reader has ended the access during which [`odd_epoch`] read its epoch.
pub(crate) fn has_changed(epoch: &AtomicU32, seen: u32) -> bool {
    // Acquire: the copy is over before the caller continues.
    epoch.load(Ordering::Acquire) != seen
}
