//! Creating cross-channel queue pairs and completion queues.

use std::ffi::{c_int, c_void};

use super::super::create::create_cross_channel;
use crate::abi::cross_channel::*;
use crate::abi::{ibv_comp_channel, ibv_context, ibv_cq, ibv_qp};
use crate::context::Context;
use crate::cq::{self, CqObject};
use crate::errno::{EINVAL, EOPNOTSUPP, Result, pointer, status};
use crate::object;

/// Operand size of masked operations at most, in bytes.
const OPERAND_BYTES: u32 = 8;

/// `ibv_exp_create_qp`: without creation flags as `ibv_create_qp(3)`; EOPNOTSUPP for attributes beyond those in the header.
///
/// # Safety
/// `context` is null or open; `attr` is null or writable attributes with this library's objects.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_exp_create_qp(
    context: *mut ibv_context,
    attr: *mut ibv_exp_qp_init_attr,
) -> *mut ibv_qp {
    let create = || {
        // SAFETY: the caller's.
        let (_, init) = unsafe { (Context::borrow(context)?, object::read(attr)?) };
        let has = |bit| init.comp_mask & bit != 0;
        let known =
            IBV_EXP_QP_INIT_ATTR_PD | IBV_EXP_QP_INIT_ATTR_CREATE_FLAGS | IBV_EXP_QP_INIT_ATTR_ATOMICS_ARG;
        let flags = if has(IBV_EXP_QP_INIT_ATTR_CREATE_FLAGS) { init.exp_create_flags } else { 0 };
        let managed = IBV_EXP_QP_CREATE_MANAGED_SEND | IBV_EXP_QP_CREATE_MANAGED_RECV;
        let known_flags = IBV_EXP_QP_CREATE_CROSS_CHANNEL
            | managed
            | IBV_EXP_QP_CREATE_IGNORE_SQ_OVERFLOW
            | IBV_EXP_QP_CREATE_IGNORE_RQ_OVERFLOW;
        if init.comp_mask & !known != 0
            || flags & !known_flags != 0
            || has(IBV_EXP_QP_INIT_ATTR_ATOMICS_ARG) && init.max_atomic_arg > OPERAND_BYTES
        {
            return Err(EOPNOTSUPP);
        }
        if !has(IBV_EXP_QP_INIT_ATTR_PD) {
            return Err(EINVAL);
        }
        let is_in_memory = flags & (IBV_EXP_QP_CREATE_CROSS_CHANNEL | managed) != 0;
        // SAFETY: the caller's; the attributes begin with the plain ones.
        unsafe { create_cross_channel(init.pd, attr.cast(), is_in_memory.then_some(flags)) }
    };
    pointer(create())
}

/// `ibv_exp_create_cq`: as `ibv_create_cq(3)`. Completions of every queue may be waited for.
///
/// # Safety
/// `context` is null or open, `channel` null or a channel, `attr` null or attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_exp_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
    attr: *mut ibv_exp_cq_init_attr,
) -> *mut ibv_cq {
    // SAFETY: the caller's.
    let flags = match unsafe { object::read(attr) } {
        Ok(attr) if attr.comp_mask & IBV_EXP_CQ_INIT_ATTR_FLAGS != 0 => attr.flags,
        _ => 0,
    };
    if flags & !IBV_EXP_CQ_CREATE_CROSS_CHANNEL != 0 {
        return pointer(Err(EOPNOTSUPP));
    }
    // SAFETY: the caller's.
    unsafe { cq::ibv_create_cq(context, entries, cq_context, channel, vector) }
}

/// `ibv_exp_modify_cq`.
///
/// # Safety
/// `cq` is null or a completion queue, `attr` null or attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_exp_modify_cq(
    cq: *mut ibv_cq,
    attr: *mut ibv_exp_cq_attr,
    mask: c_int,
) -> c_int {
    let modify = || -> Result<()> {
        // SAFETY: the caller's.
        let (queue, attr) = unsafe { (object::borrow::<CqObject>(cq.cast())?, object::read(attr)?) };
        let mask = mask as u32;
        let has_flags = mask & IBV_EXP_CQ_CAP_FLAGS != 0;
        if mask & !(IBV_EXP_CQ_MODERATION | IBV_EXP_CQ_CAP_FLAGS) != 0
            || has_flags && attr.cq_cap_flags & !IBV_EXP_CQ_IGNORE_OVERRUN != 0
        {
            return Err(EINVAL);
        }
        if has_flags && attr.cq_cap_flags & IBV_EXP_CQ_IGNORE_OVERRUN != 0 {
            queue.cq().ignore_overrun();
        }
        Ok(())
    };
    status(modify())
}
