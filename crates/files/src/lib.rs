//! Memory regions that are files: peers READ and WRITE a file by offset (FileMR, NSDI'20).
//!
//! The file system goes on to own the file: its name, permissions, size, blocks and page cache. A [`FileRegion`] gives
//! the NIC the bytes at an offset, and nothing is pinned. The file may grow, shrink and get holes meanwhile.
//!
//! ```text
//!   FileRegion: Pager, Translation, LocalCopies
//!     │ hit: window, fault-safe copy        miss: deferred access
//!     ▼                                       ▼
//!   OpenFile: length, windows, handle ───> pending: order ───> workers: threads that may wait for the disk
//! ```
//!
//! A *window* is a mapping of an aligned part of a file. Windows are made as offsets are accessed, and their number is
//! limited for the whole process, so registering is O(1) in the file's size, and any number of files fits into
//! `vm.max_map_count`. A copy goes through a window if its pages are in the page cache, which the kernel is asked
//! about; or by `preadv2(RWF_NOWAIT)`. Everything else is deferred to a worker, so no thread that serves packets waits
//! for a disk.
//!
//! | module | what it knows |
//! |---|---|
//! | `files`, `shared`, `config` | all files of a process; opening; what they share; limits |
//! | `open_file` | one file: length, handle, windows; accesses that need not wait |
//! | `window`, `budget` | mappings of parts of a file, which of their pages are cached, how many mappings there are |
//! | `region` | what the NIC sees |
//! | `descriptors` | which files have a descriptor; where the others are parked |
//! | `job`, `pending`, `workers` | deferred accesses, their order, the threads that make them |
//! | `append` | the end of a file, where records are added |
//! | `layout` | truncating and punching |
//! | `published` | the length as same-host peers see it, who map the file themselves |
//! | `durable` | `fdatasync`, shared by those who wait for it |
//! | `stats` | what `terrace stat` shows |
//! | `peer` | the groups of a process that has connected a socket, for a server that opens files as its user |
//! | `sys` | system calls |
//!
//! # Changes by others
//! Other programs, and the owner by other calls than [`FileRegion::truncate`] and [`FileRegion::punch_hole`], may change
//! the file at any time. The NIC then sees what a program sees that has the file mapped: bytes beyond the end are a fault,
//! which becomes an access error. The length is read again when an access goes beyond it or faults, and every few
//! milliseconds, so that accesses beyond a new end within the last page are refused soon.

#![warn(missing_docs)]

mod append;
mod budget;
mod config;
mod descriptors;
mod durable;
mod files;
mod job;
mod layout;
mod open_file;
mod peer;
mod pending;
mod published;
mod region;
mod shared;
mod stats;
mod sys;
mod window;
mod workers;

pub use config::{FilesConfig, WINDOW_BYTES};
pub use files::{Files, OpenError};
pub use layout::LayoutError;
pub use peer::peer_groups;
pub use region::{FileExtent, FileRegion};
pub use stats::FilesStats;
