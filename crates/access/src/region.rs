//! The client's view of a peer's extended region.

use std::sync::Arc;

use crate::layout::Layout;
use crate::proto::RegionDescription;
use crate::residency::ResidencyView;
use crate::signature::SignaturePage;

/// The client's state of a peer's extended region, or of a window on one. The queue pairs that use the region share it.
#[derive(Debug)]
pub struct Region {
    rkey: u32,
    description: RegionDescription,
    signature: SignaturePage,
    residency: ResidencyView,
}

impl Region {
    /// The state for a peer's description: all of it counts as present.
    pub fn new(rkey: u32, description: RegionDescription) -> Region {
        let unit_count = description.layout.unit_count();
        Region {
            rkey,
            description,
            signature: SignaturePage::derive(&description.signature_key),
            residency: ResidencyView::new(unit_count),
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
    pub fn signature_page(&self) -> &SignaturePage {
        &self.signature
    }

    /// The client's view of which units are present.
    pub fn residency(&self) -> &ResidencyView {
        &self.residency
    }
}

/// The knowledge of a peer's rkey.
#[derive(Clone, Debug, Default)]
pub enum Knowledge {
    /// The peer has not described it yet.
    #[default]
    Unknown,
    /// The region is all in memory, or the peer does not implement Terrace, which has the same effect.
    Plain,
    /// The region may be larger than memory.
    Extended(Arc<Region>),
}
