//! Targets: connections that execute a workload's accesses.

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
    /// Begins to request the address of the region's file from the server. The slot's buffer has the answer after the
    /// completion: the offset of the file in the region, as 8 bytes in little-endian order.
    fn find_file(&mut self, slot: usize, tag: u64) -> Result<(), TargetError>;
    /// Begins to make `len` bytes at `offset` of the region durable.
    fn commit(&mut self, offset: u64, len: usize, tag: u64) -> Result<(), TargetError>;
    /// Makes progress and appends new completions, without waiting for one.
    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), TargetError>;
    /// Copies into the buffer of a slot that no access uses.
    fn store(&mut self, slot: usize, bytes: &[u8]) -> Result<(), TargetError>;
    /// Copies out of the buffer of a slot that no access uses.
    fn load(&mut self, slot: usize, bytes: &mut [u8]) -> Result<(), TargetError>;
}

/// The completion of an access.
#[derive(Debug)]
pub struct Completion {
    /// The tag of the access.
    pub tag: u64,
    /// The result of the access.
    pub outcome: Result<(), TargetError>,
}

/// An error of an access or a connection, as one line of text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TargetError(pub String);

/// The work of a client thread with its target.
pub type Body<'a> = &'a mut dyn FnMut(&mut dyn Target);

/// Connects each client thread to its target, within that thread.
pub trait Connect: Sync {
    /// Runs `body` with the target of thread `thread`, which has `slots` buffers of `slot_bytes` bytes each. Without a
    /// connection, `body` is not called.
    fn with_target(
        &self,
        thread: usize,
        slots: usize,
        slot_bytes: usize,
        body: Body<'_>,
    ) -> Result<(), TargetError>;
}
