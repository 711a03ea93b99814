//! Memory nodes: servers of regions that need not be in memory, and their clients.
//!
//! | module | holds |
//! |---|---|
//! | `agent` | answers peers' questions, and drives the work for them |
//! | `exports` | the regions that peers may ask about |
//! | `control`, `parties` | one end of a control queue pair; all of them |
//! | `account`, `room` | quotas and credits of the clients of one address |
//! | `link` | the client's half of a control queue pair |
//! | `mailbox` | answers on their way to the thread that drives a session |
//! | `sync` | what is replaced in models |
//! | `server` | files as regions: what `terrace serve` runs |
//! | `metrics`, `http` | counters for Prometheus, and the server for them |
//! | `client` | the client library |
//! | `serving` | the handling of one client's requests |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod account;
mod agent;
mod client;
mod control;
mod exports;
mod http;
mod link;
mod mailbox;
mod metrics;
mod parties;
mod room;
mod server;
mod serving;
mod sync;

pub use agent::Agent;
pub use client::{Client, ClientConfig, ClientError, Completion, Region, Span};
pub use exports::Exported;
pub use metrics::Metrics;
pub use server::{RegionConfig, ServeError, ServeMode, Server, ServerConfig};
pub use serving::{ClientRegionStats, ClientStats};
pub use terrace_access::proto::Mode;
pub use terrace_tier::kernel_bytes;
