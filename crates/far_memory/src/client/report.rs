//! A client's nodes, for its owner and for `terrace stat`.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use serde::{Deserialize, Serialize};
use terrace_nic::ProgressCallback;
use terrace_sync::Mutex;

use super::operations::Operations;

/// The name of the report in a device's statistics.
pub const NODES_REPORT: &str = "memory_nodes";

/// A node of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// Where it listens.
    pub address: SocketAddr,
    /// Pages that the client has there.
    pub pages: u64,
    /// Pages that are stored and should have a copy there, and have none.
    pub missing_pages: u64,
    /// Why it was given up, if so, and why it cannot be used again although it answers.
    pub lost: Option<String>,
    /// How often it was lost.
    pub losses: u64,
    /// How often it has joined again.
    pub rejoins: u64,
    /// Pages that were copied to it after it has joined again.
    pub copied_pages: u64,
}

/// The nodes, in the order of the configuration.
pub(super) fn states(operations: &Operations) -> Vec<NodeState> {
    let links = operations.links.iter().zip(&operations.wanted_pages);
    let state = |(link, wanted_pages): (&super::link::Link, &u64)| NodeState {
        address: link.address,
        pages: link.mapped_pages,
        missing_pages: wanted_pages.saturating_sub(link.mapped_pages),
        lost: link.loss(),
        losses: link.counts.losses,
        rejoins: link.counts.rejoins,
        copied_pages: link.counts.copied_pages,
    };
    links.map(state).collect()
}

/// The device shows the nodes.
pub(super) struct Report(Weak<Mutex<Operations>>);

impl Report {
    pub fn new(operations: &Arc<Mutex<Operations>>) -> Report {
        Report(Arc::downgrade(operations))
    }
}

impl ProgressCallback for Report {
    fn advance(&self) -> bool {
        false
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        let operations = self.0.upgrade()?;
        let states = states(&operations.lock());
        Some((NODES_REPORT.into(), serde_json::to_value(states).ok()?))
    }
}
