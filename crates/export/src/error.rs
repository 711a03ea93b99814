//! Errors of a client.

use std::net::SocketAddr;

use terrace_nic::OpenError;
use terrace_nic::WcStatus;

use crate::proto::Link;

/// The connection does not know the file: the client reclaims it by its path. Beyond Linux's error numbers.
pub const UNKNOWN_FILE: u16 = 0x8001;
/// The connection has no such open file: the client opens it again.
pub const UNKNOWN_OPEN: u16 = 0x8002;

/// A one-sided access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// Reading bytes.
    Read,
    /// Writing bytes within the file.
    Write,
    /// Adding a record, with or without a commit.
    Append,
    /// Making what was written persistent.
    Commit,
}

impl AccessKind {
    /// The queue pair that carries it.
    pub(crate) fn link(self) -> Link {
        match self {
            AccessKind::Append => Link::Append,
            AccessKind::Read | AccessKind::Write | AccessKind::Commit => Link::Data,
        }
    }

    fn name(self) -> &'static str {
        match self {
            AccessKind::Read => "read",
            AccessKind::Write => "write",
            AccessKind::Append => "append",
            AccessKind::Commit => "commit",
        }
    }
}

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
    /// A one-sided access failed: by an error of the disk, for example, or because the disk is full. The status does not tell the two apart.
    #[error("the {kind} failed: {1:?}", kind = .0.name())]
    Access(AccessKind, WcStatus),
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
            // What needs no space has met an error of the disk.
            ExportError::Access(AccessKind::Write | AccessKind::Append, WcStatus::RemoteOperation) => {
                Errno::NOSPC
            }
            ExportError::Access(..) => Errno::IO,
            ExportError::Full => Errno::AGAIN,
            ExportError::Invalid(_) => Errno::INVAL,
        };
        errno.raw_os_error()
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn only_an_access_that_needs_space_finds_a_full_disk() {
        let errno = |kind| ExportError::Access(kind, WcStatus::RemoteOperation).errno();
        for kind in [AccessKind::Read, AccessKind::Commit] {
            assert_eq!(errno(kind), Errno::IO.raw_os_error(), "{kind:?}");
        }
        for kind in [AccessKind::Write, AccessKind::Append] {
            assert_eq!(errno(kind), Errno::NOSPC.raw_os_error(), "{kind:?}");
        }
    }
}
