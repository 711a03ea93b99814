//! The attributes of a queue pair that only C's side keeps.

use crate::abi::{IBV_MIG_MIGRATED, ibv_ah_attr, ibv_mig_state};
use crate::object;

/// Attributes that never reach the NIC, kept for `ibv_query_qp`.
#[derive(Clone, Copy)]
pub struct Remembered {
    /// The primary path's address.
    pub address: ibv_ah_attr,
    /// The alternate path.
    pub alternate: Alternate,
    /// Which of the two is in use.
    pub migration: ibv_mig_state,
}

/// The alternate path: accepted where the state machine allows it, and never used.
#[derive(Clone, Copy)]
pub struct Alternate {
    /// Its address.
    pub address: ibv_ah_attr,
    /// Index of its partition key.
    pub pkey_index: u16,
    /// Its port.
    pub port_num: u8,
    /// Its ACK timeout.
    pub timeout: u8,
}

impl Default for Remembered {
    fn default() -> Remembered {
        // SAFETY: integers only.
        let address: ibv_ah_attr = unsafe { object::zeroed() };
        let alternate = Alternate { address, pkey_index: 0, port_num: 0, timeout: 0 };
        Remembered { address, alternate, migration: IBV_MIG_MIGRATED }
    }
}
