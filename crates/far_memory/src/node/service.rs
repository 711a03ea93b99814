//! What the control thread needs of a node, whatever its scheme.

use std::sync::mpsc::Sender;

use crate::protocol::{Connect, Connected};
use crate::status::NodeStatus;

/// A client that breaks the rules.
pub(crate) struct Expelled {
    pub id: u64,
    pub reason: String,
}

/// Admits and removes clients.
pub(crate) trait Service: Send + Sync {
    /// Admits a client under this number, soon, and says what it is to know or why not.
    fn admit(&self, id: u64, connect: Box<Connect>, answer: Sender<Result<Connected, String>>);

    /// Removes a client, soon, and frees its pages.
    fn remove(&self, id: u64);

    /// Compares clients with the rules. Returns those to disconnect.
    fn monitor(&self) -> Vec<Expelled>;

    /// What there is, and who has it.
    fn status(&self) -> NodeStatus;

    /// Addresses and keys by which a client's chains write the pool: of the client that was admitted last.
    #[cfg(test)]
    fn pool_keys(&self) -> Vec<(u64, u32)> {
        Vec::new()
    }
}
