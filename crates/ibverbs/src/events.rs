//! Asynchronous events.

use std::ffi::{c_int, c_void};

use terrace_nic::AsyncEvent;

use crate::abi::{
    IBV_EVENT_COMM_EST, IBV_EVENT_CQ_ERR, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL,
    IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SQ_DRAINED, IBV_EVENT_SRQ_LIMIT_REACHED,
    ibv_async_event, ibv_async_event__bindgen_ty_1, ibv_context, ibv_event_type,
};
use crate::context::Context;
use crate::cq::CqObject;
use crate::errno::{Result, minus_one};
use crate::object::{self, borrow};
use crate::qp::QpObject;
use crate::srq::SrqObject;

/// The object of an event. Every cookie is the object's C structure.
fn element(event: &AsyncEvent) -> ibv_async_event__bindgen_ty_1 {
    let object = |cookie: u64| ibv_async_event__bindgen_ty_1 { qp: (cookie as *mut c_void).cast() };
    match event {
        AsyncEvent::CqError(cq) => object(cq.cookie()),
        AsyncEvent::QpFatal(qp)
        | AsyncEvent::QpRequestError(qp)
        | AsyncEvent::QpAccessError(qp)
        | AsyncEvent::CommunicationEstablished(qp)
        | AsyncEvent::SqDrained(qp)
        | AsyncEvent::LastWqeReached(qp) => object(qp.cookie()),
        AsyncEvent::SrqLimitReached(srq) => object(srq.cookie()),
    }
}

/// `ibv_get_async_event(3)`: blocks unless the program made the descriptor non-blocking.
///
/// # Safety
/// `context` is null or open, `event` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    let get = || {
        // SAFETY: the caller's. The reference is kept, because the device may be closed during the wait.
        let context = unsafe { Context::share(context)? };
        let got = context.device().get_async_event()?;
        let answer = ibv_async_event { element: element(&got), event_type: got.code() };
        // SAFETY: the caller's.
        unsafe { object::write(event, answer) }
    };
    minus_one(get())
}

/// The NIC's event for an event that the program acknowledges; `None` for events that the NIC does not raise.
///
/// # Safety
/// `event` came from `ibv_get_async_event`, and its object still exists.
unsafe fn nic_event_of(event: &ibv_async_event) -> Result<Option<AsyncEvent>> {
    // SAFETY: the caller's: the type determines the object, and destroying an object waits for this call.
    let of_qp = |make: fn(_) -> AsyncEvent| unsafe {
        borrow::<QpObject>(event.element.qp.cast()).map(|object| Some(make(object.qp().clone())))
    };
    let kind: ibv_event_type = event.event_type;
    match kind {
        // SAFETY: as above.
        IBV_EVENT_CQ_ERR => unsafe {
            let object = borrow::<CqObject>(event.element.cq.cast())?;
            Ok(Some(AsyncEvent::CqError(object.cq().clone())))
        },
        IBV_EVENT_QP_FATAL => of_qp(AsyncEvent::QpFatal),
        IBV_EVENT_QP_REQ_ERR => of_qp(AsyncEvent::QpRequestError),
        IBV_EVENT_QP_ACCESS_ERR => of_qp(AsyncEvent::QpAccessError),
        IBV_EVENT_COMM_EST => of_qp(AsyncEvent::CommunicationEstablished),
        IBV_EVENT_SQ_DRAINED => of_qp(AsyncEvent::SqDrained),
        IBV_EVENT_QP_LAST_WQE_REACHED => of_qp(AsyncEvent::LastWqeReached),
        // SAFETY: as above.
        IBV_EVENT_SRQ_LIMIT_REACHED => unsafe {
            let object = borrow::<SrqObject>(event.element.srq)?;
            Ok(Some(AsyncEvent::SrqLimitReached(object.srq().clone())))
        },
        _ => Ok(None),
    }
}

/// `ibv_ack_async_event(3)`.
///
/// # Safety
/// `event` is null or came from `ibv_get_async_event`, and its object still exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller's.
    let event = unsafe { object::read(event).and_then(|event| nic_event_of(event)) };
    if let Ok(Some(event)) = event {
        event.ack();
    }
}
