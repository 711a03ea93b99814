//! How an access is carried out.

use terrace_hostmem::PAGE_BYTES;

use crate::config::IoMethod;

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
    /// How accesses are carried out.
    pub(crate) method: IoMethod,
    /// Direct access works, and for a write the pages lie wholly within the file.
    pub(crate) direct: bool,
    /// The page cache has all bytes. Only with [`IoMethod::Tiering`], and for what changes them.
    pub(crate) is_cached: bool,
}

/// What an access is carried out by.
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
    /// Read-modify-write: of whole pages if it bypasses the page cache.
    Modify {
        /// Bypass the page cache.
        direct: bool,
    },
}

/// Chooses how an access is carried out. The kernel keeps direct writes and the page cache consistent.
pub(crate) fn plan(need: Need, means: Means) -> Plan {
    let direct = match means.method {
        IoMethod::Pinned | IoMethod::Mapping => return Plan::Copy,
        IoMethod::Buffered => false,
        IoMethod::Direct => means.direct,
        IoMethod::Tiering => means.direct && !means.is_cached,
    };
    match need {
        Need::Read if direct && means.method == IoMethod::Tiering => Plan::Peek,
        Need::Read => Plan::Read { direct },
        Need::Write { whole_pages } if whole_pages || !direct => Plan::Write { direct },
        Need::Write { .. } | Need::Atomic => Plan::Modify { direct },
    }
}

/// The numbers of the pages that a byte range touches.
pub(crate) fn pages_of(offset: u64, len: usize) -> std::ops::Range<u64> {
    offset / PAGE_BYTES..(offset + len as u64).div_ceil(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Need = Need::Write { whole_pages: true };
    const PARTLY: Need = Need::Write { whole_pages: false };

    fn means(method: IoMethod) -> Means {
        Means { method, direct: true, is_cached: false }
    }

    #[test]
    fn the_method_decides() {
        for need in [Need::Read, WHOLE, PARTLY, Need::Atomic] {
            assert_eq!(plan(need, means(IoMethod::Pinned)), Plan::Copy);
            assert_eq!(plan(need, means(IoMethod::Mapping)), Plan::Copy);
        }
        assert_eq!(plan(Need::Read, means(IoMethod::Direct)), Plan::Read { direct: true });
        assert_eq!(plan(Need::Read, means(IoMethod::Buffered)), Plan::Read { direct: false });
        assert_eq!(plan(Need::Read, means(IoMethod::Tiering)), Plan::Peek);
        for method in [IoMethod::Direct, IoMethod::Tiering] {
            assert_eq!(plan(WHOLE, means(method)), Plan::Write { direct: true });
            assert_eq!(plan(PARTLY, means(method)), Plan::Modify { direct: true });
            assert_eq!(plan(Need::Atomic, means(method)), Plan::Modify { direct: true });
        }
        assert_eq!(plan(PARTLY, means(IoMethod::Buffered)), Plan::Write { direct: false });
    }

    #[test]
    fn what_is_cached_or_cannot_be_accessed_directly_goes_through_the_page_cache() {
        let cached = Means { is_cached: true, ..means(IoMethod::Tiering) };
        let without = |method| Means { direct: false, ..means(method) };
        for means in [cached, without(IoMethod::Tiering), without(IoMethod::Direct)] {
            assert_eq!(plan(WHOLE, means), Plan::Write { direct: false });
            assert_eq!(plan(PARTLY, means), Plan::Write { direct: false });
            assert_eq!(plan(Need::Atomic, means), Plan::Modify { direct: false });
            assert_eq!(plan(Need::Read, means), Plan::Read { direct: false });
        }
    }
}
