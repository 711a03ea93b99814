//! Permissions, accessors, and the errors of accesses and registrations.

use bitflags::bitflags;
use terrace_shm::{Direction, ReaderTimeout, Rights};

bitflags! {
    /// What may be done through a key. Values are those of `enum ibv_access_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        /// The device may write on behalf of local work requests.
        const LOCAL_WRITE = 1;
        /// Peers may write.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may read.
        const REMOTE_READ = 1 << 2;
        /// Peers may perform atomic operations.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the region.
        const MW_BIND = 1 << 4;
        /// Addresses count from the start of the region or window.
        const ZERO_BASED = 1 << 5;
        /// On-demand paging: the range need not be mapped when it is registered.
        const ON_DEMAND = 1 << 6;
        /// The program promises huge pages; means nothing here.
        const HUGETLB = 1 << 7;
        /// Peers may flush to global visibility.
        const FLUSH_GLOBAL = 1 << 8;
        /// Peers may flush to persistence.
        const FLUSH_PERSISTENT = 1 << 9;
        /// Writes may become visible out of order; means nothing here.
        const RELAXED_ORDERING = 1 << 20;
    }
}

impl Access {
    /// Flags that a device may ignore when it does not know them (`IBV_ACCESS_OPTIONAL_RANGE`).
    const OPTIONAL_RANGE: u32 = 0x3ff0_0000;

    /// The flags of a verbs call.
    ///
    /// # Errors
    /// `Invalid` when a flag is unknown and not in the optional range.
    pub fn from_verbs(flags: u32) -> Result<Access, RegisterError> {
        if flags & !(Access::all().bits() | Self::OPTIONAL_RANGE) != 0 {
            return Err(RegisterError::Invalid("unknown access flag"));
        }
        Ok(Access::from_bits_truncate(flags))
    }

    /// What of this is for peers.
    pub(crate) fn rights(self) -> Rights {
        Rights::from_bits_truncate(self.bits())
    }

    /// Whether peers may change the bytes.
    pub(crate) fn writes_remotely(self) -> bool {
        self.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
    }

    /// IBTA volume 1, 10.6.3.1: a region that peers may change must be writable locally as well.
    pub(crate) fn writable_if_remotely_writable(self) -> bool {
        !self.writes_remotely() || self.contains(Access::LOCAL_WRITE)
    }
}

/// The side that an access is made for; local accesses give an lkey, remote ones an rkey.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// A work request of this process.
    Local,
    /// A request that came from a peer.
    Remote,
}

/// What a peer's READ gets where a region's memory is absent, and what its WRITEs and atomics find there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Absence {
    /// The data, once the region's pager has brought it.
    #[default]
    Wait,
    /// The region's signature page, at once: the peer knows it and requests the data in another way.
    Magic,
    /// `NotReady`, also in regions that neither wait nor refuse ([`RegionPolicy::Commodity`](crate::RegionPolicy::Commodity)):
    /// the accessor has had the memory brought, and other memory is in its place now.
    Refuse,
}

/// The origin of an access: the queue pair, its protection domain, and the side that it acts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Accessor {
    /// The queue pair's protection domain.
    pub pd: u32,
    /// The queue pair's number; type 2 windows answer only to the one that they were bound through.
    pub qpn: u32,
    /// Local or remote.
    pub side: Side,
    /// What a remote accessor finds in place of absent memory. Local accesses fault the memory in.
    pub absence: Absence,
}

impl Accessor {
    /// An access on behalf of a local work request.
    pub fn local(pd: u32, qpn: u32) -> Accessor {
        Accessor { pd, qpn, side: Side::Local, absence: Absence::Wait }
    }

    /// An access on behalf of a peer.
    pub fn remote(pd: u32, qpn: u32) -> Accessor {
        Accessor { pd, qpn, side: Side::Remote, absence: Absence::Wait }
    }

    /// The same with another choice for absent memory.
    pub fn with_absence(self, absence: Absence) -> Accessor {
        Accessor { absence, ..self }
    }
}

/// The kind of an access; together with [`Side`] it decides the permission that is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessNeed {
    /// Read. Locally always permitted.
    Read,
    /// Write, ATOMIC WRITE included.
    Write,
    /// Compare-and-swap or fetch-and-add.
    Atomic,
    /// FLUSH to global visibility.
    FlushGlobal,
    /// FLUSH to persistence.
    FlushPersistent,
}

impl AccessNeed {
    /// The access to this process's memory that a copy from or to another process's memory makes.
    #[inline]
    pub fn of_local_end(direction: Direction) -> AccessNeed {
        match direction {
            Direction::Read => AccessNeed::Write,
            Direction::Write => AccessNeed::Read,
        }
    }

    /// The permission that the key must carry.
    pub(crate) fn permission(self, side: Side) -> Access {
        match (side, self) {
            (Side::Local, AccessNeed::Read) => Access::empty(),
            (Side::Local, _) => Access::LOCAL_WRITE,
            (Side::Remote, AccessNeed::Read) => Access::REMOTE_READ,
            (Side::Remote, AccessNeed::Write) => Access::REMOTE_WRITE,
            (Side::Remote, AccessNeed::Atomic) => Access::REMOTE_ATOMIC,
            (Side::Remote, AccessNeed::FlushGlobal) => Access::FLUSH_GLOBAL,
            (Side::Remote, AccessNeed::FlushPersistent) => Access::FLUSH_PERSISTENT,
        }
    }

    /// Whether a request of no bytes needs no valid key (IBTA volume 1, 9.7.4.1.3: zero-length READ and WRITE).
    pub(crate) fn needs_no_key_for_nothing(self) -> bool {
        matches!(self, AccessNeed::Read | AccessNeed::Write)
    }
}

/// Why an access was refused or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum AccessError {
    /// No region or bound window has this key, or a window's key was used as lkey.
    #[error("the key is unknown")]
    UnknownKey,
    /// The key belongs to another protection domain than the queue pair.
    #[error("the key belongs to another protection domain")]
    WrongPd,
    /// A type 2 window that is bound through another queue pair.
    #[error("the window is bound through another queue pair")]
    WrongQp,
    /// Not wholly within the region or window, or the end overflows.
    #[error("the range is not within the region")]
    OutOfRange,
    /// The key does not permit this kind of access.
    #[error("the key does not permit the access")]
    Permission,
    /// The memory is not mapped, not accessible that way, or the file behind it ended. A write may have stored
    /// the bytes before the fault.
    #[error("the memory is not accessible")]
    Fault,
    /// The backing store failed: a disk, for example.
    #[error("the device behind the memory failed")]
    Device,
    /// The backing store has no space for a part that was never written.
    #[error("the device behind the memory is full")]
    NoSpace,
    /// An atomic's address is not a multiple of 8.
    #[error("the address of an atomic is not a multiple of 8")]
    Misaligned,
    /// The flush failed, or its placement or selectivity has no meaning.
    #[error("the flush failed")]
    Flush,
    /// The memory is absent: the region's pager can perform the access. From the pager itself: it is full.
    #[error("the memory is not there yet")]
    NotReady,
    /// The memory is absent and on its way: the peer has to retry.
    #[error("the memory is on its way")]
    Retry,
}

/// Why a registration, or a change of one, was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RegisterError {
    /// Invalid arguments (EINVAL).
    #[error("invalid: {0}")]
    Invalid(&'static str),
    /// The range is not mapped, and the region is not an on-demand one (EFAULT).
    #[error("the range is not mapped")]
    NotMapped,
    /// As many regions or windows as the device may have (ENOMEM).
    #[error("no room for another key")]
    NoRoom,
    /// Windows are bound to the region, or another thread changes it (EBUSY).
    #[error("memory windows are bound to the region, or another thread changes it")]
    Busy,
    /// Another process of the host does not end an access to it (EBUSY).
    #[error("{0}")]
    ReaderTimeout(ReaderTimeout),
    /// There is no such region or window (EINVAL).
    #[error("no such region or window")]
    UnknownKey,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_have_the_values_of_verbs() {
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        assert_eq!(Rights::all().bits(), remote.bits());
        assert_eq!(Access::REMOTE_WRITE.rights(), Rights::WRITE);
        assert_eq!(Access::REMOTE_READ.rights(), Rights::READ);
        assert_eq!((Access::REMOTE_ATOMIC | Access::LOCAL_WRITE).rights(), Rights::ATOMIC);
    }
}
