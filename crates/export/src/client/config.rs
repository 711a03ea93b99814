//! What a client is told, and what it reports.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::io::Errno;
use terrace_nic::PortConfig;

use crate::error::ExportError;
use crate::proto::{ChangeSet, FileId, NAME_BYTES_MAX, Text};

/// The address of a client's server, and the client's parameters.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The export's address and port.
    pub server: SocketAddr,
    /// The configuration of the client's own port.
    pub port: PortConfig,
    /// The time in which a call ends, reconnecting included.
    pub timeout: Duration,
}

impl ClientConfig {
    /// A client of an export, with a timeout of 30 seconds.
    pub fn new(server: SocketAddr) -> ClientConfig {
        let address = server.ip().is_loopback().then_some(server.ip());
        ClientConfig {
            server,
            port: PortConfig { address, ..PortConfig::default() },
            timeout: Duration::from_secs(30),
        }
    }
}

/// A change that the server has announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A watched file has changed.
    Changed {
        /// The file.
        id: FileId,
        /// What has changed.
        change: ChangeSet,
    },
    /// The client is connected again: whatever it has cached may be stale.
    Reconnected,
}

/// A name as a field of a message.
pub fn text(name: &OsStr) -> Result<Text, ExportError> {
    match name.len() {
        ..=NAME_BYTES_MAX => Ok(Text::from(name.as_bytes())),
        _ => Err(ExportError::Os(Errno::NAMETOOLONG.raw_os_error())),
    }
}
