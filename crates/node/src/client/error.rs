//! Errors of a client.

use std::net::{IpAddr, SocketAddr};

use terrace_access::proto::Status;
use terrace_nic::{Error, OpenError};

/// An error of a client. The messages suggest what to check.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No port could be opened.
    #[error(transparent)]
    Port(OpenError),
    /// An error of the NIC.
    #[error("the NIC refuses: {0}")]
    Nic(#[from] Error),
    /// The client has no address of the server's family.
    #[error("no local address of the same family as {0}: choose another local address")]
    Family(IpAddr),
    /// No memory node answers at that address.
    #[error(
        "no memory node answers at {0}: is `terrace serve` running there, and does the network let UDP through?"
    )]
    Silent(SocketAddr),
    /// The server refuses the connection or a request.
    #[error("the server refuses: {}", reason(*.0))]
    Refused(Status),
    /// The server has no such region.
    #[error("the server has no region named {0:?}")]
    NoRegion(String),
    /// The server's answer does not match the request.
    #[error("the server's answer does not match the request: is it of another version?")]
    Protocol,
    /// The connection has ended, or the server does not answer any more.
    #[error("the connection to the server is lost")]
    Lost,
    /// An access beyond the end of its region or buffer.
    #[error("{len} bytes at {offset} are not within {within} of {size} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// "the region" or "the buffer".
        within: &'static str,
        /// Its length in bytes.
        size: u64,
    },
    /// The maximum of accesses is in flight: poll first.
    #[error("the maximum of accesses is in flight: poll for completions first")]
    Full,
}

fn reason(status: Status) -> String {
    match status {
        Status::Busy => "it is busy (its clients, in all or of this address, use all that it has for them; or it has no region yet)".into(),
        status => format!("{status:?}"),
    }
}
