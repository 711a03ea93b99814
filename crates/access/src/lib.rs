//! Optimistic one-sided access to regions larger than memory.
//!
//! A client READs an extended region as if all of it were in memory. The server's NIC answers READs of absent pages with
//! the region's signature page ([`signature`]), without involving the server's software. The client detects the
//! signature page and fetches exactly the absent pages by calls. The crate is sans-IO: the owner of the queue pairs passes
//! in messages, completions and the time.
//!
//! | module | contains |
//! |---|---|
//! | [`session`] | the state of one queue pair: the order of posts, RPCs and completions |
//! | [`optimistic`] | the same and more on a NIC that knows nothing of absence (NP-RDMA): READs, WRITEs, atomics and messages; both sides |
//! | [`proto`] | the messages between client and server, with their decoders |
//! | [`signature`] | the signature page |
//! | [`region`] | the client's state of an extended region: [`layout`], signature page, [`residency`] |
//! | [`peers`] | the client's knowledge of rkeys, and the schedule of queries |
//! | [`pages`] | sets of pages |
//! | `request` | what work requests access, and their completions |
//! | `retries` | calls that the peer was too busy for |
//! | `sge_list` | byte ranges of scatter/gather lists |

#![forbid(unsafe_code)]

pub mod layout;
pub mod optimistic;
pub mod pages;
pub mod peers;
pub mod proto;
pub mod region;
mod request;
pub mod residency;
mod retries;
pub mod session;
mod sge_list;
pub mod signature;
