//! How a memory node is used.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::scheme::Scheme;

/// The pages of a memory node, and who has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// How it allocates pages: `odrp`, or a baseline.
    pub scheme: Scheme,
    /// Pages of the pool.
    pub page_count: u64,
    /// Pages that nobody has.
    pub free_pages: u64,
    /// Pages that a client may have.
    pub budget_pages: u64,
    /// How often the free-page queue was repaired: when a client has gone, and when the pool has been empty.
    pub repairs: u64,
    /// The clients, oldest first.
    pub clients: Vec<ClientPages>,
}

/// A client of a memory node. Operations are counted modulo 2^28. The node of a one-sided baseline does not see loads and
/// stores: it counts the slabs that it has given as unmapped stores, and those that it has taken back as invalidations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientPages {
    /// The name that it gave itself.
    pub name: String,
    /// Its address.
    pub address: IpAddr,
    /// Pages of its space.
    pub page_count: u64,
    /// Pages of the pool that it has, by the NIC's counters. Under a baseline, those that are reserved for it.
    pub pages: u64,
    /// Pages loaded.
    pub loads: u64,
    /// Stores into pages that it had.
    pub mapped_stores: u64,
    /// Stores that have taken a page.
    pub unmapped_stores: u64,
    /// Pages returned.
    pub invalidations: u64,
}
