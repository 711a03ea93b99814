//! What processes of one host and one user share: memory through which they exchange packets, and by which one accesses
//! the registered memory of another as its NIC would by packets, without the other process's help.
//!
//! Each process publishes its regions and connected queue pairs in a shared registry: records that other processes
//! read ([`SharedRegistry`]). A process that accesses another one's memory ([`DirectAccess`]) makes its reader epoch
//! odd, checks the records, and copies: through a mapping of the same file, through the page cache, or by the kernel. A
//! process that takes a region away withdraws its record, and waits for a grace period ([`GracePeriod`]). What goes by
//! packets goes through rings ([`TxRing`], [`RxRing`]).
//!
//! | module | content |
//! |---|---|
//! | `segment` | shared memory, mapped; addresses for mappings |
//! | `handshake` | the orders of stores and loads by which processes synchronize |
//! | `sync` | what is replaced in models |
//! | `ring` | packets from one process to another: `tx` the producer's side, `rx` the consumer's, `record` what is between them |
//! | `record` | seqlock records |
//! | `rights` | what peers may do |
//! | `permutation` | a keyed permutation of numbers |
//! | `keys` | from a key to the number of its slot and record |
//! | `shared_registry` | the records of regions and queue pairs, and how peers read them |
//! | `page_entry`, `page_table` | the tables of regions that are paged by 4 KiB pages |
//! | `peer_hits` | hits that peers count themselves |
//! | `reader_slots` | reader epochs, and the wait for them |
//! | `reader_line` | the words of a reader slot, and the orders of loads and stores |
//! | `reader_list` | the readers that grace periods wait for |
//! | `cached` | a region whose pages are in the page cache, as a peer accesses it |
//! | `framed` | a region whose pages are in frames, as a peer accesses it |
//! | `mapped_file` | a region that is a file, as a peer accesses it; the published lengths of files |
//! | `source` | how the bytes of another process's region are copied |
//! | `process` | copies by the kernel |
//! | `direct_access` | access to another process's memory: the checks and the copy; `list` several copies by one system call |
//! | `prefetch_hint` | where an access is likely to go |
//!
//! The two ends of an access are separate: the other process's memory is known from its records, this process's memory
//! by the implementation of [`LocalMemory`]. So this crate knows neither this process's regions and their pagers, which
//! are those of `terrace-memory`, nor queue pairs except their numbers and records, nor what is in a packet. Sending
//! descriptors from one process to another, and detecting that a process has ended, are not done here.
//!
//! Copies recover from faults once `terrace_hostmem::fault::install` has run, as `terrace_memory::Registry::new` has
//! it.

#![warn(missing_docs)]

mod cached;
mod direct_access;
mod framed;
mod handshake;
mod keys;
mod mapped_file;
mod page_entry;
mod page_table;
mod peer_hits;
mod permutation;
mod prefetch_hint;
mod process;
mod reader_line;
mod reader_list;
mod reader_slots;
mod record;
mod rights;
mod ring;
mod segment;
mod shared_registry;
mod source;
mod sync;

pub use cached::Cached;
pub use direct_access::{DirectAccess, LocalMemory, PeerMemory, Refusal};
pub use framed::{FrameTables, Framed, Frames};
pub use keys::{KEY_INDEX_BITS, KeyMemo, KeyOrder};
pub use mapped_file::{FileLength, FileLengths, MappedFile};
pub use page_entry::{PageEntry, PageState};
pub use page_table::{AccessCounters, PageEntries};
pub use peer_hits::PeerHits;
pub use permutation::KeyedPermutation;
pub use prefetch_hint::PrefetchHint;
pub use reader_line::EpochGuard;
pub use reader_slots::{
    GracePeriod, PeerReaders, ReaderSlot, ReaderSlots, ReaderTimeout, forget_readers, wait_for_own_readers,
};
pub use record::Version;
pub use rights::Rights;
pub use ring::{Origin, RUN_BYTES_MAX, RingFile, RxPacket, RxRing, TxRing, Writer};
pub use segment::{FileSystem, file_system};
pub use shared_registry::{PublishedQueuePair, PublishedRegion, SharedRegistry};
pub use source::{BackedBy, Direction, Mapped, Source, is_scarcity};
pub use sync::PACKET_BYTES_MAX;
