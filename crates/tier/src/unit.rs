//! Where the truth about a unit is, and how an access reaches it.

use terrace_memory::PAGE_BYTES;

use crate::config::IoMethod;

/// What a unit is doing.
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
/// A direct write beside pages that are being populated would leave the old bytes in the mapping: hence the first
/// drain. A write that was asked for before the NIC makes a copy by itself must not take effect after it, even if it
/// still waits for its turn: hence the second condition. It holds soon, because copies do not wait for anything. An atomic
/// operation on memory must not fall between reading and writing one in the file: hence the third.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Residency {
    /// In the file.
    #[default]
    Absent,
    /// Being read and locked.
    Arriving,
    /// Locked into memory, but not known to the presence.
    Locked,
    /// Locked into memory and known to the presence.
    Resident,
    /// Being written back and forgotten.
    Leaving,
}

/// What the tier knows of a unit.
#[derive(Debug, Default)]
pub(crate) struct Unit {
    /// What it is doing.
    pub(crate) residency: Residency,
    /// Somebody is about to take it out.
    pub(crate) leaving: bool,
    /// Never demoted.
    pub(crate) pinned: bool,
    /// Buffered access may have left pages in the page cache.
    pub(crate) cached: bool,
    /// It may have left more since those began to be dropped.
    pub(crate) cached_again: bool,
    /// How often in a row it was tried in vain to drop its pages.
    pub(crate) cleanings: u8,
    /// The mapping was touched while the unit was absent.
    pub(crate) touched: bool,
    /// Writes and atomics under way, those that wait for their turn included.
    pub(crate) writes: u16,
    /// Direct writes that have begun, their reading before writing included.
    pub(crate) direct_writes: u16,
    /// Copies to or from the mapping that have begun.
    pub(crate) copies: u16,
}

impl Unit {
    /// Whether it is resident, and not about to leave.
    pub(crate) fn stays(&self) -> bool {
        self.residency == Residency::Resident && !self.leaving
    }

    /// Whether nobody would notice that the kernel has read ahead into it.
    pub(crate) fn may_be_read_ahead(&self) -> bool {
        self.residency == Residency::Absent && !self.cached
    }
}

/// What an access wants of the bytes that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Read them.
    Read,
    /// Overwrite them; whole pages or not.
    Write {
        /// They are whole pages.
        whole_pages: bool,
    },
    /// Change 8 of them depending on what they are.
    Atomic,
}

/// What a region allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Means {
    /// How misses are to be carried out.
    pub(crate) method: IoMethod,
    /// Nobody else writes the file.
    pub(crate) exclusive: bool,
    /// Direct access is to be had and reaches the same bytes, and the pages concerned lie wholly within the file.
    pub(crate) direct: bool,
}

/// How an access is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Copy to or from the mapping.
    Copy,
    /// Read what is in the page cache; if it is not, read directly.
    Peek,
    /// Read from the file.
    Read {
        /// Past the page cache.
        direct: bool,
    },
    /// Write to the file.
    Write {
        /// Past the page cache.
        direct: bool,
    },
    /// Read whole pages, change the bytes concerned, write.
    Modify {
        /// Past the page cache.
        direct: bool,
    },
    /// Have the page in the page cache, then act on the mapping.
    BringAndCopy,
}

/// Decides.
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
        // The program's own atomic instructions must not fall between reading and writing.
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

/// The pages that bytes touch, by number.
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
