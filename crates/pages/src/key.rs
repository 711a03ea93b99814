//! The identity of a page, and its shard.

/// A page of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PageKey {
    /// The region's slot in the pool.
    pub(crate) slot: u8,
    pub(crate) page: u64,
}

/// Pages of one group are in the same shard: an access to adjacent pages takes one lock.
pub(crate) const GROUP_PAGES: u64 = 16;

impl PageKey {
    /// A number that is the same in every process: the shards of frames that are taken over stay the same.
    pub(crate) fn hash(self) -> u64 {
        let mixed =
            ((self.page / GROUP_PAGES) ^ (u64::from(self.slot) << 48)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32
    }
}
