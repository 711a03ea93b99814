//! Processes of one host and user that reach into each other's registered memory, as their NICs would by packets, and without
//! the other's help.
//!
//! Each process shows its regions and connected queue pairs on a board: memory that others read ([`Registry::show`]). Who wants to
//! reach in looks there, with a word of its own raised that says so, and copies: through a mapping of the same file, through the page
//! cache, or by the kernel. Taking a region away means to hide its record, and to wait for raised words. Whoever carries
//! descriptors from one process to the other, and notices that one has ended, is not here.
//!
//! [`Registry::show`]: crate::Registry::show

mod board;
mod hands;
mod handshake;
mod outlook;
mod reach;
mod record;
mod ring;
pub(crate) mod segment;
mod show;
mod source;

pub use board::ShownQueuePair;
pub(crate) use board::{Board, ShownRegion};
pub use hands::{GracePeriod, Hand, Hands, StillReached, Visitor};
pub(crate) use hands::{Reaching, forget_hands, wait_for_own_hands};
pub use outlook::Outlook;
pub use reach::{Lead, Local, Reach, Refusal};
pub use record::Version;
pub use ring::{Inbox, Origin, Outbox, RingFile, Writer};
pub use show::{LocalPiece, RegionMemory};
pub use source::{BackedBy, Direction, FileSystem, Mapped, Paged, Source, file_system};
