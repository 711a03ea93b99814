//! Remote paging of unmodified processes (`terrace run --remote-memory`): anonymous memory beyond a local budget is in a
//! backing store, on memory nodes.
//!
//! The pager is a process of its own. A library that is preloaded into the program (`terrace_pager_preload`) registers
//! memory with `userfaultfd(2)` and sends the descriptor here. A thread of that library moves pages away, which only the
//! process itself can do, by `UFFDIO_MOVE`; it touches no memory that is paged. So the pager's own memory and locks are
//! never the program's, and forks are events like any other.
//!
//! ```text
//!   program ──touches an absent page──> kernel ──message──> pager ──load──> backing store
//!      ^                                                      │
//!      └────────────── UFFDIO_COPY ───────────────────────────┤
//!   thread in the program <──request: pages that leave────────┘──store──> backing store
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `pager` | the loop: messages of the kernel, transfers of the store, requests to processes |
//! | `process` | a process: its page table, queue, and what waits |
//! | `faults` | absent pages: zeros, or loads; stores to pages that the store has |
//! | `eviction` | pages leave: which ones, and what becomes of their bytes |
//! | `prefetch`, `trend` | pages come before they are touched; which ones |
//! | `changes` | unmapped, moved and forked memory |
//! | `memory` | frames, buffers and transfers, which all processes share |
//! | `scan` | memory that came without a message |
//! | `status` | what `terrace stat` shows |
//! | `far_store` | memory nodes as a backing store |
//! | `page_table`, `slots` | the state of a page; pages of the store and their users |
//!
//! # Why no store is lost
//!
//! `UFFDIO_MOVE` takes a page away at once: who touches it then waits for a message to be answered. While a request to move
//! pages is under way, no messages of that process are read. A thread that has unmapped registered memory waits until its
//! message has been read, and until then the kernel moves no page. So a page that is moved is the page that the table
//! describes, never one of a mapping that has come in its place. A process may be stopped for long: a request that it has not begun
//! after 100 ms is taken back, and its messages are read.
//!
//! `MADV_DONTNEED` is different: its message is read before the kernel takes the pages. The pager forgets them at once, and the
//! search for memory that came without a message leaves what it finds there alone for a second. If it entered those pages, they
//! could move before the kernel takes them, and come back with their old bytes.
//!
//! A loaded page keeps its slot when nothing is mapped at its address: the memory may have moved, and the message of that
//! follows.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod changes;
mod eviction;
mod far_store;
mod faults;
mod memory;
mod page_table;
mod pager;
mod prefetch;
mod process;
mod scan;
mod slots;
mod status;
mod trend;

pub use far_store::FarStore;
pub use memory::Statistics;
pub use pager::{Pager, Settings};
pub use status::{PagerStatus, ProcessPages, REPORT, SharedStatus};
