//! Communication management without sockets, clocks and threads: how two ends agree on a connection, and on its end.
//!
//! A [`Cm`] is one process's connection manager. It takes datagrams ([`Cm::handle_mad`]), commands ([`Cm::connect`],
//! [`Cm::accept`], ...) and the time, and gives datagrams ([`Cm::poll_transmit`]), events ([`Cm::poll_event`]) and the time by
//! which it wants to be called again ([`Cm::poll_timeout`], [`Cm::handle_timeout`]). After every call that may change
//! something, its user drains the three `poll_` functions.
//!
//! ```text
//!            connect                                          REQ arrives
//!     +----> REQ_SENT --- REJ, nobody answers ---> GONE  <--- reject, REJ --- REQ_RECEIVED
//!     |         | REP                                                            | accept
//!   (idle)   REP_RECEIVED                                                     REP_SENT
//!               | establish                                                      | RTU
//!               +----------------------> ESTABLISHED <---------------------------+
//!                           disconnect |            | DREQ
//!                                 DREQ_SENT     DREQ_RECEIVED
//!                     DREP, nobody answers |        | disconnect
//!                                          TIME_WAIT ---> GONE
//! ```
//!
//! What is sent and wants an answer is repeated at growing intervals and given up after so many times ([`Timing`]). What
//! arrives twice is answered twice and handled once. A stranger can make this side hold as many half-open connections as
//! [`Limits`] says, and no more.
//!
//! IBTA volume 1, chapter 12, and annex A11 for IP addresses; where the standard leaves a choice, as the Linux kernel's `cm`
//! and `cma` have it.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod active;
mod connection;
mod datagram;
mod end;
mod ids;
mod listen;
mod liveness;
mod manager;
mod passive;
mod route;
mod timing;

pub use active::Connect;
pub use connection::Agreed;
pub use datagram::{Answer, Ask};
pub use listen::ListenerId;
pub use manager::{Cm, Config, Counters, Elsewhere, Error, Event, EventKind, Limits, Transmit};
pub use passive::Accept;
pub use timing::Timing;

/// A connection, or a question about datagrams: its name on the wire, which no other one of this process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u32);
