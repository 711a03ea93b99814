//! Which copies of a page there are, and where new ones can be.

use std::time::Instant;

use super::operations::Operations;
use super::space::Place;

impl Operations {
    /// Whether the node of a place is left, and has a page for it.
    pub fn has_copy(&self, place: &Place) -> bool {
        let link = &self.links[place.node];
        link.lost.is_none() && link.is_mapped(place.index)
    }

    /// Whether the page is stored and a node that has it is left.
    pub fn can_load(&self, page: u64) -> bool {
        self.is_stored(page) && self.space.places(page).any(|place| self.has_copy(&place))
    }

    /// Whether a node of the page is left, and those that are left have it or may have one page more for the client. If it is
    /// stored, one that has it is enough.
    pub fn accepts(&self, page: u64, now: Instant) -> bool {
        let left = || self.space.places(page).filter(|place| self.links[place.node].lost.is_none());
        let has_room = |place: Place| {
            let link = &self.links[place.node];
            link.is_mapped(place.index) || link.may_have_page(now)
        };
        self.can_load(page) || page < self.space.page_count && left().next().is_some() && left().all(has_room)
    }

    /// Whether a page that is not stored has a copy all the same: its first store has failed on the other node.
    pub fn has_stray_copy(&self, page: u64) -> bool {
        !self.is_stored(page) && self.space.places(page).any(|place| self.has_copy(&place))
    }
}
