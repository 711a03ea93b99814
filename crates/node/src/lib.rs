//! Memory nodes: servers of regions larger than memory, and their clients.
//!
//! | module | contains |
//! |---|---|
//! | `agent` | the agent of a device: answers peers' requests, connects to peers |
//! | `exports` | the exported regions |
//! | `control`, `connections` | one end of a control queue pair; all of them |
//! | `quota`, `credits` | quotas and byte credits of the clients of one address |
//! | `link` | the client's half of a control queue pair |
//! | `mailbox` | the queue of answers to a session's calls |
//! | `sync` | the types that models replace |
//! | `server`, `memory` | files as regions, for `terrace serve`; the memory that they share |
//! | `metrics`, `http` | counters for Prometheus, and their HTTP server |
//! | `client` | the client library |
//! | `serving` | the handling of one client's requests |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod agent;
mod client;
mod connections;
mod control;
mod credits;
mod exports;
mod http;
mod link;
mod mailbox;
mod memory;
mod metrics;
mod quota;
mod server;
mod serving;
mod sync;

pub use agent::Agent;
pub use client::{
    ADDRESS_REQUESTS_MAX, Client, ClientConfig, ClientCounters, ClientError, Completion, Region,
    RegionAddress, RegionHandle, Span,
};
pub use control::{Control, is_untracked};
pub use exports::Exported;
pub use metrics::Metrics;
pub use server::{RegionConfig, ServeError, ServeMode, Server, ServerConfig};
pub use serving::{ClientRegionStats, ClientStats};
pub use terrace_access::proto::{Endpoint, MESSAGE_BYTES_MAX, Mode};
pub use terrace_baseline::kernel_bytes;
pub use terrace_pages::MemoryStats;
