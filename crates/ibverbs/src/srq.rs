//! Shared receive queues.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use terrace_nic::{Srq, SrqInit};

use crate::abi::{
    IBV_SRQ_INIT_ATTR_CQ, IBV_SRQ_INIT_ATTR_PD, IBV_SRQ_INIT_ATTR_TYPE, IBV_SRQ_INIT_ATTR_XRCD,
    IBV_SRQ_LIMIT, IBV_SRQ_MAX_WR, IBV_SRQT_BASIC, IBV_SRQT_XRC, ibv_context, ibv_pd, ibv_recv_wr, ibv_srq,
    ibv_srq_attr, ibv_srq_init_attr, ibv_srq_init_attr_ex,
};
use crate::context::Context;
use crate::cq::{self, CqObject};
use crate::errno::{EINVAL, EOPNOTSUPP, Result, pointer, status};
use crate::extended_poll::ExtendedPoll;
use crate::object::{self, Allocation, CPart, Object, borrow, retire};
use crate::pd::{PdObject, Use};
use crate::qp::post;
use crate::room;
use crate::xrcd::XrcdObject;

/// `ibv_srq`.
#[repr(C)]
pub struct SrqObject {
    c: CPart<ibv_srq>,
    _context: Arc<Context>,
    srq: Arc<Srq>,
    max_sge: u32,
    _pd: Use,
    /// The XRC domain of an XRC queue.
    _xrcd: Option<Use>,
    /// The extended poll of an XRC queue's completion queue.
    poll: Option<Arc<ExtendedPoll>>,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for SrqObject {
    type C = ibv_srq;
}

impl SrqObject {
    /// The NIC's shared receive queue.
    pub fn srq(&self) -> &Arc<Srq> {
        &self.srq
    }
}

/// The additional attributes of an XRC shared receive queue.
struct Extended<'a> {
    xrcd: &'a XrcdObject,
    cq: &'a CqObject,
}

/// # Safety
/// `pd` is null or a protection domain, `attr` null or writable attributes.
unsafe fn create(
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
    extended: Option<Extended<'_>>,
) -> Result<*mut ibv_srq> {
    // SAFETY: the caller's.
    let (domain, init) = unsafe { (borrow::<PdObject>(pd)?, object::read(attr)?) };
    room::for_object()?;
    let slot = Allocation::<SrqObject>::new();
    // Only ibv_modify_srq arms the limit.
    let (max_wr, max_sge) = (init.attr.max_wr, init.attr.max_sge);
    let request = SrqInit { max_wr, max_sge, limit: 0, cookie: slot.as_c() as u64 };
    let srq = match &extended {
        None => domain.pd().create_srq(request)?,
        Some(Extended { xrcd, cq }) => domain.pd().create_xrc_srq(request, xrcd.xrcd(), cq.cq())?,
    };
    let granted = srq.query();
    let context = domain.context().clone();
    let c = ibv_srq {
        context: context.as_c(),
        srq_context: init.srq_context,
        pd,
        handle: context.new_handle(),
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    // SAFETY: the caller's: the granted attributes are returned.
    unsafe { ((*attr).attr.max_wr, (*attr).attr.max_sge) = (granted.max_wr, granted.max_sge) };
    let (max_sge, c, in_use) = (granted.max_sge, CPart::new(c), domain.in_use());
    let poll = extended.as_ref().and_then(|extended| extended.cq.extended.clone());
    let xrcd = extended.map(|extended| extended.xrcd.in_use());
    Ok(slot.publish(SrqObject { c, _context: context, srq, max_sge, _pd: in_use, _xrcd: xrcd, poll }))
}

/// `ibv_create_srq(3)`.
///
/// # Safety
/// `pd` is null or a protection domain, `attr` null or writable attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the caller's.
    pointer(unsafe { create(pd, attr, None) })
}

/// `ibv_create_srq_ex(3)`: basic and XRC queues (no tag matching).
///
/// # Safety
/// `context` is null or open, `attr` null or writable attributes.
pub unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    let create = || {
        // SAFETY: the caller's.
        let (_, init) = unsafe { (Context::borrow(context)?, object::read(attr)?) };
        let has = |bits| init.comp_mask & bits == bits;
        let srq_type = if has(IBV_SRQ_INIT_ATTR_TYPE) { init.srq_type } else { IBV_SRQT_BASIC };
        let of_xrc = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
        let mut known = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
        if srq_type == IBV_SRQT_XRC {
            known |= of_xrc;
        }
        if !matches!(srq_type, IBV_SRQT_BASIC | IBV_SRQT_XRC) || init.comp_mask & !known != 0 {
            return Err(EOPNOTSUPP);
        }
        if !has(IBV_SRQ_INIT_ATTR_PD) || (srq_type == IBV_SRQT_XRC && !has(of_xrc)) {
            return Err(EINVAL);
        }
        let extended = match srq_type {
            IBV_SRQT_XRC => {
                // SAFETY: the caller's.
                let (xrcd, cq) = unsafe { (borrow::<XrcdObject>(init.xrcd)?, cq::from_arguments(init.cq)?) };
                Some(Extended { xrcd, cq })
            }
            _ => None,
        };
        // SAFETY: the caller's; the extended attributes begin with the plain ones.
        unsafe { create(init.pd, attr.cast(), extended) }
    };
    pointer(create())
}

/// `ibv_get_srq_num(3)`.
///
/// # Safety
/// `srq` is null or a shared receive queue, `number` null or writable.
pub unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: the caller's.
    status(
        unsafe { borrow::<SrqObject>(srq) }
            .and_then(|object| unsafe { object::write(number, object.srq.number()) }),
    )
}

/// `ibv_modify_srq(3)`.
///
/// # Safety
/// `srq` is null or a shared receive queue, `attr` null or attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    let modify = || {
        // SAFETY: the caller's.
        let (object, attr) = unsafe { (borrow::<SrqObject>(srq)?, object::read(attr)?) };
        let mask = mask as c_uint;
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(EINVAL);
        }
        let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        Ok(object.srq.modify(max_wr, limit)?)
    };
    status(modify())
}

/// `ibv_query_srq(3)`.
///
/// # Safety
/// `srq` is null or a shared receive queue, `attr` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    let query = || {
        // SAFETY: the caller's.
        let now = unsafe { borrow::<SrqObject>(srq)? }.srq.query();
        let answer = ibv_srq_attr { max_wr: now.max_wr, max_sge: now.max_sge, srq_limit: now.limit };
        // SAFETY: the caller's.
        unsafe { object::write(attr, answer) }
    };
    status(query())
}

/// `ibv_destroy_srq(3)`: EBUSY while queue pairs use the queue. XRC targets do not use it.
///
/// # Safety
/// `srq` is null or a shared receive queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    let destroy = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<SrqObject>(srq)? };
        object.srq.destroy()?;
        // Those that are still in the queue are gone by now.
        if let Some(poll) = &object.poll {
            let number = object.srq.number();
            poll.purge(|wc| wc.srqn == number);
        }
        // SAFETY: the NIC no longer refers to it.
        unsafe { retire::<SrqObject>(srq) };
        Ok(())
    };
    status(destroy())
}

/// `ibv_post_srq_recv(3)`.
///
/// # Safety
/// `srq` is null or a shared receive queue, `wr` a list of receives, `bad_wr` null or writable.
pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's.
    let Ok(object) = (unsafe { borrow::<SrqObject>(srq) }) else {
        // SAFETY: the caller's.
        return unsafe { post::report_first(bad_wr, wr, EINVAL) };
    };
    // SAFETY: the caller's.
    let posted = object.srq.post(unsafe { post::RecvList::new(wr, object.max_sge) });
    // SAFETY: the caller's.
    unsafe { post::report_recv(posted, wr, bad_wr) }
}
