//! Memory of a paged region, for its pager.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::common::pager::Cells;

/// Bytes by their offset.
pub struct Bytes(pub Arc<[AtomicU8]>);

impl Cells for Bytes {
    fn get(&self, offset: usize, out: &mut [u8]) {
        out.iter_mut().zip(&self.0[offset..]).for_each(|(byte, cell)| *byte = cell.load(Ordering::SeqCst));
    }

    fn set(&self, offset: usize, data: &[u8]) {
        data.iter().zip(&self.0[offset..]).for_each(|(byte, cell)| cell.store(*byte, Ordering::SeqCst));
    }
}
