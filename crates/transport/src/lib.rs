//! The RC, XRC, UC and UD transport of InfiniBand over RoCEv2 (IBTA volume 1, chapter 9): requester,
//! responder, completer and their timers, without IO, clock or unsafe code.
//!
//! [`Qp`] is the whole interface. Packets, work requests and the time go in; packets and the next deadline come out.
//! Everything it needs from the NIC around it is the [`Host`] trait: memory, shared receives, and where completions and
//! events go.

#![forbid(unsafe_code)]

mod common;
mod datagram;
mod host;
mod qp;
mod requester;
mod responder;
mod state;
mod timers;
mod types;
mod window;

pub use host::{AtomicOp, Completion, Deferred, Host, LocalError, RemoteAccess, RemoteError, Sink};
pub use qp::{AckPolicy, Qp, Transmit, may_come_from};
pub use state::{required_attributes, transition_exists};
pub use terrace_wire::Time;
pub use timers::{ack_timeout_ns, rnr_timer_ns};
pub use types::*;

/// `ibv_access_flags` bits that a queue pair's own access flags grant to the peer.
pub mod access {
    /// The peer may WRITE.
    pub const REMOTE_WRITE: u32 = 1 << 1;
    /// The peer may READ.
    pub const REMOTE_READ: u32 = 1 << 2;
    /// The peer may perform atomics.
    pub const REMOTE_ATOMIC: u32 = 1 << 3;
    /// The peer may FLUSH to global visibility.
    pub const FLUSH_GLOBAL: u32 = 1 << 8;
    /// The peer may FLUSH to persistence.
    pub const FLUSH_PERSISTENT: u32 = 1 << 9;
}
