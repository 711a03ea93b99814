//! Why a client cannot connect.

use std::io;
use std::net::SocketAddr;

use terrace_nic::{Error, OpenError};

/// Why a client cannot connect.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No port could be opened.
    #[error(transparent)]
    Port(OpenError),
    /// The NIC refuses.
    #[error("the NIC refuses: {0}")]
    Nic(#[from] Error),
    /// No nodes, no pages, or more copies than nodes.
    #[error("a space has at least one node and one page, and at most as many copies as nodes: 1 or 2")]
    Config,
    /// A node is named twice, and would have both copies of a page.
    #[error("the memory node {0} is named twice: name each node once")]
    SameNode(SocketAddr),
    /// The system refuses a thread.
    #[error("no thread for lost memory nodes: {0}")]
    Thread(#[source] io::Error),
    /// The client has no address of the node's family.
    #[error("no local address of the same family as {0}: choose another local address")]
    Family(SocketAddr),
    /// The node does not answer.
    #[error("no memory node answers at {0} ({1}): is `terrace memory-node` running there?")]
    Unreachable(SocketAddr, #[source] io::Error),
    /// The node refuses the client.
    #[error("the memory node at {0} refuses: {1}")]
    Refused(SocketAddr, String),
    /// The node's answer is none of the protocol.
    #[error("the answer of {0} is none of a memory node: is it of another version?")]
    Protocol(SocketAddr),
}
