//! The states of a unit, and how an access to it is carried out in each.

use terrace_hostmem::PAGE_BYTES;

use crate::config::IoMethod;

/// The state of a unit.
///
/// ```text
///             promote              direct writes drained,      no write under way or waiting:
///   ┌────────┐      ┌──────────┐   pages read and locked  ┌────────┐  admitted   ┌──────────┐
///   │ Absent │─────>│ Arriving │─────────────────────────>│ Locked │────────────>│ Resident │
///   └────────┘      └──────────┘                          └────────┘             └──────────┘
///     ^   ^              │ cannot be locked                                            │ demote
///     │   └──────────────┘                                                             v expelled
///     │    unlocked, written   ┌─────────┐          copies drained                ┌────────┐
///     └────────────────────────│ Leaving │<───────────────────────────────────────│ Locked │
///          back, dropped       └─────────┘                                        └────────┘
///
///   Leaving            becomes Arriving again if it cannot be written back
///   Absent             exclusive: direct; otherwise: reads direct unless cached, writes through the page cache
///   Arriving, Leaving  through the page cache, which the mapping shares
///   Locked             by copying to and from the mapping, in the order of asking
///   Resident           by copying, at once, as the NIC does by itself
/// ```
///
/// A direct write next to pages that are being populated would leave old bytes in the mapping: hence the first drain. A
/// write that was requested before one of the NIC's own copies must not take effect after it, even if the write still
/// waits for its pages: hence the second condition. It holds soon, because copies do not wait. An atomic operation on
/// memory must not interleave with a read-modify-write in the file: hence the third.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Residency {
    /// Only in the file.
    #[default]
    Absent,
    /// Being read and locked.
    Arriving,
    /// Locked into memory, but not mapped in the page table.
    Locked,
    /// Locked into memory and mapped in the page table.
    Resident,
    /// Being written back and dropped.
    Leaving,
}

/// The tier's state of a unit.
#[derive(Debug, Default)]
pub(crate) struct Unit {
    pub(crate) residency: Residency,
    /// A demotion has begun.
    pub(crate) leaving: bool,
    /// Never demoted.
    pub(crate) pinned: bool,
    /// May have pages in the page cache.
    pub(crate) cached: bool,
    /// May have got more pages since the current cleaning began.
    pub(crate) cached_again: bool,
    /// How many cleanings in a row have left pages.
    pub(crate) cleanings: u8,
    /// Cleaning was given up because its pages are in use, until the next access through the page cache.
    pub(crate) kept: bool,
    /// The mapping was accessed while the unit was absent.
    pub(crate) touched: bool,
    /// Writes and atomics under way, including those that wait for pages.
    pub(crate) writes: u16,
    /// Direct writes under way, including the read of a read-modify-write.
    pub(crate) direct_writes: u16,
    /// Copies to or from the mapping under way.
    pub(crate) copies: u16,
}

impl Unit {
    /// Whether the unit is resident, and no demotion has begun.
    pub(crate) fn stays(&self) -> bool {
        self.residency == Residency::Resident && !self.leaving
    }

    /// Whether the kernel may have read ahead into the unit unnoticed.
    pub(crate) fn may_be_read_ahead(&self) -> bool {
        self.residency == Residency::Absent && !self.cached && !self.kept
    }
}

/// What an access does with its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Reads them.
    Read,
    /// Overwrites them.
    Write {
        /// The access covers whole pages.
        whole_pages: bool,
    },
    /// Reads and modifies 8 bytes.
    Atomic,
}

/// What the region and the access allow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Means {
    /// How misses are carried out.
    pub(crate) method: IoMethod,
    /// No other writer of the file.
    pub(crate) exclusive: bool,
    /// Direct access works, sees the latest bytes, and for a write the pages lie wholly within the file.
    pub(crate) direct: bool,
}

/// How an access is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Copy to or from the mapping.
    Copy,
    /// Read from the page cache; if the bytes are not there, read directly.
    Peek,
    /// Read from the file.
    Read {
        /// Bypass the page cache.
        direct: bool,
    },
    /// Write to the file.
    Write {
        /// Bypass the page cache.
        direct: bool,
    },
    /// Read-modify-write of whole pages.
    Modify {
        /// Bypass the page cache.
        direct: bool,
    },
    /// Read the page into the page cache, then act on the mapping.
    BringAndCopy,
}

/// Chooses how to carry out an access.
pub(crate) fn plan(need: Need, unit: &Unit, means: Means) -> Plan {
    if matches!(unit.residency, Residency::Locked | Residency::Resident) || means.method == IoMethod::Mapping
    {
        return Plan::Copy;
    }
    if need == Need::Read {
        return plan_read(unit, means);
    }
    let direct = means.direct
        && means.exclusive
        && means.method != IoMethod::Buffered
        && unit.residency == Residency::Absent;
    match need {
        Need::Write { whole_pages } if direct && !whole_pages => Plan::Modify { direct },
        Need::Write { .. } => Plan::Write { direct },
        // The program's own atomic instructions must not interleave with a read-modify-write.
        _ if !means.exclusive => Plan::BringAndCopy,
        _ => Plan::Modify { direct },
    }
}

fn plan_read(unit: &Unit, means: Means) -> Plan {
    match means.method {
        IoMethod::Direct if means.direct => Plan::Read { direct: true },
        IoMethod::Tiering if means.direct => {
            if unit.cached || !means.exclusive || unit.residency != Residency::Absent {
                Plan::Peek
            } else {
                Plan::Read { direct: true }
            }
        }
        _ => Plan::Read { direct: false },
    }
}

/// The numbers of the pages that a byte range touches.
pub(crate) fn pages_of(offset: u64, len: usize) -> std::ops::Range<u64> {
    offset / PAGE_BYTES..(offset + len as u64).div_ceil(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXCLUSIVE: Means = Means { method: IoMethod::Tiering, exclusive: true, direct: true };
    const SHARED: Means = Means { exclusive: false, ..EXCLUSIVE };
    const WHOLE: Need = Need::Write { whole_pages: true };
    const PARTLY: Need = Need::Write { whole_pages: false };

    fn unit(residency: Residency) -> Unit {
        Unit { residency, ..Unit::default() }
    }

    #[test]
    fn nothing_is_written_directly_while_the_page_cache_counts() {
        for residency in [Residency::Arriving, Residency::Leaving] {
            assert_eq!(plan(WHOLE, &unit(residency), EXCLUSIVE), Plan::Write { direct: false });
            assert_eq!(plan(PARTLY, &unit(residency), EXCLUSIVE), Plan::Write { direct: false });
            assert_eq!(plan(Need::Atomic, &unit(residency), EXCLUSIVE), Plan::Modify { direct: false });
            assert_eq!(plan(Need::Read, &unit(residency), EXCLUSIVE), Plan::Peek);
        }
        let absent = unit(Residency::Absent);
        assert_eq!(plan(WHOLE, &absent, EXCLUSIVE), Plan::Write { direct: true });
        assert_eq!(plan(PARTLY, &absent, EXCLUSIVE), Plan::Modify { direct: true });
        assert_eq!(plan(Need::Read, &absent, EXCLUSIVE), Plan::Read { direct: true });
    }

    #[test]
    fn what_a_program_may_store_to_is_never_written_directly() {
        for residency in [Residency::Absent, Residency::Arriving, Residency::Leaving] {
            for method in [IoMethod::Tiering, IoMethod::Direct, IoMethod::Buffered] {
                let means = Means { method, ..SHARED };
                assert_eq!(plan(WHOLE, &unit(residency), means), Plan::Write { direct: false });
                assert_eq!(plan(PARTLY, &unit(residency), means), Plan::Write { direct: false });
                assert_eq!(plan(Need::Atomic, &unit(residency), means), Plan::BringAndCopy);
            }
        }
    }

    #[test]
    fn what_is_locked_is_copied() {
        for residency in [Residency::Locked, Residency::Resident] {
            for need in [WHOLE, PARTLY, Need::Atomic, Need::Read] {
                assert_eq!(plan(need, &unit(residency), SHARED), Plan::Copy);
                assert_eq!(plan(need, &unit(residency), EXCLUSIVE), Plan::Copy);
            }
        }
    }
}
