//! The types of `include/terrace.h`.

use super::ibv_sge;

/// `TERRACE_COMMIT`.
pub const TERRACE_COMMIT: u32 = 1;

/// `struct terrace_append_wr`.
#[repr(C)]
#[allow(non_camel_case_types)]
pub struct terrace_append_wr {
    /// Identifier of the completion.
    pub wr_id: u64,
    /// The next request, or null.
    pub next: *mut terrace_append_wr,
    /// The record.
    pub sg_list: *mut ibv_sge,
    /// Number of its elements.
    pub num_sge: i32,
    /// `ibv_send_flags`.
    pub send_flags: u32,
    /// Key of the peer's region.
    pub rkey: u32,
    /// `terrace_append_flags`.
    pub flags: u32,
    /// Memory for the record's offset.
    pub result: ibv_sge,
}
