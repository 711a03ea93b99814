//! Processes of one host and user that reach into each other's registered memory, as their NICs would by packets, and without
//! the other's help.
//!
//! Each process shows its regions and connected queue pairs on a board: memory that others read ([`Registry::show`]). Who wants to
//! reach in looks there, with a word of its own raised that says so, and copies: through a mapping of the same file, through the page
//! cache, or by the kernel. Taking a region away means to hide its record, and to wait for raised words. Whoever carries
//! descriptors from one process to the other, and notices that one has ended, is not here.
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
