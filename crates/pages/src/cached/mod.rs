//! Regions over shared mappings of files that the program and other processes use, too: their pages are in the kernel's
//! page cache, the only place where loads, stores, reads and writes of all processes see the same bytes.
//!
//! A page is *present* from the end of a read that brought it into the page cache until it leaves. The NIC copies from
//! and to the program's mapping, and only where pages are present: a copy takes a minor page fault at most. Everything
//! else is as with frames: a miss reads the page by io_uring and then serves the next hits, S3-FIFO chooses the page
//! that leaves, hits only count. In place of a frame a page has a *slot* of the budget.
//!
//! ```text
//!   CachedRegion: read, write, atomic     CachedFiles::advance     thread "terrace-pages"          thread "terrace-flush"
//!     hits: page table and mapping          submits, reaps,          evicts ahead, writes back,      msync
//!     misses: shard of the page             calls wakers             drops, scans, repairs
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `cached_files`, `config` | the budget; adding and removing regions |
//! | `cached_region` | the accesses of the NIC |
//! | `region` | a mapping, its file and its table |
//! | `shard` | some of the slots and their pages |
//! | `engine`, `reading`, `sink` | parts of accesses find or bring their pages; reads are submitted and end |
//! | `reclaim`, `reclaim_signal` | pages leave: written back, unmapped, dropped from the page cache |
//! | `scan` | pages that came or left without us |
//! | `losses`, `repair` | failed write-backs are recorded, and the pages written again |
//! | `flush`, `flush_queue` | FLUSH |
//! | `kernel` | system calls |
//!
//! # What wrong presence costs
//! Time, never bytes. If a page leaves while somebody copies (because the kernel needs memory, or in the instant after
//! the page table was read), the copy takes a page fault that reads the page again. So nobody waits for readers: a
//! stopped peer delays no eviction. The scan finds pages that are present and not cached, and forgets them; it finds
//! pages that are cached and not present, because the program or another process has touched them, and gives them a
//! slot: from then on they leave as all others do. A page that another process has mapped does not leave memory. It gives
//! its slot back all the same, and the scan tries again.
//!
//! Decision 51 has the measurements behind the order of system calls in `kernel`.

mod cached_files;
mod cached_region;
mod config;
mod engine;
mod flush;
mod flush_queue;
mod kernel;
mod losses;
mod reading;
mod reclaim;
mod reclaim_signal;
mod region;
mod repair;
mod scan;
mod shard;
mod sink;

pub use cached_files::CachedFiles;
pub use cached_region::CachedRegion;
pub use config::CachedConfig;
pub use region::CachedSource;
