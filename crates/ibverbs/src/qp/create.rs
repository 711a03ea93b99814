//! Creating, opening and destroying queue pairs.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use terrace_nic::{QPN_INSTANCE_SHIFT, QpCap, QpInit, QpType, QueuePair};
use terrace_sync::Mutex;

use super::builder::Builder;
use super::convert::PostLimits;
use super::cross_channel::CrossChannel;
use super::query_only::QueryOnly;
use super::{QpObject, capacities, wr};
use crate::abi::newer::QpEx;
use crate::abi::{
    IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, IBV_QP_INIT_ATTR_CREATE_FLAGS, IBV_QP_INIT_ATTR_PD,
    IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, IBV_QP_INIT_ATTR_XRCD, IBV_QP_OPEN_ATTR_CONTEXT, IBV_QP_OPEN_ATTR_NUM,
    IBV_QP_OPEN_ATTR_RESERVED, IBV_QP_OPEN_ATTR_TYPE, IBV_QP_OPEN_ATTR_XRCD, IBV_QPT_DRIVER,
    IBV_QPT_RAW_PACKET, IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_RECV, IBV_QPT_XRC_SEND, ibv_context,
    ibv_cq, ibv_pd, ibv_qp, ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_qp_open_attr, ibv_qp_type, ibv_srq,
    ibv_xrcd,
};
use crate::context::Context;
use crate::cq;
use crate::errno::{EINVAL, EOPNOTSUPP, Result, pointer, status};
use crate::extended_poll::ExtendedPoll;
use crate::object::{self, Allocation, CPart, borrow, retire};
use crate::pd::{PdObject, Use};
use crate::srq::SrqObject;
use crate::xrcd::XrcdObject;
use crate::{np, room};

fn kind(qp_type: ibv_qp_type) -> Result<QpType> {
    match qp_type {
        IBV_QPT_RC => Ok(QpType::Rc),
        IBV_QPT_UC => Ok(QpType::Uc),
        IBV_QPT_UD => Ok(QpType::Ud),
        IBV_QPT_XRC_SEND => Ok(QpType::XrcSend),
        IBV_QPT_XRC_RECV => Ok(QpType::XrcRecv),
        IBV_QPT_RAW_PACKET | IBV_QPT_DRIVER => Err(EOPNOTSUPP),
        _ => Err(EINVAL),
    }
}

/// What `ibv_create_qp_ex` asks for beside the plain attributes.
#[derive(Default)]
struct ExtendedAttributes {
    send_ops: Option<u64>,
    blocks_own_multicast: bool,
    /// Creation flags of `ibv_exp_create_qp`, for work queues in memory.
    cross_channel: Option<u32>,
}

/// Creates a queue pair; with creation flags of `ibv_exp_create_qp`, one whose work queues are in memory.
///
/// # Safety
/// As for `ibv_create_qp`.
pub(super) unsafe fn create_cross_channel(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
    flags: Option<u32>,
) -> Result<*mut ibv_qp> {
    let extended = ExtendedAttributes { cross_channel: flags, ..ExtendedAttributes::default() };
    // SAFETY: the caller's.
    unsafe { create(pd, attr, extended) }
}

/// # Safety
/// `pd` is null or a protection domain; `attr` is null or writable attributes with this library's objects.
unsafe fn create(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
    extended: ExtendedAttributes,
) -> Result<*mut ibv_qp> {
    // SAFETY: the caller's.
    let (domain, init) = unsafe { (borrow::<PdObject>(pd)?, object::read(attr)?) };
    let qp_type = kind(init.qp_type)?;
    let builder = extended.send_ops.map(|wanted| Builder::new(qp_type, wanted)).transpose()?;
    // Receive attributes of an initiator are ignored, as in the kernel.
    let receives = qp_type.has_receives();
    let (recv_cq, srq) = if receives { (init.recv_cq, init.srq) } else { (null_mut(), null_mut()) };
    room::for_object()?;
    let slot = Allocation::<QpObject>::new();
    // SAFETY: the caller's.
    let send = unsafe { cq::from_arguments(init.send_cq)? };
    let recv = match receives {
        // SAFETY: the caller's.
        true => unsafe { cq::from_arguments(recv_cq)? },
        false => send,
    };
    let polls = [send, recv].map(|queue| queue.extended.clone());
    let mut cap = capacities::from_c(&init.cap);
    if extended.cross_channel.is_some() {
        // The executor needs room for a request, also that of a queue pair that only receives.
        cap.max_send_wr = cap.max_send_wr.max(1);
    }
    let request = QpInit {
        qp_type,
        recv_cq: recv.cq().clone(),
        send_cq: send.cq().clone(),
        // SAFETY: the caller's; null means none.
        srq: unsafe { borrow::<SrqObject>(srq) }.ok().map(|srq| srq.srq().clone()),
        cap,
        sq_sig_all: init.sq_sig_all != 0,
        blocks_own_multicast: extended.blocks_own_multicast,
        raises_events: true,
        cookie: slot.as_c() as u64,
    };
    let cross_channel = extended
        .cross_channel
        .map(|flags| CrossChannel::new(domain.pd(), &request.cap, request.srq.is_some(), flags))
        .transpose()?
        .map(Box::new);
    let parts = Parts {
        qp: match &cross_channel {
            None => domain.pd().create_qp(request)?,
            Some(queues) => domain.pd().create_qp_in_memory(request, queues.queues())?,
        },
        cross_channel,
        context: domain.context().clone(),
        domain: domain.in_use(),
        query_only: Arc::default(),
        builder,
        polls,
    };
    if parts.cross_channel.is_none() {
        np::manage(parts.context.device(), &parts.qp);
    }
    // SAFETY: the caller's: the granted sizes are returned.
    unsafe { (*attr).cap = capacities::to_c(parts.qp.cap()) };
    let attributes = PublicAttributes {
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq,
        srq,
        qp_type: init.qp_type,
    };
    Ok(publish(slot, &attributes, parts))
}

/// The private parts of a new object.
struct Parts {
    qp: Arc<QueuePair>,
    context: Arc<Context>,
    domain: Use,
    query_only: Arc<Mutex<QueryOnly>>,
    builder: Option<Builder>,
    cross_channel: Option<Box<CrossChannel>>,
    polls: [Option<Arc<ExtendedPoll>>; 2],
}

/// The program's attributes of a queue pair.
struct PublicAttributes {
    qp_context: *mut c_void,
    pd: *mut ibv_pd,
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    qp_type: ibv_qp_type,
}

fn publish(slot: Allocation<QpObject>, attributes: &PublicAttributes, parts: Parts) -> *mut ibv_qp {
    let granted = parts.qp.cap();
    let limits = PostLimits {
        send_sges: granted.max_send_sge,
        recv_sges: granted.max_recv_sge,
        inline_bytes: granted.max_inline_data,
        sends: granted.max_send_wr,
    };
    let object = QpObject {
        c: CPart::new(describe(attributes, &parts)),
        context: parts.context,
        qp: parts.qp,
        limits,
        polls: parts.polls,
        query_only: parts.query_only,
        builder: parts.builder,
        cross_channel: parts.cross_channel,
        _domain: parts.domain,
    };
    slot.publish(object).cast()
}

fn describe(attributes: &PublicAttributes, parts: &Parts) -> QpEx {
    // SAFETY: integers, pointers, optional functions, and the pthread objects set below.
    let mut c: QpEx = unsafe { object::zeroed() };
    let base = &mut c.base.qp_base;
    base.context = parts.context.as_c();
    base.qp_context = attributes.qp_context;
    base.pd = attributes.pd;
    (base.send_cq, base.recv_cq, base.srq) = (attributes.send_cq, attributes.recv_cq, attributes.srq);
    base.handle = parts.context.new_handle();
    base.qp_num = parts.qp.qpn();
    base.state = parts.qp.state() as u32;
    base.qp_type = attributes.qp_type;
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    if parts.builder.is_some() {
        wr::install(&mut c);
    }
    c
}

/// Creates an XRC target, or another handle of the target with this number.
///
/// A target needs no protection domain, but the program finds the one that it gave: librdmacm takes it from there.
///
/// # Safety
/// `xrcd` is null or an XRC domain.
unsafe fn target(
    xrcd: *mut ibv_xrcd,
    qpn: Option<u32>,
    qp_context: *mut c_void,
    pd: *mut ibv_pd,
) -> Result<*mut ibv_qp> {
    // SAFETY: the caller's.
    let domain = unsafe { borrow::<XrcdObject>(xrcd)? };
    room::for_object()?;
    let slot = Allocation::<QpObject>::new();
    let cookie = slot.as_c() as u64;
    let qp = match qpn {
        None => domain.xrcd().create_target(cookie)?,
        Some(qpn) => domain.xrcd().open_target(qpn, cookie)?,
    };
    let parts = Parts {
        context: domain.context().clone(),
        domain: domain.in_use(),
        query_only: domain.query_only(qp.qpn()),
        builder: None,
        cross_channel: None,
        polls: [None, None],
        qp,
    };
    let attributes = PublicAttributes {
        qp_context,
        pd,
        send_cq: null_mut(),
        recv_cq: null_mut(),
        srq: null_mut(),
        qp_type: IBV_QPT_XRC_RECV,
    };
    Ok(publish(slot, &attributes, parts))
}

/// `ibv_open_qp(3)`: another handle of an XRC target, which exists until all handles are destroyed.
///
/// # Safety
/// `context` is null or open; `attr` is null or attributes with this library's objects.
pub unsafe extern "C" fn open_qp(context: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp {
    let open = || {
        // SAFETY: the caller's.
        let (context, attr) = unsafe { (Context::borrow(context)?, object::read(attr)?) };
        if attr.comp_mask >= IBV_QP_OPEN_ATTR_RESERVED {
            return Err(EOPNOTSUPP);
        }
        let has = |bits| attr.comp_mask & bits == bits;
        let needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
        if !has(needed) || attr.qp_type != IBV_QPT_XRC_RECV {
            return Err(EINVAL);
        }
        if attr.qp_num >> QPN_INSTANCE_SHIFT != u32::from(context.device().instance()) {
            tracing::warn!(
                qpn = attr.qp_num,
                "ibv_open_qp: the queue pair is not of this context; targets of XRC are not shared with other \
                 processes, nor between contexts"
            );
            return Err(EOPNOTSUPP);
        }
        let qp_context = if has(IBV_QP_OPEN_ATTR_CONTEXT) { attr.qp_context } else { null_mut() };
        // SAFETY: the caller's.
        unsafe { target(attr.xrcd, Some(attr.qp_num), qp_context, null_mut()) }
    };
    pointer(open())
}

/// `ibv_create_qp(3)`.
///
/// # Safety
/// `pd` is null or a protection domain; `attr` is null or writable attributes with this library's objects.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller's.
    pointer(unsafe { create(pd, attr, ExtendedAttributes::default()) })
}

/// `ibv_create_qp_ex(3)`.
///
/// # Safety
/// `context` is null or open; `attr` is null or writable attributes with this library's objects.
pub unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    let create = || {
        // SAFETY: the caller's.
        let (_, init) = unsafe { (Context::borrow(context)?, object::read(attr)?) };
        let qp_type = kind(init.qp_type)?;
        let has = |bit| init.comp_mask & bit != 0;
        let known = IBV_QP_INIT_ATTR_PD
            | IBV_QP_INIT_ATTR_XRCD
            | IBV_QP_INIT_ATTR_CREATE_FLAGS
            | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        let flags = if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) { init.create_flags } else { 0 };
        let blocks_own_multicast = flags == IBV_QP_CREATE_BLOCK_SELF_MCAST_LB && qp_type == QpType::Ud;
        if init.comp_mask & !known != 0 || (flags != 0 && !blocks_own_multicast) {
            return Err(EOPNOTSUPP);
        }
        let send_ops = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(init.send_ops_flags);
        if qp_type == QpType::XrcRecv {
            if !has(IBV_QP_INIT_ATTR_XRCD) {
                return Err(EINVAL);
            }
            if send_ops.is_some_and(|wanted| wanted != 0) {
                return Err(EOPNOTSUPP);
            }
            let pd = if has(IBV_QP_INIT_ATTR_PD) { init.pd } else { null_mut() };
            // SAFETY: the caller's: the granted sizes are returned, which are 0.
            unsafe { (*attr).cap = capacities::to_c(QpCap::default()) };
            // SAFETY: the caller's.
            return unsafe { target(init.xrcd, None, init.qp_context, pd) };
        }
        if !has(IBV_QP_INIT_ATTR_PD) {
            return Err(EINVAL);
        }
        // SAFETY: the caller's; the extended attributes begin with the plain ones.
        unsafe {
            create(
                init.pd,
                attr.cast(),
                ExtendedAttributes { send_ops, blocks_own_multicast, cross_channel: None },
            )
        }
    };
    pointer(create())
}

/// `ibv_destroy_qp(3)`: waits until its events are acknowledged. EBUSY if another process of the host does not finish
/// an access through the queue pair. An XRC target exists while it has other handles.
///
/// # Safety
/// `qp` is null or a queue pair.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let destroy = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<QpObject>(qp.cast())? };
        // The queue pair is not changed before its readers have left, so an error leaves it unchanged.
        object.qp.withdraw();
        object.qp.await_readers()?;
        object.qp.release(qp as u64)?;
        object.drop_prefetched_completions();
        // SAFETY: the NIC no longer refers to it.
        unsafe { retire::<QpObject>(qp.cast()) };
        Ok(())
    };
    status(destroy())
}

impl QpObject {
    /// Drops the queue pair's completions that extended polls have prefetched, like those in the queue.
    pub(super) fn drop_prefetched_completions(&self) {
        let qpn = self.qp.qpn();
        self.polls.iter().flatten().for_each(|poll| poll.purge(|wc| wc.qpn == qpn));
    }
}
