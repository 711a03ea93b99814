//! What the code that threads share without a lock is built from. The models in `tests/models/` replace this module
//! with loom's types.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

pub(crate) use terrace_sync::Mutex;
