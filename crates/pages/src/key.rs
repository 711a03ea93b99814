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
    /// Which of `shard_count` shards the page belongs to. It is the same in every process: the shards of frames that are
    /// taken over stay the same.
    ///
    /// Of `shard_count` successive groups one is in each shard, so that a region that fits into the budget fits into the
    /// shards. Their order is another one in each such block: accesses at regular intervals do not meet in one shard.
    pub(crate) fn shard(self, shard_count: usize) -> usize {
        let count = shard_count as u64;
        let group = self.page / GROUP_PAGES;
        let block = (group / count) ^ (u64::from(self.slot) << 48);
        let mixed = block.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let turn = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
        ((group + turn) % count) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages_by_shard(pages: impl Iterator<Item = u64>) -> Vec<u64> {
        let mut counts = vec![0; 16];
        pages.for_each(|page| counts[PageKey { slot: 1, page }.shard(16)] += 1);
        counts
    }

    #[test]
    fn a_range_of_pages_is_spread_evenly() {
        let counts = pages_by_shard(0..65_536);
        assert!(counts.iter().all(|count| *count == 4096), "{counts:?}");
    }

    #[test]
    fn pages_at_regular_intervals_are_spread() {
        for interval in [16, 256, 512, 4096, 65_536] {
            let counts = pages_by_shard((0..16_000).map(|index| index * interval));
            assert!(counts.iter().all(|count| (500..1500).contains(count)), "{interval}: {counts:?}");
        }
    }
}
