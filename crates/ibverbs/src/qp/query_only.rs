//! Attributes of a queue pair that only this crate stores.

use crate::abi::{IBV_MIG_MIGRATED, ibv_ah_attr, ibv_mig_state};
use crate::object;

/// Attributes that only `ibv_query_qp` uses. The NIC does not get them.
#[derive(Clone, Copy)]
pub struct QueryOnly {
    /// The primary path's address.
    pub address: ibv_ah_attr,
    /// The alternate path.
    pub alternate: Alternate,
    /// Whether the primary or the alternate path is in use.
    pub migration: ibv_mig_state,
}

/// The alternate path: accepted where the state machine allows it, and never used.
#[derive(Clone, Copy)]
pub struct Alternate {
    /// The path's address.
    pub address: ibv_ah_attr,
    /// Index of the path's partition key.
    pub pkey_index: u16,
    /// The path's port.
    pub port_num: u8,
    /// The path's ACK timeout.
    pub timeout: u8,
}

impl Default for QueryOnly {
    fn default() -> QueryOnly {
        // SAFETY: integers only.
        let address: ibv_ah_attr = unsafe { object::zeroed() };
        let alternate = Alternate { address, pkey_index: 0, port_num: 0, timeout: 0 };
        QueryOnly { address, alternate, migration: IBV_MIG_MIGRATED }
    }
}
