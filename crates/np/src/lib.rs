//! NP-RDMA for the queue pairs of programs: on devices that know nothing of absent memory, work requests go through an
//! initiator before they reach the send queue, and a target answers the peer's.
//!
//! ```text
//!   ibv_post_send ---> Posting::post ---> Session (SendStage) ---> Initiator ---> QueuePair::post_below
//!                                            |       ^                               |
//!                                            |       +---- completions (hook) <------+
//!   CQ <----- QueuePair::complete -----------+
//!                                            +---- ControlQp: messages ----> the peer's Session: Target
//! ```
//!
//! | module | contains |
//! |---|---|
//! | `service` | the sessions of a device: datagrams, completions of control queue pairs, timers |
//! | `session` | a queue pair's session: what arrives for it, and who handles it |
//! | `state` | the initiator and the target of a session, and the actions that they want |
//! | `link` | how the session finds the peer's, and what the peer has described |
//! | `control queue pair` | the control queue pair beside a program's queue pair |
//! | `memory` | the program's memory, as the initiator and the target see it |
//! | `settings`, `counters` | thresholds; statistics |
//!
//! The protocol itself is `terrace_access::optimistic`; `docs/np-rdma.md` explains it.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod control;
mod counters;
mod link;
mod memory;
mod service;
mod session;
mod settings;
mod state;

pub use service::{Service, new_signature_key};
pub use settings::Settings;
