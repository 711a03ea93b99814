//! Far memory: pages of 4 KiB on memory nodes that other hosts' clients load and store, after ODRP ("On-Demand Remote Paging
//! with Programmable RDMA"). The node's NIC allocates, maps, copies and frees pages by chains of work requests; the node's
//! processor takes no part. What ODRP is compared with is here too, behind the same client: [`Scheme`].
//!
//! | module | contains |
//! |---|---|
//! | `page_store` | what users see: [`PageStore`], [`PageError`] |
//! | `client` | the client library |
//! | `node` | memory nodes: the pool, clients' tables, chains |
//! | `scheme` | ODRP and its baselines |
//! | `protocol`, `tcp` | what they exchange: requests over TCP, messages that start chains |
//! | `messages` | what clients of baselines and their nodes exchange |
//! | `owned` | objects of the device that end with their owner |
//! | `status` | how a node is used |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod client;
mod messages;
mod node;
mod owned;
mod page_store;
mod protocol;
mod scheme;
mod status;
mod tcp;

pub use client::{
    Client, ClientConfig, Completion, ConnectError, NODES_REPORT, NodeState, PageBuffer, Request, node_status,
};
pub use node::{MemoryNode, NodeConfig, NodeError};
pub use page_store::{PAGE_BYTES, Page, PageError, PageStore};
pub use scheme::Scheme;
pub use status::{ClientPages, NodeStatus};
