//! What the code that threads share without a lock is built from. The model in `tests/interned_model.rs` replaces this
//! module with loom's types.

pub(crate) use std::sync::atomic::{AtomicPtr, Ordering};
