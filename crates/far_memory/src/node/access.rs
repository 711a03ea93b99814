//! `ibv_access_flags` of a node's regions and queue pairs.

pub(crate) const LOCAL_WRITE: u32 = 1;
pub(crate) const REMOTE_WRITE: u32 = 1 << 1;
pub(crate) const REMOTE_READ: u32 = 1 << 2;
const REMOTE_ATOMIC: u32 = 1 << 3;
/// The node's own chains, through their echo queue pair.
pub(crate) const REMOTE_ALL: u32 = REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC;
/// The free-page queue: elements are WRITten and exchanged, counters are added to.
pub(crate) const RING: u32 = LOCAL_WRITE | REMOTE_WRITE | REMOTE_ATOMIC;
/// A translation table: entries are READ and exchanged. A WRITE could be misaligned.
pub(crate) const TABLE: u32 = LOCAL_WRITE | REMOTE_READ | REMOTE_ATOMIC;
