//! Errors of a client.

use std::net::SocketAddr;

use terrace_nic::OpenError;
use terrace_nic::WcStatus;

/// The connection does not know the file: the client reclaims it by its path. Beyond Linux's error numbers.
pub const UNKNOWN_FILE: u16 = 0x8001;
/// The connection has no such open file: the client opens it again.
pub const UNKNOWN_OPEN: u16 = 0x8002;

/// An error of a client.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The server refuses a request, for the reason of a Linux error number.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// No port could be opened.
    #[error(transparent)]
    Port(OpenError),
    /// An error of the client's NIC.
    #[error("the NIC refuses: {0}")]
    Nic(#[from] terrace_nic::Error),
    /// No export answers at that address.
    #[error("no export at {addr}: {reason}")]
    NoExport {
        /// The address.
        addr: SocketAddr,
        /// The reason.
        reason: std::io::Error,
    },
    /// The server refuses the connection.
    #[error("the export refuses this client: {}", refusal(*.0))]
    Refused(i32),
    /// The server's answer does not match the request.
    #[error("the server's answer does not match the request: is it of another version?")]
    Protocol,
    /// The connection was lost, and no new one succeeded in time.
    #[error("the connection to the server is lost")]
    Lost,
    /// The answer to a request did not come that may not be repeated: it may have been done or not. The connection was lost,
    /// or an append was under way behind another one that failed.
    #[error("the answer did not come: it may have been done or not")]
    Unanswered,
    /// The thread that waited was to do something else ([`interruptible`](crate::interruptible)).
    #[error("the call was interrupted: it may have been done or not")]
    Interrupted,
    /// The server's host has restarted since the file was written, and what was not committed may be lost.
    #[error("the server's host has restarted: writes that were not committed may be lost")]
    Rebooted,
    /// The key of an open file was revoked: the client has lost the right, or the file was unlinked.
    #[error("the right to access the file was revoked")]
    Revoked,
    /// A lock was lost with the connection, and another client has it now.
    #[error("a lock of the file was lost with the connection")]
    LockLost,
    /// The file was not opened for this.
    #[error("the file is not open for this access")]
    NotOpenFor,
    /// A one-sided access failed: a full disk, for example.
    #[error("the access failed: {0:?}")]
    Access(WcStatus),
    /// The pipeline has as many accesses in flight as it can.
    #[error("the maximum of accesses is in flight: poll first")]
    Full,
    /// An argument is longer than the protocol permits.
    #[error("{0}")]
    Invalid(&'static str),
}

/// The server's reason, and what to do there.
fn refusal(errno: i32) -> String {
    let reason = std::io::Error::from_raw_os_error(errno);
    match reason.kind() {
        std::io::ErrorKind::PermissionDenied => format!(
            "{reason}: the server's rules (`terrace export --rules`) have to permit its host or user, and a server that is not \
             root serves its own user only"
        ),
        _ => reason.to_string(),
    }
}

impl ExportError {
    /// The Linux error number that says it best, for file systems on top.
    pub fn errno(&self) -> i32 {
        use rustix::io::Errno;
        let errno = match self {
            ExportError::Os(errno) | ExportError::Refused(errno) => return *errno,
            ExportError::Nic(_) | ExportError::Port(_) | ExportError::Protocol => Errno::IO,
            ExportError::NoExport { .. } | ExportError::Lost => Errno::TIMEDOUT,
            ExportError::Unanswered | ExportError::Rebooted => Errno::IO,
            ExportError::Interrupted => Errno::INTR,
            ExportError::Revoked => Errno::STALE,
            ExportError::LockLost => Errno::NOLCK,
            ExportError::NotOpenFor => Errno::BADF,
            ExportError::Access(WcStatus::RemoteOperation) => Errno::NOSPC,
            ExportError::Access(_) => Errno::IO,
            ExportError::Full => Errno::AGAIN,
            ExportError::Invalid(_) => Errno::INVAL,
        };
        errno.raw_os_error()
    }
}
