//! `libibverbs.so.1`, whole: the C ABI over `terrace_nic`.
//!
//! | where | what |
//! |---|---|
//! | `abi` | C's types: written by bindgen from the header, and what newer headers add |
//! | `object`, `errno` | how objects and failures cross the C boundary |
//! | `device_list`, `open`, `context`, `identity`, `query` | finding, opening and describing the device |
//! | `pd`, `mr`, `mw`, `cq`, `cq_ex`, `channel`, `srq`, `qp`, `xrcd`, `ah`, `events`, `buffer`, `dm` | one module per object; `extended_poll` is a part of `cq` |
//! | `strings`, `sysfs`, `neighbour`, `kernel_copies`, `unsupported` | the rest of the public symbols |
//! | `private_nodes`, `compat` | symbols that providers and programs of 2005 bind |
//! | `paged` | `terrace run --dram`: on-demand regions over file mappings, extended by their files |
//! | `rdma_cm`, `nic` | the device through which librdmacm connects; the process's NICs, and which one it shares with a context |
//! | `fork`, `once`, `room`, `backings`, `shim`, `log` | living inside another program's process |
//!
//! Files here do not import each other in circles (`scripts/module_circles.py` would show them). `open` is above the
//! verbs and `fork` above all that a fork holds; types that several files need are in small files of their own.
//!
//! Rules here: no panic crosses the C boundary (the release profile aborts on one, so there must be none); every
//! pointer that a program may leave null is checked; attributes are read once, by value; `nic` and `transport` decide
//! what an attribute means, not this crate. `link.sh` makes the shared library, `exports.map` has the symbol versions.

#[deny(missing_docs)]
pub mod abi;

mod ah;
mod backings;
mod buffer;
mod channel;
// The names are those of the symbols, with their version node in front.
#[allow(non_snake_case)]
mod compat;
mod context;
mod cq;
mod cq_ex;
mod device_list;
mod dm;
mod errno;
mod events;
mod extended_poll;
mod fork;
mod identity;
mod kernel_copies;
mod log;
mod mr;
mod mw;
mod neighbour;
mod nic;
mod object;
mod once;
mod open;
mod paged;
mod pd;
#[allow(non_snake_case, non_upper_case_globals)]
mod private_nodes;
mod qp;
#[allow(non_snake_case)]
mod query;
mod rdma_cm;
mod room;
mod shim;
mod srq;
#[allow(non_snake_case)]
mod strings;
mod sysfs;
#[allow(non_snake_case)]
mod unsupported;
mod xrcd;
