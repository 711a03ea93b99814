//! Memory regions that are not all in memory, by pages of 4 KiB.
//!
//! A region is a file. Its pages are in frames of a pool, which all regions share, or only in the file. The pool is a
//! file in memory that outlives the process. A miss reads the file straight into the frame that serves the next hits; a
//! page that is written whole is not read. An acknowledged write is in a frame, so it survives the process; a flush
//! writes the dirty pages of its range to the file.
//!
//! ```text
//!   PagedRegion (Translation): read, write, atomic     hits: page table and frame, without a lock
//!   PagedRegion (Pager): read, write, atomic, flush    Pages::advance        threads "terrace-pages"
//!         |                                               submits, reaps,       write dirty pages,
//!         v                                               calls wakers          carry flushes out
//!   shard of the page: states, queues, fills under way       |                     |
//!         |                                                  v                     v
//!         +--> frames <----------------------------- store: io_uring reads   store: blocking writes
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `pages`, `config`, `budget` | opening a pool, adding and removing regions; the limits of memory |
//! | `paged_region` | the accesses of the NIC: hits, and the pager |
//! | `access`, `ended`, `quota` | an access that waits: its parts, its caller's side; the memory that accesses take |
//! | `engine`, `reading`, `read_queue` | parts find or bring their pages; reads are submitted and end |
//! | `shard`, `starved` | some of the frames and their pages: which page gets which frame, and which one leaves; parts that wait for a frame |
//! | `region`, `key` | a region: its table, files and counters; the identity of a page |
//! | `file_syncs` | syncs of a region's file, and what a failed one means |
//! | `table`, `mapping` | the states of a page, and copies beside changes of state |
//! | [`replacement`] | which page leaves: S3-FIFO |
//! | `frames` | the pool: its file, the directory of frames, identities of regions |
//! | [`store`] | files, reads and writes; a store that injects faults |
//! | `write_back`, `write_queue` | dirty pages are written before their frames are needed, and for FLUSH |
//! | `adopt`, `recover` | pages that an earlier process has left: taken over, or written back without a server |
//! | `lock_file` | the note beside a file that its newest bytes are in a pool |
//! | `program_pages` | pages that the program itself swaps, and tells of |
//! | `stats`, `histogram`, `error` | statistics; the errors that users see |
//! | `sys`, `sync` | mappings and copies; atomics, which a model replaces |
//!
//! # Locks
//! A page belongs to a shard by its region and number; 16 adjacent pages are in one shard, and the next 16 in another. A shard has a fixed
//! part of the frames, its own queues and its own lock, so misses of different pages do not wait for each other. The
//! lock is held for lookups and copies of at most a page, never for the device or for a peer. The device is locked after
//! no shard and before each. Hits take no lock; the first write to a clean page takes its shard's lock once.
//!
//! # Other processes
//! The page table is a segment that same-host peers map for reading, and the counters of accesses one that they map for
//! writing. A peer copies within a reader epoch whose hazard pointer names the page by its address in
//! [`PagedRegion`]'s range. A page leaves in this order: version even, then a grace period, then the frame is reused. A
//! page whose reader does not end its access is set aside, with its frame; all others come and go. A peer cannot make a
//! page dirty, because the table is not writable for it: its first write to a clean page goes by packets.
//!
//! # What survives what
//! The directory's record of a frame is one word, set after the bytes and before the acknowledgement. After a kill, the
//! next process of the same pool finds each acknowledged write in its frame, or in the file: a record is cleared only
//! when the file has the bytes. The pool's lock lasts until the last read of the killed process has ended, so no read
//! arrives in a frame that the next process uses. Clean pages are taken over unless the file, its name or its permissions
//! have changed since our own last write to it. Writes of others to a block device are not noticed.
//!
//! # Memory
//! 8 bytes and a bit per page of the region, allocated by 512 pages as they are used, and 15 bytes per frame: with half of
//! a region in memory, 0.38 % of the region. The budget is for the frames alone.
//!
//! This crate does not know packets.

#![warn(missing_docs)]

mod access;
mod adopt;
mod budget;
pub mod cached;
mod config;
mod ended;
mod engine;
mod error;
mod file_syncs;
mod frames;
mod histogram;
mod key;
mod lock_file;
mod mapping;
mod paged_region;
mod pages;
mod program_pages;
mod quota;
mod read_queue;
mod reading;
mod recover;
mod region;
pub mod replacement;
mod shard;
pub mod size;
mod starved;
mod stats;
pub mod store;
mod sync;
mod sys;
mod table;
mod write_back;
mod write_queue;

pub use budget::{check_memory, field_bytes, memory_limit};
pub use config::PagesConfig;
pub use error::{LockHolder, PagesError};
pub use histogram::{Histogram, LatencyStats};
pub use paged_region::{PagedRegion, TRANSFER_BYTES_MAX};
pub use pages::Pages;
pub use program_pages::{BringPages, ProgramPages};
pub use recover::{RecoverProgress, Recovered, is_pool, recover, recover_pool};
pub use stats::{MemoryStats, RegionStats};
pub use store::{BackingFile, remove_unwritten};
