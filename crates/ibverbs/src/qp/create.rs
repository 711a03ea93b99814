//! Creating and destroying queue pairs.

use std::ffi::c_int;
use std::sync::Arc;

use parking_lot::Mutex;
use terrace_nic::{QpCap, QpInit, QpType, QueuePair};

use super::builder::Builder;
use super::modify::Remembered;
use super::{PostLimits, QpObject};
use crate::abi::newer::QpEx;
use crate::abi::{
    IBV_QP_INIT_ATTR_CREATE_FLAGS, IBV_QP_INIT_ATTR_PD, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_QPS_RESET,
    IBV_QPT_DRIVER, IBV_QPT_RAW_PACKET, IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_RECV,
    IBV_QPT_XRC_SEND, ibv_context, ibv_pd, ibv_qp, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_init_attr_ex,
    ibv_qp_type,
};
use crate::context::Context;
use crate::cq;
use crate::errno::{EINVAL, EOPNOTSUPP, Result, pointer, status};
use crate::object::{self, CPart, Slot, borrow, retire};
use crate::pd::PdObject;
use crate::room;
use crate::srq::SrqObject;

fn kind(qp_type: ibv_qp_type) -> Result<QpType> {
    match qp_type {
        IBV_QPT_RC => Ok(QpType::Rc),
        IBV_QPT_UC => Ok(QpType::Uc),
        IBV_QPT_UD => Ok(QpType::Ud),
        IBV_QPT_RAW_PACKET | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV | IBV_QPT_DRIVER => Err(EOPNOTSUPP),
        _ => Err(EINVAL),
    }
}

/// C's sizes of the queues as ours.
fn cap(cap: &ibv_qp_cap) -> QpCap {
    QpCap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// Our sizes as C's.
pub fn c_cap(cap: QpCap) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// # Safety
/// `pd` is null or a protection domain; `attr` is null or attributes that may be written, naming objects of ours.
unsafe fn create(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr, send_ops: Option<u64>) -> Result<*mut ibv_qp> {
    // SAFETY: the caller's.
    let (domain, init) = unsafe { (borrow::<PdObject>(pd)?, object::read(attr)?) };
    let qp_type = kind(init.qp_type)?;
    let builder = send_ops.map(|wanted| Builder::new(qp_type, wanted)).transpose()?;
    room::for_object()?;
    let slot = Slot::<QpObject>::new();
    let request = QpInit {
        qp_type,
        // SAFETY: the caller's.
        send_cq: unsafe { cq::named(init.send_cq)? }.cq().clone(),
        // SAFETY: the caller's.
        recv_cq: unsafe { cq::named(init.recv_cq)? }.cq().clone(),
        // SAFETY: the caller's; null means none.
        srq: unsafe { borrow::<SrqObject>(init.srq) }.ok().map(|srq| srq.srq().clone()),
        cap: cap(&init.cap),
        sq_sig_all: init.sq_sig_all != 0,
        cookie: slot.as_c() as u64,
    };
    let qp = domain.pd().create_qp(request)?;
    let granted = qp.cap();
    let limits = PostLimits {
        send_sges: granted.max_send_sge,
        recv_sges: granted.max_recv_sge,
        inline_bytes: granted.max_inline_data,
        sends: granted.max_send_wr,
    };
    let context = domain.context().clone();
    let c = CPart::new(describe(&context, pd, init, &qp, builder.is_some()));
    let object = QpObject {
        c,
        context,
        qp,
        limits,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        remembered: Mutex::new(Remembered::default()),
        builder,
        _pd: domain.in_use(),
    };
    // SAFETY: the caller's: the sizes come back as granted.
    unsafe { (*attr).cap = c_cap(granted) };
    Ok(slot.publish(object).cast())
}

fn describe(
    context: &Arc<Context>,
    pd: *mut ibv_pd,
    init: &ibv_qp_init_attr,
    qp: &QueuePair,
    with_builder: bool,
) -> QpEx {
    // SAFETY: integers, pointers, optional functions, and the pthread objects set below.
    let mut c: QpEx = unsafe { object::zeroed() };
    let base = &mut c.base.qp_base;
    base.context = context.as_c();
    base.qp_context = init.qp_context;
    base.pd = pd;
    (base.send_cq, base.recv_cq, base.srq) = (init.send_cq, init.recv_cq, init.srq);
    base.handle = context.new_handle();
    base.qp_num = qp.qpn();
    base.state = IBV_QPS_RESET;
    base.qp_type = init.qp_type;
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    if with_builder {
        super::builder::install(&mut c);
    }
    c
}

/// `ibv_create_qp(3)`.
///
/// # Safety
/// `pd` is null or a protection domain; `attr` is null or attributes that may be written, naming objects of ours.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's.
    pointer(unsafe { create(pd, attr, None) })
}

/// `ibv_create_qp_ex(3)`.
///
/// # Safety
/// `context` is null or open; `attr` is null or attributes that may be written, naming objects of ours.
pub unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    let create = || {
        // SAFETY: the caller's.
        let (_, init) = unsafe { (Context::borrow(context)?, object::read(attr)?) };
        kind(init.qp_type)?;
        let has = |bit| init.comp_mask & bit != 0;
        let known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        if init.comp_mask & !known != 0 || (has(IBV_QP_INIT_ATTR_CREATE_FLAGS) && init.create_flags != 0) {
            return Err(EOPNOTSUPP);
        }
        if !has(IBV_QP_INIT_ATTR_PD) {
            return Err(EINVAL);
        }
        let send_ops = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(init.send_ops_flags);
        // SAFETY: the caller's; the extended attributes begin with the plain ones.
        unsafe { create(init.pd, attr.cast(), send_ops) }
    };
    pointer(create())
}

/// `ibv_destroy_qp(3)`: waits until its events are acknowledged.
///
/// # Safety
/// `qp` is null or a queue pair.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let destroy = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<QpObject>(qp.cast())? };
        object.qp.destroy()?;
        object.forget_completions();
        // SAFETY: the NIC knows it no more.
        unsafe { retire::<QpObject>(qp.cast()) };
        Ok(())
    };
    status(destroy())
}

impl QpObject {
    /// Completions that extended polls took ahead of the program go away with the queue pair's others.
    pub(super) fn forget_completions(&self) {
        for queue in [self.send_cq, self.recv_cq] {
            // SAFETY: completion queues outlive their queue pairs: destroying one that is in use is refused.
            if let Ok(object) = unsafe { cq::named(queue) }
                && let Some(poll) = &object.extended
            {
                poll.purge(self.qp.qpn());
            }
        }
    }
}
