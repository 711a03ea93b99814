//! What peers may do.

use bitflags::bitflags;

bitflags! {
    /// What a published region permits to peers, or a published queue pair to its peer. Values are those of
    /// `enum ibv_access_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Rights: u32 {
        /// Peers may write.
        const WRITE = 1 << 1;
        /// Peers may read.
        const READ = 1 << 2;
        /// Peers may perform atomic operations.
        const ATOMIC = 1 << 3;
    }
}
