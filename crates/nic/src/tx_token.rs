//! The right to send for a queue pair.

use crate::sync::{AtomicU8, Ordering};

/// The right to send for a queue pair. Packets of one queue pair must leave in order. So from filling a batch until the
/// batch has left, no other thread takes packets from that queue pair. It leaves a note instead, and the holder fills
/// again.
#[derive(Debug, Default)]
pub(crate) struct TxToken(AtomicU8);

const FREE: u8 = 0;
const TAKEN: u8 = 1;
const TAKEN_LOOK_AGAIN: u8 = 2;

impl TxToken {
    /// Takes the token, or leaves a note for its holder.
    pub fn take(&self) -> bool {
        let was = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            Some(if state == FREE { TAKEN } else { TAKEN_LOOK_AGAIN })
        });
        was == Ok(FREE)
    }

    /// Whether no thread holds the token. Under the queue pair's lock it stays so.
    pub fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == FREE
    }

    /// Releases the token; true when another thread left a note.
    pub fn give_back(&self) -> bool {
        self.0.swap(FREE, Ordering::AcqRel) == TAKEN_LOOK_AGAIN
    }
}
