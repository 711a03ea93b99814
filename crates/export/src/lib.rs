//! A directory whose files peers read and write one-sidedly: `terrace export` and its client (FileMR, NSDI'20, section 5.1:
//! *novad*).
//!
//! The server opens files as memory regions ([`terrace_files`]) and tells clients their keys. Data is READ, WRITTEN and
//! APPENDED by the clients' NICs; the server's program takes no part. Names, attributes, permissions and locks are messages.
//!
//! ```text
//!   Client, RemoteFile, Pipeline                              Server
//!     │ names, attributes, open ──── control queue pair ────> workers: as the client's user, beneath the directory
//!     │ data ─────────────────────── data, append ──────────> NIC: regions that are files
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `proto` | messages |
//! | `rules` | which clients are which users, and what they may do: the TOML file |
//! | `server` | the directory: `terrace export` |
//! | `client` | the client library |
//! | `replica` | the same file on several exports: its epochs, its writer and its readers |
//! | `ends` | the queue pairs of a connection |
//! | `error` | errors of clients |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod client;
mod ends;
mod error;
#[cfg(test)]
mod hostile_tests;
pub mod proto;
mod replica;
mod rules;
mod server;

pub use client::{
    Change, Client, ClientConfig, Completed, Completion, Pipeline, RECORD_BYTES_MAX, RemoteFile,
    call_before_sleep, interruptible,
};
pub use error::{AccessKind, ExportError, UNKNOWN_FILE, UNKNOWN_OPEN};
pub use proto::{
    Attributes, ChangeSet, DirectoryEntry, DirectoryPage, FileId, FileKind, FileSystem, LockKind, OpenAccess,
    RenameMode, Revocation, SetAttributes, SetTime, Timestamp,
};
pub use replica::{
    MEMBERS_MAX, ReplicaAppended, ReplicaAppender, ReplicaConfig, ReplicaError, ReplicaReader, ReplicaStatus,
    ReplicatedFile,
};
pub use rules::{Rules, RulesError};
pub use server::{ExportClientStats, ExportStats, ServeError, Server, ServerConfig};
