//! What the copies beside evictions are built from. The model in `tests/mapping_model.rs` replaces this module with
//! loom's types.

pub(crate) use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};
