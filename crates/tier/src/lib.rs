//! The regions that `pages` is compared with: pinned ones, on-demand paging as in hardware, and accesses by RPC over each
//! kind of IO.
//!
//! A region is a shared mapping of a file. Units (1 MiB) can be locked into memory within a budget, and only those are
//! present to the NIC, which accesses them by itself. Accesses to all other units read and write the file: through the
//! page cache for bytes that it contains, else bypassing it. Threads that serve peers take no page faults for them.
//!
//! ```text
//!   TierRegion (Pager)      Tier::advance             thread "terrace-tier"
//!     read, write,            submits, reaps,           counts, cleans
//!     atomic, flush           calls wakers                  |
//!         |                       |                         |
//!         +-------> core: accesses under way, page queues, unit states
//!                         |                   |
//!                     jobs: copies        device: io_uring, threads
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `tier` | opening a tier, adding and removing regions |
//! | `tier_region` | the pager: checks, buffers, splitting at units |
//! | `region` | the constants and counters of a region |
//! | `regions` | regions by identifier |
//! | `core` | the state machine of accesses |
//! | `order` | page locks in request order |
//! | `unit` | the states of a unit, and how an access is carried out in each |
//! | `part`, `transfer`, `job` | an access: its parts, its caller's side, work that the calling thread does |
//! | `engine` | progress: between the core and the device |
//! | `workers` | threads for copies that take page faults |
//! | `residency` | promoting, demoting, cleaning a unit |
//! | `checks` | which unit is checked for readahead next |
//! | `write_back`, `losses` | failed write-backs are recorded, and the pages written again |
//! | `cleaner` | the thread that writes back what buffered access left in the page cache, and counts |
//! | `fault_pager` | a baseline: on-demand paging as in hardware |
//! | `device` | io_uring, threads, a faulty one for tests, one for fault plans |
//! | `pool` | bounce buffers |
//! | `file`, `budget`, `size` | files of regions; limits; sizes as text |
//! | `sys` | system calls on mappings |
//!
//! This crate does not know packets.

mod budget;
mod checks;
mod cleaner;
mod config;
mod core;
pub mod device;
mod engine;
mod error;
mod fault_pager;
mod file;
mod job;
mod losses;
mod order;
mod part;
mod pool;
mod region;
mod regions;
mod residency;
pub mod size;
mod stats;
mod sys;
mod tier;
mod tier_region;
mod transfer;
mod unit;
mod workers;
mod write_back;

pub use budget::{check as check_budget, kernel_bytes};
pub use config::{IoMethod, TierConfig};
pub use error::TierError;
pub use fault_pager::{FaultModel, FaultPager};
pub use file::{BackingFile, Source};
pub use pool::TRANSFER_BYTES_MAX;
pub use stats::{KindCounts, RegionStats, TierStats};
pub use tier::Tier;
pub use tier_region::TierRegion;
