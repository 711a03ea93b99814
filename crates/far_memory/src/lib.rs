//! Far memory: pages of 4 KiB on memory nodes that other hosts' clients load and store, after ODRP ("On-Demand Remote Paging
//! with Programmable RDMA"). The node's NIC allocates, maps, copies and frees pages by chains of work requests; the node's
//! processor takes no part.
//!
//! | module | contains |
//! |---|---|
//! | `page_store` | what users see: [`PageStore`], [`PageError`] |
//! | `client` | the client library |
//! | `node` | memory nodes: the pool, clients' tables, chains |
//! | `protocol`, `tcp` | what they exchange: requests over TCP, messages that start chains |
//! | `status` | how a node is used |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod client;
mod node;
mod page_store;
mod protocol;
mod status;
mod tcp;

pub use client::{
    Client, ClientConfig, Completion, ConnectError, NodeState, PageBuffer, Request, node_status,
};
pub use node::{MemoryNode, NodeConfig, NodeError};
pub use page_store::{PAGE_BYTES, Page, PageError, PageStore};
pub use status::{ClientPages, NodeStatus};
