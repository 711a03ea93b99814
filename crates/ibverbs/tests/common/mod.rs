//! The verbs as a C program calls them, on an open device of the loopback address.

// Each test file uses a part of this module.
#![allow(dead_code, clippy::missing_safety_doc)]

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

// The symbols below are this library's. Its name makes the linker include it.
use terrace_ibverbs as _;
use terrace_ibverbs::abi::terrace::terrace_append_wr;
use terrace_ibverbs::abi::*;

unsafe extern "C" {
    pub fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device;
    pub fn ibv_free_device_list(list: *mut *mut ibv_device);
    pub fn ibv_get_device_guid(device: *mut ibv_device) -> u64;
    pub fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    pub fn ibv_close_device(context: *mut ibv_context) -> c_int;
    pub fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    pub fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    pub fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
    pub fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    pub fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    pub fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
    pub fn ibv_rereg_mr(
        mr: *mut ibv_mr,
        flags: c_int,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> c_int;
    pub fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
    pub fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    pub fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    pub fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel,
        cq: *mut *mut ibv_cq,
        context: *mut *mut c_void,
    ) -> c_int;
    pub fn ibv_create_cq(
        context: *mut ibv_context,
        entries: c_int,
        cq_context: *mut c_void,
        channel: *mut ibv_comp_channel,
        vector: c_int,
    ) -> *mut ibv_cq;
    pub fn ibv_resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int;
    pub fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    pub fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
    pub fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int;
    pub fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
    pub fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    pub fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    pub fn ibv_query_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        mask: c_int,
        init: *mut ibv_qp_init_attr,
    ) -> c_int;
    pub fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    pub fn terrace_bind_file(pd: *mut ibv_pd, fd: c_int, access: c_int) -> *mut ibv_mr;
    pub fn terrace_post_append(
        qp: *mut ibv_qp,
        wr: *mut terrace_append_wr,
        bad: *mut *mut terrace_append_wr,
    ) -> c_int;
    pub fn terrace_post_write_commit(
        qp: *mut ibv_qp,
        wr: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
    ) -> c_int;
    pub fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
    pub fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    pub fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
    pub fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
    pub fn ibv_ack_async_event(event: *mut ibv_async_event);
    pub fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint);
    pub fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        capacity: usize,
        flags: u32,
        size: usize,
    ) -> isize;
}

/// A C structure with every byte zero.
pub fn zero<T>() -> T {
    // SAFETY: used for C structures only.
    unsafe { std::mem::zeroed() }
}

/// The thread's `errno`.
pub fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// An open device.
pub fn open() -> *mut ibv_context {
    static ADDRESS: std::sync::Once = std::sync::Once::new();
    // SAFETY: every test calls this first, so no thread reads the environment at the same time.
    ADDRESS.call_once(|| unsafe { std::env::set_var("TERRACE_ADDR", "127.0.0.1") });
    // SAFETY: as in the man pages.
    unsafe {
        let list = ibv_get_device_list(null_mut());
        let context = ibv_open_device(*list);
        assert!(!context.is_null(), "errno {}", errno());
        ibv_free_device_list(list);
        context
    }
}

/// The extended functions of an open device.
pub fn verbs(context: *mut ibv_context) -> verbs_context {
    let offset = std::mem::offset_of!(verbs_context, context);
    // SAFETY: the context is the last field of that structure.
    unsafe { context.wrapping_byte_sub(offset).cast::<verbs_context>().read() }
}

/// The plain functions of an open device.
pub fn ops(context: *mut ibv_context) -> ibv_context_ops {
    // SAFETY: an open device.
    unsafe { (*context).ops }
}

/// Attributes of a queue pair of this type with ten work requests in each queue.
pub fn qp_init(cq: *mut ibv_cq, qp_type: ibv_qp_type) -> ibv_qp_init_attr {
    let cap = ibv_qp_cap {
        max_send_wr: 10,
        max_recv_wr: 10,
        max_send_sge: 2,
        max_recv_sge: 2,
        max_inline_data: 16,
    };
    let (qp_context, srq) = (null_mut(), null_mut());
    ibv_qp_init_attr { qp_context, send_cq: cq, recv_cq: cq, srq, cap, qp_type, sq_sig_all: 1 }
}

/// Brings a queue pair to RTS, connected to the given queue pair number (its own for loopback).
///
/// # Safety
/// `qp` is an RC queue pair.
pub unsafe fn connect(qp: *mut ibv_qp, peer: u32) {
    let mut attr: ibv_qp_attr = zero();
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    // SAFETY: the caller's.
    assert_eq!(unsafe { ibv_modify_qp(qp, &raw mut attr, init as c_int) }, 0);
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer;
    (attr.max_dest_rd_atomic, attr.max_rd_atomic, attr.min_rnr_timer) = (4, 4, 12);
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = ibv_gid { raw: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1] };
    let rtr = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    // SAFETY: the caller's.
    assert_eq!(unsafe { ibv_modify_qp(qp, &raw mut attr, rtr as c_int) }, 0);
    attr.qp_state = IBV_QPS_RTS;
    (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (14, 7, 7);
    let rts = IBV_QP_STATE
        | IBV_QP_SQ_PSN
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_MAX_QP_RD_ATOMIC;
    // SAFETY: the caller's.
    assert_eq!(unsafe { ibv_modify_qp(qp, &raw mut attr, rts as c_int) }, 0);
}

/// Waits for one completion.
pub fn completion(context: *mut ibv_context, cq: *mut ibv_cq) -> ibv_wc {
    let poll = ops(context).poll_cq.unwrap();
    let mut wc: ibv_wc = zero();
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        // SAFETY: a completion queue and room for one entry.
        if unsafe { poll(cq, 1, &raw mut wc) } > 0 {
            return wc;
        }
    }
    panic!("no completion");
}
