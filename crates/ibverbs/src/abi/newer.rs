//! Additions of headers newer than rdma-core 44. Structures grow at the end, which existing programs do not read, so a
//! larger structure serves old and new callers.

use std::ffi::{c_int, c_void};

use super::{ibv_context, ibv_pd, ibv_qp_ex};

/// `IBV_WC_FLUSH`.
pub const IBV_WC_FLUSH: u32 = 8;
/// `IBV_WR_FLUSH`.
pub const IBV_WR_FLUSH: u32 = 14;
/// `IBV_ACCESS_FLUSH_GLOBAL`.
pub const IBV_ACCESS_FLUSH_GLOBAL: u32 = 1 << 8;
/// `IBV_ACCESS_FLUSH_PERSISTENT`.
pub const IBV_ACCESS_FLUSH_PERSISTENT: u32 = 1 << 9;
/// `IBV_QP_EX_WITH_FLUSH`.
pub const IBV_QP_EX_WITH_FLUSH: u64 = 1 << 11;
/// `IBV_ODP_SUPPORT_FLUSH`.
pub const IBV_ODP_SUPPORT_FLUSH: u32 = 1 << 6;
/// `IBV_ODP_SUPPORT_ATOMIC_WRITE`.
pub const IBV_ODP_SUPPORT_ATOMIC_WRITE: u32 = 1 << 7;
/// `IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS`.
pub const IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS: u32 = 1 << 0;
/// `IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY`.
pub const IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY: u32 = 1 << 1;
/// `IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG`.
pub const IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG: c_int = 1 << 0;
/// `IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES`.
pub const IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES: c_int = 1 << 1;

/// `struct ibv_qp_ex` since rdma-core 46: one more builder function at the end.
#[repr(C)]
pub struct QpEx {
    /// The structure of rdma-core 44.
    pub base: ibv_qp_ex,
    /// `ibv_wr_flush`: rkey, remote address, length, placement type, selectivity level.
    pub wr_flush: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, usize, u8, u8)>,
}

/// `struct ibv_dmah`: the first field of every verb object.
#[repr(C)]
pub struct ibv_dmah {
    /// The DMA handle's device.
    pub context: *mut ibv_context,
}

/// `IBV_REG_MR_MASK_IOVA` and the bits after it, in order.
pub mod mr_init {
    /// `iova` is valid.
    pub const IOVA: u64 = 1 << 0;
    /// `addr` is valid.
    pub const ADDR: u64 = 1 << 1;
    /// `fd` is valid.
    pub const FD: u64 = 1 << 2;
    /// `fd_offset` is valid.
    pub const FD_OFFSET: u64 = 1 << 3;
    /// `dmah` is valid.
    pub const DMAH: u64 = 1 << 4;
    /// `buf` is valid.
    pub const BUF: u64 = 1 << 5;
}

/// `struct ibv_mr_init_attr` of `ibv_reg_mr_ex`.
#[repr(C)]
pub struct ibv_mr_init_attr {
    /// Bytes to register.
    pub length: usize,
    /// `ibv_access_flags`.
    pub access: c_int,
    /// Mask of the valid fields below: `mr_init`.
    pub comp_mask: u64,
    /// The address for peers.
    pub iova: u64,
    /// The address in this process.
    pub addr: *mut c_void,
    /// A DMA-buf.
    pub fd: c_int,
    /// The offset of the region within it.
    pub fd_offset: u64,
    /// A DMA handle.
    pub dmah: *mut ibv_dmah,
    /// A buffer of `ibv_alloc_buf` that contains `addr`.
    pub buf: *mut ibv_buf,
}

/// `struct ibv_buf`, opaque to programs.
#[repr(C)]
pub struct ibv_buf {
    /// The protection domain of the buffer.
    pub pd: *mut ibv_pd,
    /// First byte; page aligned.
    pub addr: *mut c_void,
    /// Size in bytes.
    pub size: usize,
}
