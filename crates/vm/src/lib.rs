//! The process's own memory: which mappings it has, and how private memory becomes pageable.
//!
//! Memory that `malloc` or an anonymous `mmap` gave has no file, so it can leave memory only by the kernel's swap. A
//! [`SwapSpace`] moves such memory into a *swap file*: the process's addresses stay, and what is at them is a shared
//! mapping of the file from then on. Its pages are in the page cache, and leave as those of any other file
//! (`terrace_pages::cached`). [`Swapped::end`] makes it private memory again.
//!
//! ```text
//!   private memory ──back──> mapping of a swap file, not inherited by children ──end──> private memory
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`maps`] | the mappings of the process, from `/proc/self/maps` |
//! | [`smaps`] | the private memory of another process, and what of it is a thread's stack |
//! | `swap_space`, `swap_file` | the directory of swap files; a file without a name |
//! | `swapped` | a range of memory that is a mapping of a swap file, and its way back |
//! | [`discard`](discard()) | what the program gives up of it |
//! | `changes` | the program's changes of mappings, and when this crate permits none |
//! | `known_files` | the swap files, as the kernel lists their mappings |
//! | `locked` | memory that never leaves |
//! | `moving` | private memory moves into a file, while other threads of the process use it |
//! | `guard` | threads that touch a range wait: `userfaultfd` |
//! | [`userfault`] | faults become messages, and pages are put there, moved away and protected |
//! | `backing_store` | where pages are that are not in memory: [`BackingStore`] |
//! | `eviction_area` | memory that a pager shares with a thread in the process that it pages |
//! | [`pagemap`] | which pages of a range have bytes of their own |
//! | `refusal` | why memory stays where it is |
//! | `reserve` | a descriptor for the list of mappings, when there is no other |
//!
//! This crate does not know regions, pagers or packets. All system calls on mappings are made directly: the library that
//! uses this crate interposes the C library's functions, and must not take its own calls for the program's.

#![warn(missing_docs)]

mod backing_store;
mod changes;
mod discard;
mod eviction_area;
mod guard;
pub mod handshake;
mod known_files;
mod locked;
pub mod maps;
mod moving;
pub mod pagemap;
mod refusal;
mod reserve;
pub mod smaps;
mod swap_file;
mod swap_space;
mod swapped;
mod sys;
pub mod userfault;

pub use backing_store::{BackingStore, Completion, FileStore, PageBytes, Transfer, TransferError};
pub use changes::{Change, forget_changes_in_child};
pub use discard::{discard, has_swapped};
pub use eviction_area::{BATCH_PAGES, EvictionArea, Task};
pub use locked::{keep_heap, lock_memory};
pub use refusal::{Refusal, SwapError};
pub use swap_space::{BACKED_MIN_BYTES, SwapSpace};
pub use swapped::Swapped;

/// Whether the kernel lets this process have its threads wait while memory moves, in system calls, too. Without that, no
/// memory moves.
///
/// # Errors
/// `Privilege`, `System`.
pub fn check_guard() -> Result<(), Refusal> {
    guard::Guard::open().map(drop)
}
