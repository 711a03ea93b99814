//! Memory regions larger than memory, extended with an SSD.
//!
//! A region is a shared mapping of a file. Its hot units (1 MiB) are locked into memory within a budget, and only those
//! are present to the NIC, which copies to and from them by itself. Everything else is reached by reading and writing
//! the file: from the page cache what is there, past it what is not, never by a page fault of whoever serves peers.
//!
//! ```text
//!   TierRegion (Pager)      Tier::advance             thread "terrace-tier"
//!     read, write,            submits, reaps,           counts, promotes,
//!     atomic, flush           calls wakers              demotes, cleans
//!         |                       |                         |
//!         +-------> core: accesses under way, page queues, unit states
//!                         |                   |
//!                     jobs: copies        device: io_uring, threads
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `tier` | opening, regions coming and going |
//! | `tier_region` | the pager: checks, buffers, cutting at units |
//! | `region` | what is known of a region beside its units |
//! | `regions` | which region a name means |
//! | `core` | what each access waits for and does next |
//! | `order` | who may touch a page |
//! | `unit` | the states of a unit, and how an access reaches it |
//! | `part`, `transfer`, `job` | an access: a part of it, as its caller sees it, what is done at once |
//! | `engine` | progress: from the core to the device and back |
//! | `workers` | threads for copies that take page faults |
//! | `residency` | promoting, demoting, cleaning a unit |
//! | `checks` | which unit is checked for readahead next |
//! | `write_back`, `losses` | what cannot be written back is remembered, and written again |
//! | `promoter`, `heat` | the thread; which units are hot |
//! | `fault_pager` | a baseline: on-demand paging as hardware does it |
//! | `device` | io_uring, threads, one that fails on purpose, one that a fault plan troubles |
//! | `pool` | bounce buffers |
//! | `file`, `budget`, `size` | files of regions; limits; sizes as people write them |
//! | `sys` | system calls on mappings |
//!
//! This crate knows nothing of packets.

mod budget;
mod checks;
mod config;
mod core;
pub mod device;
mod engine;
mod error;
mod fault_pager;
mod file;
mod heat;
mod job;
mod losses;
mod order;
mod part;
mod pool;
mod promoter;
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
pub use stats::{Histogram, KindCounts, LatencyStats, RegionStats, TierStats};
pub use tier::Tier;
pub use tier_region::TierRegion;
