//! An extended region of a peer, as its client knows it.

use std::sync::Arc;

use crate::bitmap::PulledBitmap;
use crate::counts::Counts;
use crate::layout::Layout;
use crate::pattern::Pattern;
use crate::proto::RegionDescription;

/// What the client keeps about an extended region (or a window on one) of a peer. Shared by the queue pairs that use it.
#[derive(Debug)]
pub struct Region {
    rkey: u32,
    description: RegionDescription,
    pattern: Pattern,
    bitmap: PulledBitmap,
    counts: Counts,
}

impl Region {
    /// From what the peer has told.
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

    /// The key that the peer gave.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// What the peer has told.
    pub fn description(&self) -> &RegionDescription {
        &self.description
    }

    /// Where it lies.
    pub fn layout(&self) -> &Layout {
        &self.description.layout
    }

    /// What stands for its absent pages.
    pub fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    /// What is believed to be resident.
    pub fn bitmap(&self) -> &PulledBitmap {
        &self.bitmap
    }

    /// How often each unit was accessed.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// What is known about an rkey of a peer.
#[derive(Clone, Debug, Default)]
pub enum Knowledge {
    /// Nothing yet.
    #[default]
    Unknown,
    /// It is all in memory, or the peer does not know about Terrace, which comes to the same.
    Plain,
    /// It need not be in memory.
    Extended(Arc<Region>),
}
