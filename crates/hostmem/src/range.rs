//! Ranges of addresses, and the size that they are counted in.

/// The page of the version table and of the access protocol, in bytes; not necessarily the processor's.
pub const PAGE_BYTES: u64 = 4096;

/// A range of the program's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRange {
    /// First byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

impl HostRange {
    /// Whether another range lies within this one.
    #[inline]
    pub fn covers(self, part: HostRange) -> bool {
        part.addr >= self.addr && part.len <= self.len && part.addr - self.addr <= self.len - part.len
    }

    /// Whether both have bytes in common.
    #[inline]
    pub fn overlaps(self, other: HostRange) -> bool {
        self.addr.saturating_add(self.len) > other.addr && other.addr.saturating_add(other.len) > self.addr
    }
}

/// The pages that a range touches, as start and length; `None` when it is empty or ends beyond the address space.
pub fn pages_of(range: HostRange) -> Option<(u64, u64)> {
    // SAFETY: asks for a constant.
    let page_size = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
    let start = range.addr & !(page_size - 1);
    let end = range.addr.checked_add(range.len)?.checked_next_multiple_of(page_size)?;
    (range.len != 0).then_some((start, end - start))
}
