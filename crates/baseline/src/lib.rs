//! The regions that `pages` is compared with: pinned ones, on-demand paging as in hardware, and accesses by RPC over each
//! kind of IO.
//!
//! A region is a shared mapping of a file. The methods ([`IoMethod`]) differ in how an access is carried out: by copies to
//! and from locked memory, which the NIC makes by itself; by copies that take page faults; through the page cache;
//! bypassing it; or through it if it has the bytes. `FaultPager` models on-demand paging as in hardware.
//!
//! ```text
//!   BaselineRegion (Pager)    Baseline::advance
//!     read, write,              submits, reaps,
//!     atomic, flush             calls wakers
//!         |                         |
//!         +-------> core: accesses under way, page queues
//!                     |                   |
//!                 jobs: copies        device: io_uring, threads
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `baseline` | opening a baseline, adding and removing regions |
//! | `baseline_region` | the pager: checks, buffers |
//! | `region`, `stats` | the constants and counters of a region |
//! | `regions` | regions by identifier |
//! | `core` | the state machine of accesses |
//! | `order` | page locks in request order |
//! | `plan` | how an access is carried out |
//! | `pending`, `transfer`, `job` | an access under way; its caller's side; work that the calling thread does |
//! | `engine` | progress: between the core and the device |
//! | `workers` | threads for copies that take page faults |
//! | `fault_pager` | on-demand paging as in hardware |
//! | `device` | io_uring, threads, a faulty one for tests, one for fault plans |
//! | `pool` | bounce buffers |
//! | `file`, `budget` | files of regions; limits |
//! | `sys` | system calls on mappings |
//!
//! This crate does not know packets.

mod baseline;
mod baseline_region;
mod budget;
mod config;
mod core;
pub mod device;
mod engine;
mod error;
mod fault_pager;
mod file;
mod job;
mod order;
mod pending;
mod plan;
mod pool;
mod region;
mod regions;
mod stats;
mod sys;
mod transfer;
mod workers;

pub use baseline::Baseline;
pub use baseline_region::BaselineRegion;
pub use budget::{check as check_budget, kernel_bytes};
pub use config::{BaselineConfig, IoMethod};
pub use error::BaselineError;
pub use fault_pager::{FaultModel, FaultPager};
pub use file::{BackingFile, Source};
pub use pool::TRANSFER_BYTES_MAX;
