//! The memory of this process as a NIC sees it: addresses that may or may not be mapped.
//!
//! The program may unmap, protect or truncate its memory while the NIC copies. [`fault`] has copies and atomics that
//! report such memory instead of ending the process, and the signal handlers that this takes. [`HostRange`] names a
//! range of addresses; [`PAGE_BYTES`] is the size that ranges are counted in. [`SharedBytes`]
//! are the source of a copy that another process may change meanwhile.
//!
//! This is a crate of its own because two crates copy that must not depend on each other's reasons: `terrace-shm`
//! copies between processes, `terrace-memory` copies to and from registered regions. It knows neither keys nor
//! processes, files nor packets. The crate `terrace-faults`, which has fault plans for tests, is something else.

#![warn(missing_docs)]

mod atomic_op;
pub mod fault;
mod interned;
mod prefetch;
mod range;
mod shared_bytes;
mod sync;

pub use atomic_op::AtomicOp;
pub use prefetch::{prefetch, prefetch_to_write};
pub use range::{HostRange, PAGE_BYTES, pages_of};
pub use shared_bytes::{CopySource, SharedBytes, Unordered};
