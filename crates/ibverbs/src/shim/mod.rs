//! The C library's functions that this library stands in front of when it is preloaded.
//!
//! Programs look for RDMA devices in two places besides libibverbs: under `/dev/infiniband` and under
//! `/sys/class/infiniband`. Calls that name a path there go to a directory tree that looks the same (`tree`); any other
//! path costs two comparisons. And the fault-safe copies of `terrace_memory` need SIGSEGV and SIGBUS, so programs that
//! install handlers for those, or block them, are told what they expect to hear while ours stays first (`signals`). Regions
//! larger than memory have to know when the mapping below them goes (`mappings`). What is written to `/dev/infiniband/rdma_cm` is
//! a command to our connection manager (`descriptors`).
//!
//! `docs/decisions/0007-one-library-with-the-shim-inside.md` says why this is not a library of its own.

mod descriptors;
mod mappings;
mod paths;
mod real;
mod redirect;
mod signals;
mod tree;

pub use real::find_all;
pub use redirect::redirected;
pub use signals::without_signals;
pub use tree::{Hold, hold_for_fork};
