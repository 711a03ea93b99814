//! Direct access to the registered memory of other processes of the same host and user, as their NICs would make by
//! packets, and without the other process's help.
//!
//! Each process publishes its regions and connected queue pairs in a shared registry: memory that other processes read
//! ([`Registry::show`]). A process that accesses another one's memory makes its own reader epoch odd, checks the
//! records, and copies: through a mapping of the same file, through the page cache, or by the kernel. A process that
//! takes a region away withdraws its record, and waits for a grace period. Sending descriptors from one process to
//! another, and detecting that a process has ended, are not done here.
//!
//! [`Registry::show`]: crate::Registry::show

mod handshake;
mod prefetch_hint;
mod reach;
mod reader_slots;
mod record;
mod ring;
pub(crate) mod segment;
mod shared_registry;
mod show;
mod source;

pub use prefetch_hint::PrefetchHint;
pub use reach::{Lead, Local, Reach, Refusal};
pub use reader_slots::{GracePeriod, PeerReaders, ReaderSlot, ReaderSlots, StillReached};
pub(crate) use reader_slots::{Reaching, forget_readers, wait_for_own_readers};
pub use record::Version;
pub use ring::{Origin, RingFile, RxRing, TxRing, Writer};
pub use segment::{FileSystem, file_system};
pub use shared_registry::ShownQueuePair;
pub(crate) use shared_registry::{SharedRegistry, ShownRegion};
pub use show::{LocalPiece, RegionMemory};
pub use source::{BackedBy, Direction, Mapped, Paged, Source};
