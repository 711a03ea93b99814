//! Frames: 4 KiB each, in one file that outlives the process.
//!
//! ```text
//!   pool file   ┌────────┬───────────────┬───────────────────────┬───────────────────────────┐
//!               │ header │ region slots  │ directory             │ frames, from a multiple   │
//!               │        │ (identities)  │ (8 bytes per frame)   │ of 2 MiB on               │
//!               └────────┴───────────────┴───────────────────────┴───────────────────────────┘
//! ```
//! A record of the directory says which page of which region the frame holds, and whether the file lacks its bytes. It
//! is one word, so that a process that is killed leaves no half of one. The next process with the same pool finds the
//! pages where they were; `recover` writes them back without one.
//!
//! | module | content |
//! |---|---|
//! | `place` | where the file is: hugetlbfs, tmpfs, or without a name |
//! | `layout` | the offsets in the file, and the header |
//! | `region_slot` | the identities of the regions whose pages the frames hold |
//! | `record` | a record of the directory |
//! | `pool` | the pool itself |

mod layout;
mod place;
mod pool;
mod record;
mod region_slot;

pub(crate) use layout::{SLOTS, frames_within, overhead_bytes};
pub(crate) use place::{find_pools, has_path, pools_in};
pub(crate) use pool::{Opened, Pool};
pub(crate) use record::{PAGES_MAX, Record};
pub(crate) use region_slot::FileIdentity;
