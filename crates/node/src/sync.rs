//! What the code that threads share without a lock is built from. The models in `tests/*_model.rs` replace this module
//! with loom's types.

pub(crate) use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use terrace_sync::Backlog;
