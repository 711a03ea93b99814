//! A block device whose blocks are pages of far memory: what a kernel swaps to. It is a network block device (NBD) at a unix
//! socket, or a file by FUSE below a loop device.
//!
//! ```text
//!   client's socket            Server               Device                       PageQueue
//!       | bytes                   |                    |                             |
//!       +------------> input ---->| handle_input ----->| requests become operations  |
//!                                 |                    | on pages, in slots -------->| submit
//!                                 | advance ---------->| <-----------completions ----| poll
//!       <------------- output <---| emit <-------------| replies, in any order       |
//! ```
//!
//! | module | contains |
//! |---|---|
//! | `protocol` | numbers and messages of NBD |
//! | `negotiation` | a connection before its transmission phase |
//! | `device` | requests, and the operations on pages that they become |
//! | `slots` | pages on their way, and operations on one page in their order |
//! | `queue` | what is expected of far memory: [`PageQueue`] |
//! | `client_queue` | the client of far memory as such a queue |
//! | `server` | the socket, and the thread that serves it |
//! | `file` | the file, and the thread that serves it |
//! | `polling` | how threads poll |
//!
//! `device` and below know no socket and no clock. The protocol is that of <https://github.com/NetworkBlockDevice/nbd>,
//! `doc/proto.md`: fixed newstyle negotiation, simple replies.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod client_queue;
mod counters;
mod device;
mod file;
mod negotiation;
mod polling;
mod protocol;
mod queue;
mod server;
mod slots;

pub use client_queue::ClientQueue;
pub use counters::{Counters, REPORT, Totals};
pub use device::{CONNECTIONS_MAX, Device, REQUEST_BYTES_MAX, slot_count};
pub use file::{FILE_NAME, FileServer};
pub use protocol::ProtocolError;
pub use queue::{Ended, Operation, PageQueue};
pub use server::{Server, ServerError};
