//! Where the queues of cross-channel queue pairs are (`infiniband/terrace_dv.h`).

use std::ffi::c_int;
use std::ptr::null_mut;

use terrace_nic::WorkQueueInit;

use super::super::QpObject;
use crate::abi::cross_channel::{
    TERRACE_DV_OBJ_CQ, TERRACE_DV_OBJ_QP, terrace_dv_cq, terrace_dv_obj, terrace_dv_qp, terrace_dv_queue,
};
use crate::cq::CqObject;
use crate::errno::{EINVAL, EOPNOTSUPP, Result, status};
use crate::object;

fn queue(init: Option<WorkQueueInit>) -> terrace_dv_queue {
    match init {
        Some(init) => terrace_dv_queue { buf: init.addr as *mut _, wqe_cnt: init.len, stride: init.stride },
        None => terrace_dv_queue { buf: null_mut(), wqe_cnt: 0, stride: 0 },
    }
}

/// `terrace_dv_init_obj`.
///
/// # Safety
/// `obj` is null or has, for each bit in `types`, an object of this library or null, and a place for the answer or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_dv_init_obj(obj: *mut terrace_dv_obj, types: u64) -> c_int {
    let init = || -> Result<()> {
        // SAFETY: the caller's.
        let obj = unsafe { object::read(obj)? };
        if types & !(TERRACE_DV_OBJ_QP | TERRACE_DV_OBJ_CQ) != 0 {
            return Err(EINVAL);
        }
        if types & TERRACE_DV_OBJ_QP != 0 {
            // SAFETY: the caller's.
            let qp = unsafe { object::borrow::<QpObject>(obj.qp_in.cast())? };
            let queues = qp.cross_channel.as_ref().ok_or(EOPNOTSUPP)?.queues();
            let answer = terrace_dv_qp {
                dbrec: queues.doorbell_record as *mut u32,
                sq: queue(Some(queues.send)),
                rq: queue(queues.recv),
            };
            // SAFETY: the caller's.
            unsafe { object::write(obj.qp_out, answer)? };
        }
        if types & TERRACE_DV_OBJ_CQ != 0 {
            // SAFETY: the caller's.
            let cq = unsafe { object::borrow::<CqObject>(obj.cq_in.cast())? }.cq();
            // SAFETY: the caller's.
            unsafe { object::write(obj.cq_out, terrace_dv_cq { cqn: cq.number(), cqe_cnt: cq.depth() })? };
        }
        Ok(())
    };
    status(init())
}
