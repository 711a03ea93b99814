//! `ibv_access_flags` bits that a queue pair's own access flags grant to the peer.

/// The peer may WRITE.
pub const REMOTE_WRITE: u32 = 1 << 1;
/// The peer may READ.
pub const REMOTE_READ: u32 = 1 << 2;
/// The peer may perform atomics.
pub const REMOTE_ATOMIC: u32 = 1 << 3;
/// The peer may FLUSH to global visibility.
pub const FLUSH_GLOBAL: u32 = 1 << 8;
/// The peer may FLUSH to persistence.
pub const FLUSH_PERSISTENT: u32 = 1 << 9;
