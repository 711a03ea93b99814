//! Registered memory: keys, regions, memory windows, and copies that survive what the program does to its memory.
//!
//! A [`Registry`] is the translation and protection table of one device. Registering notes an address range and touches
//! nothing: no page is pinned, faulted in or accessed, so the cost does not depend on the length. An access finds its
//! key's slot, pins it with one atomic addition, checks protection domain, permission and bounds, copies, and unpins.
//! Deregistering waits until no access has the slot pinned; when it returns, no copy that passed the check is still
//! running.
//!
//! The program may unmap, protect or truncate registered memory at any time. Copies therefore run in code whose
//! faults are caught and reported ([`terrace_hostmem::fault`]); the process lives and the request gets [`AccessError::Fault`].
//!
//! | module | content |
//! |---|---|
//! | `access` | permissions, accessors, errors |
//! | `registry` | registering, and the data path: check, read, write, atomic |
//! | `window` | memory windows: bind, invalidate, free |
//! | `paging` | regions whose bytes need not be in memory: page table and pager |
//! | `paged` | the data path of such regions |
//! | `flush` | making bytes visible or durable; prefetching |
//! | `entry` | the content of a slot and the checks on it |
//! | `table` | the key table: from key to slot, and the free slots |
//! | `pin` | the lock of a slot |
//! | `shared` | direct access to regions of other processes of the host |
//! | `permutation` | a keyed permutation of numbers |
//! | `zeros` | memory whose pages are allocated as they are touched |
//! | `socket` | a socket option, here because it takes unsafe code |
//!
//! This crate knows nothing of packets, queue pairs (but their numbers) or files.

mod access;
mod entry;
mod flush;
mod paged;
mod paging;
mod permutation;
mod pin;
mod registry;
pub mod shared;
mod socket;
mod sync;
mod table;
mod window;
mod zeros;

pub use access::{Absence, Access, AccessError, AccessNeed, Accessor, RegisterError, Side};
pub use entry::FlushHook;
pub use flush::{Advice, FlushScope, make_dirty, sync_mapping};
pub use paging::{AccessCounts, Pager, Pattern, Presence, RegionPolicy, Transfer, Waker};
pub use permutation::KeyedPermutation;
pub use registry::{Limits, NewPaging, NewRange, Region, RegionChange, RegionSpec, Registry};
pub use socket::accept_without_checksum;
pub use table::KeyMemo;
pub use window::{BindError, WindowBind, WindowKind};
pub use zeros::Zeros;
