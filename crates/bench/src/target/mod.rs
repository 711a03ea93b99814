//! Connections that carry out a workload's accesses.

mod memory;
mod node;

pub use memory::{MemoryTarget, SharedBytes};
pub use node::NodeRegion;

/// One client thread's connection to one region.
///
/// `read` and `write` only begin an access, which uses the slot's buffer until its completion. Writes of one target to
/// overlapping bytes take effect in the order in which they began.
pub trait Target {
    /// Begins to read `len` bytes at `offset` of the region into the slot's buffer.
    fn read(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError>;
    /// Begins to write the first `len` bytes of the slot's buffer to `offset` of the region.
    fn write(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError>;
    /// Makes progress and adds what has completed. Returns soon, also when nothing has.
    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), TargetError>;
    /// Copies into the buffer of a slot that no access uses.
    fn store(&mut self, slot: usize, bytes: &[u8]) -> Result<(), TargetError>;
    /// Copies out of the buffer of a slot that no access uses.
    fn load(&mut self, slot: usize, bytes: &mut [u8]) -> Result<(), TargetError>;
}

/// An access that has ended.
#[derive(Debug)]
pub struct Completion {
    /// What the access was begun with.
    pub tag: u64,
    /// How it ended.
    pub outcome: Result<(), TargetError>,
}

/// Why an access or a connection failed: one sentence, from whoever carries out accesses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TargetError(pub String);

/// What a client thread does with its target.
pub type Body<'a> = &'a mut dyn FnMut(&mut dyn Target);

/// Makes each client thread's target, within that thread.
pub trait Connect: Sync {
    /// Has `body` work with the target of thread `thread`, which has `slots` buffers of `slot_bytes` bytes each. When there is
    /// none, `body` is not called.
    fn with_target(
        &self,
        thread: usize,
        slots: usize,
        slot_bytes: usize,
        body: Body<'_>,
    ) -> Result<(), TargetError>;
}
