//! Bytes of memory that is kept as atomic words, so that devices may access it meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};

/// Copies bytes from `offset` on.
pub(crate) fn load(cells: &[AtomicU64], offset: usize, out: &mut [u8]) {
    let mut at = offset;
    for part in parts_of(offset, out.len()) {
        let word = cells[at / 8].load(Ordering::Relaxed).to_ne_bytes();
        let start = at - offset;
        out[start..start + part].copy_from_slice(&word[at % 8..at % 8 + part]);
        at += part;
    }
}

/// Stores bytes from `offset` on.
pub(crate) fn store(cells: &[AtomicU64], offset: usize, data: &[u8]) {
    let mut at = offset;
    for part in parts_of(offset, data.len()) {
        let cell = &cells[at / 8];
        let mut word = cell.load(Ordering::Relaxed).to_ne_bytes();
        let start = at - offset;
        word[at % 8..at % 8 + part].copy_from_slice(&data[start..start + part]);
        cell.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        at += part;
    }
}

/// The lengths of the parts of a range that lie in one word each.
fn parts_of(offset: usize, len: usize) -> impl Iterator<Item = usize> {
    let (mut at, end) = (offset, offset + len);
    std::iter::from_fn(move || {
        let part = (8 - at % 8).min(end - at);
        at += part;
        (part > 0).then_some(part)
    })
}
