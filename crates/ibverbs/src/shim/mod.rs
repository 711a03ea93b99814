//! The C library's functions that this library interposes when it is preloaded.
//!
//! Programs look for RDMA devices in two places besides libibverbs: under `/dev/infiniband` and under
//! `/sys/class/infiniband`. Calls with such a path are redirected to a directory tree with the same contents (`tree`).
//! Any other path costs two comparisons. The fault-safe copies of `terrace_hostmem` need SIGSEGV and SIGBUS. Programs
//! can install handlers for these signals or block them, while this library's handler stays installed (`signals`).
//! Regions larger than memory are notified before the mapping below them changes; the C library's allocator changes mappings,
//! too (`mappings`). A write to
//! `/dev/infiniband/rdma_cm` is a command to the connection manager (`descriptors`). Netlink requests about RDMA devices
//! are answered in the process (`sockets`).
//!
//! `docs/decisions/0007-the-shim-is-part-of-libibverbs.md` gives the reasons why the shim is not a separate library.

mod descriptors;
pub mod mappings;
mod paths;
pub mod real;
pub mod redirect;
pub mod signals;
mod sockets;
pub mod tree;
