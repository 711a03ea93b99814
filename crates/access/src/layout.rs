//! The addresses of a region in its peer's address space, and their pages and units.

use std::ops::Range;

use crate::signature::PAGE_BYTES;

/// The most units of a region: 16 TiB by pages. A unit count that a peer states is compared with this limit before the
/// client allocates 24 bytes for each 32768 units ([`ResidencyView`](crate::residency::ResidencyView)).
pub const UNITS_MAX: u64 = 1 << 32;
/// The largest unit, in bytes.
const UNIT_BYTES_MAX: u32 = 1 << 30;

/// The addresses and the grid of an extended region. A value is always valid.
///
/// Pages and units are counted on a grid that need not begin where the region does: a program may register a part of a
/// mapping, and under any virtual address. The region's first byte is `lead_bytes` behind the beginning of unit 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    base_va: u64,
    length: u64,
    lead_bytes: u64,
    unit_bytes: u32,
}

impl Layout {
    /// `length` bytes at `base_va`, whose first byte is `lead_bytes` into the grid. `None` unless the range is neither
    /// empty nor beyond the address space, the unit is a power of two and at least a page, and there are at most
    /// [`UNITS_MAX`] units.
    pub fn new(base_va: u64, length: u64, lead_bytes: u64, unit_bytes: u32) -> Option<Layout> {
        let last = length.checked_sub(1)?;
        base_va.checked_add(last)?;
        let units = lead_bytes.checked_add(last)? / u64::from(unit_bytes.max(1)) + 1;
        let unit_fits =
            unit_bytes.is_power_of_two() && (PAGE_BYTES as u32..=UNIT_BYTES_MAX).contains(&unit_bytes);
        (unit_fits && units <= UNITS_MAX).then_some(Layout { base_va, length, lead_bytes, unit_bytes })
    }

    /// The region's first address.
    pub fn base_va(&self) -> u64 {
        self.base_va
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Bytes of the grid before the region's first byte.
    pub fn lead_bytes(&self) -> u64 {
        self.lead_bytes
    }

    /// Bytes of a unit of residency.
    pub fn unit_bytes(&self) -> u32 {
        self.unit_bytes
    }

    /// Units of the grid, up to the one that holds the region's last byte.
    pub fn unit_count(&self) -> usize {
        ((self.lead_bytes + self.length - 1) / u64::from(self.unit_bytes) + 1) as usize
    }

    /// Whether a range lies within the region. An empty range does if it begins within the region, or at its end.
    pub fn covers(&self, va: u64, len: u64) -> bool {
        va >= self.base_va && len <= self.length && va - self.base_va <= self.length - len
    }

    /// The offset of an address of the region in the grid.
    pub fn grid(&self, va: u64) -> u64 {
        va - self.base_va + self.lead_bytes
    }

    /// The offset of an address of the region in its page.
    pub fn page_offset(&self, va: u64) -> usize {
        (self.grid(va) % PAGE_BYTES as u64) as usize
    }

    /// The number of pages of a range of the region.
    pub fn page_count(&self, va: u64, len: u64) -> usize {
        if len == 0 { 0 } else { (self.page_offset(va) as u64 + len).div_ceil(PAGE_BYTES as u64) as usize }
    }

    /// The units of a range of the region.
    pub fn units(&self, va: u64, len: u64) -> Range<usize> {
        if len == 0 {
            return 0..0;
        }
        let first = self.grid(va);
        let unit_bytes = u64::from(self.unit_bytes);
        (first / unit_bytes) as usize..((first + len - 1) / unit_bytes) as usize + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_layouts_are_refused() {
        let unit = 1 << 20;
        assert!(Layout::new(0, 1, 0, unit).is_some());
        assert!(Layout::new(u64::MAX, 1, 0, unit).is_some());
        assert!(Layout::new(u64::MAX, 2, 0, unit).is_none());
        assert!(Layout::new(0, 0, 0, unit).is_none());
        assert!(Layout::new(0, 1, 0, 0).is_none());
        assert!(Layout::new(0, 1, 0, unit + 1).is_none());
        assert!(Layout::new(0, 1, 0, 2048).is_none());
        assert!(Layout::new(0, 1, 0, 4096).is_some());
        assert!(Layout::new(0, 2, u64::MAX, unit).is_none());
        assert!(Layout::new(0, UNITS_MAX << 20, 0, unit).is_some());
        assert!(Layout::new(0, (UNITS_MAX << 20) + 1, 0, unit).is_none());
        assert!(Layout::new(0, UNITS_MAX << 20, 1, unit).is_none());
        assert!(Layout::new(0, 256 << 30, 0, 4096).is_some());
    }

    #[test]
    fn addresses_fall_on_the_grid_of_the_mapping() {
        let layout = Layout::new(0x7000_0123, 3 << 20, (1 << 20) + 0x1123, 1 << 20).expect("a valid layout");
        assert_eq!(layout.unit_count(), 5);
        assert_eq!(layout.page_offset(0x7000_0123), 0x123);
        assert_eq!(layout.units(0x7000_0123, 1), 1..2);
        assert_eq!(layout.units(0x7000_0123, 3 << 20), 1..5);
        assert_eq!(layout.units(0x7000_0123, 0), 0..0);
        assert_eq!(layout.page_count(0x7000_0123, 0x1000 - 0x123), 1);
        assert_eq!(layout.page_count(0x7000_0123, 0x1000 - 0x122), 2);
        assert!(layout.covers(0x7000_0123, 3 << 20) && !layout.covers(0x7000_0123, (3 << 20) + 1));
        assert!(!layout.covers(0x7000_0122, 1) && !layout.covers(u64::MAX, u64::MAX));
        assert!(layout.covers(0x7030_0123, 0) && !layout.covers(0x7030_0123, 1));
    }
}
