//! Memory nodes: servers of regions that need not be in memory, and their clients.
//!
//! | module | holds |
//! |---|---|
//! | `agent` | what a device's peers can ask, and who does the work |
//! | `exports` | the regions that peers may ask about |
//! | `control`, `parties` | one end of a control queue pair; all of them |
//! | `account`, `room` | what the clients of one address may take together |
//! | `link` | the client's half of a control queue pair |
//! | `server` | files as regions: what `terrace serve` runs |
//! | `metrics`, `http` | counters for Prometheus, and how they are asked for |
//! | `client` | the client library |
//! | `serving` | what a server does with the requests of one client |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod account;
mod agent;
mod client;
mod control;
mod exports;
mod http;
mod link;
mod metrics;
mod parties;
mod room;
mod server;
mod serving;

pub use agent::Agent;
pub use client::{Client, ClientConfig, ClientError, Completion, Region, Span};
pub use exports::Exported;
pub use metrics::Metrics;
pub use server::{RegionConfig, ServeError, ServeMode, Server, ServerConfig};
pub use serving::{ClientRegionStats, ClientStats};
pub use terrace_access::proto::Mode;
pub use terrace_tier::kernel_bytes;
