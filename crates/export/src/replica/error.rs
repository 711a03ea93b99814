//! Errors of replicated files.

use std::net::SocketAddr;

use crate::error::ExportError;

/// Why an operation on a replicated file failed.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// An argument is not possible.
    #[error("{0}")]
    Invalid(&'static str),
    /// An export that is needed fails or refuses.
    #[error("the export at {address} fails: {error}")]
    Export {
        /// The export.
        address: SocketAddr,
        /// The reason.
        error: ExportError,
    },
    /// No export that answers has the file. Others do not answer, for these reasons.
    #[error("no export that answers has the replicated file{}", .0.iter().map(|reason| format!("; {reason}")).collect::<String>())]
    NotFound(Vec<String>),
    /// There is a file or a record at an export where a replicated file is to be created.
    #[error("the export at {0} has a file or a record of that name")]
    Exists(SocketAddr),
    /// A member of the newest epoch that is known is missing: it may have data that no other export has.
    #[error(
        "the member {address} of epoch {epoch} is missing: {reason}. Start its export; or, if it is lost for good, `found` the \
         copy of another member, which gives up what only the missing one has"
    )]
    MemberMissing {
        /// The member.
        address: SocketAddr,
        /// The newest epoch that the others show.
        epoch: u64,
        /// What is known.
        reason: String,
    },
    /// Another writer has the file.
    #[error("another writer has the file at {0}")]
    InUse(SocketAddr),
    /// The record at an export cannot be read.
    #[error(
        "the record of the replicated file at {address} is damaged: {reason}. Nothing was changed. If other exports have the \
         data, remove the file and its record there"
    )]
    Damaged {
        /// The export.
        address: SocketAddr,
        /// What is wrong.
        reason: &'static str,
    },
    /// Two exports have files that are not copies of each other.
    #[error(
        "the files at {0} and {1} belong to different replica sets. Nothing was changed. Remove the one that does not count, \
         and its record"
    )]
    Foreign(SocketAddr, SocketAddr),
    /// Two exports have the same record.
    #[error("the records at {0} and {1} are the same: one was copied. Remove the copied file and its record")]
    Duplicate(SocketAddr, SocketAddr),
    /// There is a file of that name without a record.
    #[error("the file at {0} is no replica: `found` makes it one, or remove it")]
    Plain(SocketAddr),
    /// There is a record without its file.
    #[error("the file at {0} was removed, and its record is there. Remove the record, too")]
    FileMissing(SocketAddr),
    /// The copy was being made when its writer ended.
    #[error("the copy at {0} is incomplete: only other members have the data")]
    Incomplete(SocketAddr),
    /// The file was replaced by another one while it was opened.
    #[error("the file at {0} was replaced meanwhile")]
    Replaced(SocketAddr),
    /// All members have refused the operation, and are still members.
    #[error("all members refuse: {0}")]
    Refused(ExportError),
    /// The appender has as many appends in flight as it can.
    #[error("the maximum of appends is in flight: wait first")]
    Full,
    /// No member is left: the writer or the reader has ended.
    #[error("no member of the replicated file is left: open it again")]
    NoMember,
}

impl ReplicaError {
    /// The error of an export.
    pub(super) fn of(address: SocketAddr) -> impl Fn(ExportError) -> ReplicaError {
        move |error| ReplicaError::Export { address, error }
    }
}
