//! Where pages are: the space is spread over the nodes page by page, so that all of them share the load.

/// The nodes of a space, and copies of each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Space {
    pub page_count: u64,
    pub nodes: usize,
    /// At most as many as there are nodes, so that no two are on one.
    pub copies: usize,
}

/// A copy of a page: the node, and the index in the table there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub node: usize,
    pub index: u64,
}

impl Space {
    /// Entries of the table on each node.
    pub fn entries(self) -> u64 {
        self.page_count.div_ceil(self.nodes as u64) * self.copies as u64
    }

    /// The places of a page's copies.
    pub fn places(self, page: u64) -> impl Iterator<Item = Place> {
        let nodes = self.nodes as u64;
        (0..self.copies as u64).map(move |copy| Place {
            node: ((page + copy) % nodes) as usize,
            index: page / nodes * self.copies as u64 + copy,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn copies_are_on_different_nodes_and_no_two_pages_in_one_place() {
        for (nodes, copies) in [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)] {
            let space = Space { page_count: 100, nodes, copies };
            let mut taken = HashSet::new();
            for page in 0..space.page_count {
                let places: Vec<Place> = space.places(page).collect();
                let on: HashSet<usize> = places.iter().map(|place| place.node).collect();
                assert_eq!(on.len(), copies);
                for place in places {
                    assert!(place.index < space.entries());
                    assert!(taken.insert((place.node, place.index)), "{page}");
                }
            }
        }
    }
}
