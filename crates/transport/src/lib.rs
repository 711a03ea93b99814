//! The RC, XRC, UC and UD transport of InfiniBand over RoCEv2 (IBTA volume 1, chapter 9): requester,
//! responder, completer and their timers, without IO, clock or unsafe code.
//!
//! [`Qp`] is the whole interface. Packets, work requests and the time go in; packets and the next deadline come out.
//! Everything it needs from the NIC around it is the [`Host`] trait: memory, shared receives, and where completions and
//! events go.
//!
//! [`wqe_format`] reads and writes work requests in the form that they have in memory that programs share with the NIC.

#![forbid(unsafe_code)]

pub mod access;
mod append;
mod common;
mod data;
mod datagram;
mod host;
mod qp;
mod requester;
mod responder;
mod state;
mod timers;
mod types;
mod window;
pub mod wqe_format;

pub use append::{APPEND_LEN_MAX, StagingBudget, StagingReservation};
pub use data::{Data, PACKET_BYTES_MAX};
pub use host::{AtomicOp, Completion, Deferred, Host, LocalError, RemoteAccess, RemoteError, Sink};
pub use qp::{AckPolicy, Qp, RUN_DATA_MAX, Transmit, may_come_from};
pub use state::{required_attributes, transition_exists};
pub use terrace_wire::Time;
pub use timers::{ack_timeout_ns, rnr_timer_ns};
pub use types::*;
