//! The C library's functions that this library interposes when it is preloaded.
//!
//! Programs look for RDMA devices in two places besides libibverbs: under `/dev/infiniband` and under
//! `/sys/class/infiniband`. Calls with a path there are redirected to a directory tree that looks the same (`tree`);
//! any other path costs two comparisons. The fault-safe copies of `terrace_hostmem` need SIGSEGV and SIGBUS, so
//! programs that install handlers for those, or block them, get the expected results while our handler stays first
//! (`signals`). Regions larger than memory are notified before the mapping below them changes (`mappings`). A write to
//! `/dev/infiniband/rdma_cm` is a command to our connection manager (`descriptors`).
//!
//! `docs/decisions/0007-the-shim-is-part-of-libibverbs.md` gives the reasons why this is not a library of its own.

mod descriptors;
mod mappings;
mod paths;
pub mod real;
pub mod redirect;
pub mod signals;
pub mod tree;
