//! Communication management without sockets, clocks and threads: establishes and ends connections.
//!
//! A [`Cm`] is one process's connection manager. Its inputs are datagrams ([`Cm::handle_mad`]), commands
//! ([`Cm::connect`], [`Cm::accept`], ...) and the time. Its outputs are datagrams ([`Cm::poll_transmit`]), events
//! ([`Cm::poll_event`]) and the next deadline ([`Cm::poll_timeout`], for [`Cm::handle_timeout`]). After every call that
//! may change something, its user drains the three `poll_` functions.
//!
//! ```text
//!            connect                                          REQ arrives
//!     +----> REQ_SENT --- REJ, timeout ------> REJECTED <--- reject, REJ ---  REQ_RECEIVED
//!     |         | REP                                                            | accept
//!   (idle)   REP_RECEIVED                                                     REP_SENT
//!               | establish                                                      | RTU
//!               +----------------------> ESTABLISHED <---------------------------+
//!                           disconnect |            | DREQ
//!                                 DREQ_SENT     DREQ_RECEIVED
//!                            DREP, timeout |        | disconnect
//!                                          TIME_WAIT ---> (removed)
//! ```
//!
//! An unanswered message is repeated at growing intervals, for a limited number of attempts ([`Timing`]). A duplicate
//! is answered again and handled once. [`Limits`] bounds the half-open connections that peers can create.
//!
//! IBTA volume 1, chapter 12, and annex A11 for IP addresses; where the standard allows several behaviours, this crate
//! follows the Linux kernel's `cm` and `cma`.

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
pub use datagram::{SidrReply, SidrRequest};
pub use ids::{ConnId, ListenerId};
pub use listen::Addresses;
pub use manager::{Cm, Config, Counters, Error, Event, EventKind, FindInstance, Limits, Transmit};
pub use passive::Accept;
pub use timing::Timing;
