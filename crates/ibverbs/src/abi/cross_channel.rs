//! The structures of `infiniband/terrace_exp.h` and `infiniband/terrace_dv.h`.

use std::ffi::{c_int, c_void};

use super::{
    ibv_cq, ibv_pd, ibv_qp, ibv_qp_cap, ibv_qp_type, ibv_recv_wr, ibv_send_wr__bindgen_ty_2, ibv_sge, ibv_srq,
};

/// `enum ibv_exp_wr_opcode` beyond those of `ibv_wr_opcode`.
pub const IBV_EXP_WR_SEND_WITH_INV: u32 = 0x48;
/// Enables a send queue.
pub const IBV_EXP_WR_SEND_ENABLE: u32 = 0x60;
/// Enables a receive queue.
pub const IBV_EXP_WR_RECV_ENABLE: u32 = 0x61;
/// Waits for completions.
pub const IBV_EXP_WR_CQE_WAIT: u32 = 0x62;
/// Masked compare and swap.
pub const IBV_EXP_WR_EXT_MASKED_ATOMIC_CMP_AND_SWP: u32 = 0x63;
/// Masked fetch and add.
pub const IBV_EXP_WR_EXT_MASKED_ATOMIC_FETCH_AND_ADD: u32 = 0x64;
/// Does nothing.
pub const IBV_EXP_WR_NOP: u32 = 0x65;
/// The flag that advances the base of counts.
pub const IBV_EXP_SEND_WAIT_EN_LAST: u64 = 1 << 34;
/// The flag of operands in the work request.
pub const IBV_EXP_SEND_EXT_ATOMIC_INLINE: u64 = 1 << 35;

/// `comp_mask` of a queue pair's attributes.
pub const IBV_EXP_QP_INIT_ATTR_PD: u32 = 1;
/// The creation flags count.
pub const IBV_EXP_QP_INIT_ATTR_CREATE_FLAGS: u32 = 1 << 2;
/// The operand size counts.
pub const IBV_EXP_QP_INIT_ATTR_ATOMICS_ARG: u32 = 1 << 5;
/// WAIT and ENABLE may be posted.
pub const IBV_EXP_QP_CREATE_CROSS_CHANNEL: u32 = 1 << 2;
/// Posting to the send queue enables nothing.
pub const IBV_EXP_QP_CREATE_MANAGED_SEND: u32 = 1 << 3;
/// Posting to the receive queue enables nothing.
pub const IBV_EXP_QP_CREATE_MANAGED_RECV: u32 = 1 << 4;
/// Posting may overwrite sends that were not executed.
pub const IBV_EXP_QP_CREATE_IGNORE_SQ_OVERFLOW: u32 = 1 << 6;
/// Posting may overwrite receives that were not taken.
pub const IBV_EXP_QP_CREATE_IGNORE_RQ_OVERFLOW: u32 = 1 << 7;
/// The flags of a completion queue count.
pub const IBV_EXP_CQ_INIT_ATTR_FLAGS: u32 = 1;
/// Its completions may be waited for, as may those of all.
pub const IBV_EXP_CQ_CREATE_CROSS_CHANNEL: u32 = 1;
/// The attribute of moderation.
pub const IBV_EXP_CQ_MODERATION: u32 = 1;
/// The attribute of capabilities.
pub const IBV_EXP_CQ_CAP_FLAGS: u32 = 1 << 1;
/// Completions displace the oldest.
pub const IBV_EXP_CQ_IGNORE_OVERRUN: u32 = 1;
/// A task with receives.
pub const IBV_EXP_TASK_RECV: u32 = 1;
/// A queue pair.
pub const TERRACE_DV_OBJ_QP: u64 = 1;
/// A completion queue.
pub const TERRACE_DV_OBJ_CQ: u64 = 1 << 1;

/// `task.cqe_wait`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExpWait {
    pub cq: *mut ibv_cq,
    pub cq_count: i32,
}

/// `task.wqe_enable`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExpEnable {
    pub qp: *mut ibv_qp,
    pub wqe_count: i32,
}

/// `task`.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ExpTaskArgument {
    pub cqe_wait: ExpWait,
    pub wqe_enable: ExpEnable,
}

/// `struct ibv_exp_cmp_swap`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExpCompareSwap {
    pub compare_mask: u64,
    pub compare_val: u64,
    pub swap_val: u64,
    pub swap_mask: u64,
}

/// `struct ibv_exp_fetch_add`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExpFetchAdd {
    pub add_val: u64,
    pub field_boundary: u64,
}

/// `wr_data.inline_data.op`.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ExpOperands {
    pub cmp_swap: ExpCompareSwap,
    pub fetch_add: ExpFetchAdd,
}

/// `ext_op.masked_atomics`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ExpMaskedAtomics {
    pub log_arg_sz: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub operands: ExpOperands,
}

/// `struct ibv_exp_send_wr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_exp_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_exp_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub exp_opcode: u32,
    pub reserved: c_int,
    /// Immediate data, or a key to invalidate.
    pub ex: u32,
    /// As in `struct ibv_send_wr`.
    pub wr: ibv_send_wr__bindgen_ty_2,
    pub task: ExpTaskArgument,
    pub exp_send_flags: u64,
    pub comp_mask: u32,
    pub masked_atomics: ExpMaskedAtomics,
}

/// `struct ibv_exp_qp_init_attr`. The first fields are those of `struct ibv_qp_init_attr`, whose padding `comp_mask` is in.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_exp_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: ibv_qp_type,
    pub sq_sig_all: c_int,
    pub comp_mask: u32,
    pub pd: *mut ibv_pd,
    pub exp_create_flags: u32,
    pub max_atomic_arg: u32,
}

/// `struct ibv_exp_cq_init_attr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_exp_cq_init_attr {
    pub comp_mask: u32,
    pub flags: u32,
}

/// `struct ibv_exp_cq_attr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_exp_cq_attr {
    pub comp_mask: u32,
    pub cq_count: u16,
    pub cq_period: u16,
    pub cq_cap_flags: u32,
}

/// The work requests of a task.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ExpTaskList {
    pub send_wr: *mut ibv_exp_send_wr,
    pub recv_wr: *mut ibv_recv_wr,
}

/// `struct ibv_exp_task`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_exp_task {
    pub task_type: u32,
    pub qp: *mut ibv_qp,
    pub list: ExpTaskList,
    pub next: *mut ibv_exp_task,
    pub comp_mask: u32,
}

/// `struct terrace_dv_queue`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct terrace_dv_queue {
    pub buf: *mut c_void,
    pub wqe_cnt: u32,
    pub stride: u32,
}

/// `struct terrace_dv_qp`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct terrace_dv_qp {
    pub dbrec: *mut u32,
    pub sq: terrace_dv_queue,
    pub rq: terrace_dv_queue,
}

/// `struct terrace_dv_cq`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct terrace_dv_cq {
    pub cqn: u32,
    pub cqe_cnt: u32,
}

/// `struct terrace_dv_obj`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct terrace_dv_obj {
    pub qp_in: *mut ibv_qp,
    pub qp_out: *mut terrace_dv_qp,
    pub cq_in: *mut ibv_cq,
    pub cq_out: *mut terrace_dv_cq,
}
