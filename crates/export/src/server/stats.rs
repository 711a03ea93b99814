//! Statistics of an export, for `terrace stat`.

use serde::{Deserialize, Serialize};

/// An export: what there is now, and what has happened since it began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportStats {
    /// Open files of all clients.
    pub open_files: usize,
    /// Locks held by all clients.
    pub locks: usize,
    /// Requests answered.
    pub requests: u64,
    /// Requests answered with an error.
    pub refused: u64,
    /// Keys that were revoked by changes of rights and unlinks.
    pub revoked: u64,
    /// The connected clients, by their names.
    pub clients: Vec<ExportClientStats>,
}

/// A connected client of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportClientStats {
    /// Its address, or on this host its user and process.
    pub client: String,
    /// The user as which it is served.
    pub uid: u32,
    /// Files that it has open.
    pub open_files: usize,
    /// Locks that it holds.
    pub locks: usize,
    /// Files that it watches.
    pub watches: usize,
    /// Requests of it that were answered.
    pub requests: u64,
}
