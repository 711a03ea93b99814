//! The client's view of a peer's extended region.

use std::sync::Arc;

use crate::bitmap::PulledBitmap;
use crate::counts::Counts;
use crate::layout::Layout;
use crate::pattern::Pattern;
use crate::proto::RegionDescription;

/// The client's state of an extended region (or a window on one) of a peer. Shared by the queue pairs that use it.
#[derive(Debug)]
pub struct Region {
    rkey: u32,
    description: RegionDescription,
    pattern: Pattern,
    bitmap: PulledBitmap,
    counts: Counts,
}

impl Region {
    /// From the peer's description.
    pub fn new(rkey: u32, description: RegionDescription) -> Region {
        let unit_count = description.layout.unit_count();
        Region {
            rkey,
            description,
            pattern: Pattern::derive(&description.pattern_key),
            bitmap: PulledBitmap::new(unit_count),
            counts: Counts::new(unit_count),
        }
    }

    /// The region's rkey.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The peer's description.
    pub fn description(&self) -> &RegionDescription {
        &self.description
    }

    /// Its addresses and grid.
    pub fn layout(&self) -> &Layout {
        &self.description.layout
    }

    /// The signature page of its absent pages.
    pub fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    /// The client's copy of the residency bitmap.
    pub fn bitmap(&self) -> &PulledBitmap {
        &self.bitmap
    }

    /// How often each unit was accessed.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// The knowledge of a peer's rkey.
#[derive(Clone, Debug, Default)]
pub enum Knowledge {
    /// Nothing yet.
    #[default]
    Unknown,
    /// It is all in memory, or the peer does not implement Terrace, which has the same effect.
    Plain,
    /// It need not be in memory.
    Extended(Arc<Region>),
}
