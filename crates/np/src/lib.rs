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
//! | `state` | the state of a session, and the order in which what has arrived is handled; the target's actions |
//! | `outgoing` | the program's work requests, and the initiator's actions |
//! | `setup` | how the session finds the peer's, and what happens when the peer is gone |
//! | `messages` | messages of the peer, and where they go |
//! | `regions` | what the peer learns of this end's regions |
//! | `forgets` | the keys that the peer has to forget |
//! | `link` | the state of the setup, and what the peer has described |
//! | `transfers` | bytes that this end moves for the peer |
//! | `control`, `control_cqs` | the control queue pair beside a program's queue pair; the completion queues of all of them |
//! | `ending` | memory that same-host peers may still access when its session has ended |
//! | `memory` | the program's memory, as the initiator and the target see it |
//! | `settings`, `counters` | thresholds; statistics |
//!
//! The protocol itself is `terrace_access::optimistic`; `docs/np-rdma.md` explains it.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod control;
mod control_cqs;
mod counters;
mod ending;
mod forgets;
mod link;
mod memory;
mod messages;
mod outgoing;
mod regions;
mod service;
mod session;
mod settings;
mod setup;
mod state;
mod transfers;

pub use service::{Service, new_signature_key};
pub use settings::Settings;
