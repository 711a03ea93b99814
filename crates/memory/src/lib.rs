//! Registered memory: keys, regions, memory windows, and copies that survive what the program does to its memory.
//!
//! A [`Registry`] is the translation and protection table of one device. Registering notes an address range and touches
//! nothing: no page is pinned, faulted in or accessed, so the cost does not depend on the length. An access finds its
//! key's slot, pins it with one atomic addition, checks protection domain, permission and bounds, copies, and unpins.
//! Deregistering waits until no access has the slot pinned; when it returns, no copy that passed the check is still
//! running.
//!
//! The program may unmap, protect or truncate registered memory at any time. Copies therefore run in code whose faults
//! are caught and reported ([`terrace_hostmem::fault`]); the process lives and the request gets [`AccessError::Fault`].
//!
//! | module | content |
//! |---|---|
//! | `access` | permissions, accessors, errors |
//! | `registry` | registering, and the data path: check, read, write, atomic |
//! | `window` | memory windows: bind, invalidate, free |
//! | `paging` | regions whose bytes need not be in memory: their pagers |
//! | `translation` | where the bytes of such regions are |
//! | `whole_range` | the translation of a region that is absent or present as a whole |
//! | `paged` | the data path of such regions |
//! | `changes` | changes that pagers have not carried out yet |
//! | `append` | records at the end of regions that grow |
//! | `flush` | making bytes visible or durable; prefetching |
//! | `sync_mapping` | writing mapped pages to their files, of which a write may have failed |
//! | `entry` | the content of a slot and the checks on it |
//! | `table` | the key table: from key to slot, and the free slots |
//! | `pin` | the lock of a slot |
//! | `sync` | what is replaced in models |
//! | `publish` | what same-host peers read of the regions, and changes that wait for them |
//! | `local` | memory that work requests name, found registered and kept so during a copy |
//! | `zeros` | memory whose pages are allocated as they are touched |
//! | `socket` | a socket option, here because it takes unsafe code |
//!
//! What regions mean to other processes of the host is in `terrace-shm`: this crate publishes records there, and waits
//! for the readers of what it withdraws. It knows nothing of packets and their rings, of queue pairs except their
//! numbers and the records that are published of them, or of files, except which of them could not be written.

mod access;
mod append;
mod changes;
mod entry;
mod flush;
mod local;
mod paged;
mod paging;
mod pin;
mod publish;
mod registry;
mod socket;
mod sync;
mod sync_mapping;
mod table;
mod translation;
mod whole_range;
mod window;
mod zeros;

pub use access::{Absence, Access, AccessError, AccessNeed, Accessor, RegisterError, Side};
pub use changes::PendingChanges;
pub use entry::FlushHook;
pub use flush::{Advice, FlushScope, make_dirty};
pub use local::{Local, LocalPiece};
pub use paged::PagedKey;
pub use paging::{Pager, Pattern, RegionPolicy, Transfer, Waker};
pub use publish::RegionMemory;
pub use registry::{Limits, NewPaging, NewRange, Region, RegionChange, RegionSpec, Registry};
pub use socket::accept_without_checksum;
pub use sync_mapping::sync_mapping;
pub use translation::{LocalCopies, PeerTables, SharedFile, Translation};
pub use whole_range::WholeRange;
pub use window::{BindError, WindowBind, WindowKind};
pub use zeros::Zeros;
