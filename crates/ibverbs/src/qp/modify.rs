//! `ibv_modify_qp` and `ibv_query_qp`.

use std::ffi::{c_int, c_uint};

use terrace_nic::{QpAttr, QpAttrMask as M, QpState, QpType, RETRY_CNT_INFINITE};

use super::QpObject;
use super::capacities;
use super::query_only::{Alternate, QueryOnly};
use crate::abi::newer::{
    IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES, IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY,
    IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS, IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG,
};
use crate::abi::{
    IBV_MIG_MIGRATED, IBV_MTU_256, IBV_MTU_4096, ibv_ece, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
    ibv_qp_state, ibv_wr_opcode,
};
use crate::ah;
use crate::errno::{EINVAL, EOPNOTSUPP, Result, status};
use crate::object::{self, borrow};
use crate::query::{PORT, mtu_code};

const STATES: [QpState; 7] =
    [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Err];

fn state(code: ibv_qp_state) -> Result<QpState> {
    STATES.get(code as usize).copied().ok_or(EINVAL)
}

/// Bytes of an `ibv_mtu`.
fn mtu_bytes(code: c_uint) -> Result<u32> {
    if (IBV_MTU_256..=IBV_MTU_4096).contains(&code) { Ok(128 << code) } else { Err(EINVAL) }
}

/// The attributes in the mask. The others are not read, because programs leave them unset.
fn attributes(object: &QpObject, attr: &ibv_qp_attr, mask: M) -> Result<QpAttr> {
    let mut ours = QpAttr::default();
    if mask.contains(M::STATE) {
        ours.state = state(attr.qp_state)?;
    }
    if mask.contains(M::CUR_STATE) {
        ours.cur_state = state(attr.cur_qp_state)?;
    }
    if mask.contains(M::PATH_MTU) {
        ours.path_mtu = mtu_bytes(attr.path_mtu)?;
    }
    if mask.contains(M::PORT) && u32::from(attr.port_num) != PORT
        || mask.contains(M::PKEY_INDEX) && attr.pkey_index != 0
        || mask.contains(M::PATH_MIG_STATE) && attr.path_mig_state != IBV_MIG_MIGRATED
        // The transport has a count without limit, which the verbs do not.
        || mask.contains(M::RETRY_CNT) && attr.retry_cnt == RETRY_CNT_INFINITE
    {
        return Err(EINVAL);
    }
    if mask.contains(M::AV) {
        let known = || object.qp.query().dest_qpn;
        let dest_qpn = if mask.contains(M::DEST_QPN) { attr.dest_qp_num } else { known() };
        let device = object.context.device();
        ours.path = Some(device.resolve(&ah::vector(device, &attr.ah_attr), dest_qpn)?);
    }
    // The other attributes are copied, and valid only if they are in the mask.
    (ours.qkey, ours.rq_psn, ours.sq_psn) = (attr.qkey, attr.rq_psn, attr.sq_psn);
    (ours.dest_qpn, ours.access, ours.pkey_index) = (attr.dest_qp_num, attr.qp_access_flags, attr.pkey_index);
    ours.en_sqd_async_notify = attr.en_sqd_async_notify != 0;
    (ours.max_rd_atomic, ours.max_dest_rd_atomic) = (attr.max_rd_atomic, attr.max_dest_rd_atomic);
    (ours.min_rnr_timer, ours.port_num) = (attr.min_rnr_timer, attr.port_num);
    (ours.timeout, ours.retry_cnt, ours.rnr_retry) = (attr.timeout, attr.retry_cnt, attr.rnr_retry);
    ours.rate_limit = attr.rate_limit;
    Ok(ours)
}

/// Attributes that an XRC end does not need, but that some programs (perftest) set because RC needs them. They are
/// accepted and ignored, as in the kernel's `modify_qp_mask`.
fn ignored(qp_type: QpType) -> M {
    match qp_type {
        QpType::XrcSend => M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
        QpType::XrcRecv => M::MAX_QP_RD_ATOMIC | M::RETRY_CNT | M::RNR_RETRY,
        QpType::Rc | QpType::Uc | QpType::Ud => M::empty(),
    }
}

/// `ibv_modify_qp(3)`. EBUSY if the queue pair was modified, but another process of the host does not finish an access
/// that was permitted before. Another call waits again.
///
/// # Safety
/// `qp` is null or a queue pair, `attr` null or attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let modify = || {
        // SAFETY: the caller's.
        let (object, attr) = unsafe { (borrow::<QpObject>(qp.cast())?, object::read(attr)?) };
        let mask = M::from_bits(mask as c_uint).ok_or(EINVAL)? - ignored(object.qp.qp_type());
        let ours = attributes(object, attr, mask)?;
        object.qp.modify(&ours, mask)?;
        object.remember(attr, mask);
        if mask.contains(M::STATE) {
            if ours.state == QpState::Reset {
                object.drop_prefetched_completions();
                object.cross_channel.iter().for_each(|queues| queues.reset());
            }
            // SAFETY: our own structure; only this verb and the query change the field.
            unsafe { (*object.as_c()).state = attr.qp_state };
        }
        // Revoked rights are without effect when this verb returns, as on an RNIC.
        Ok(object.qp.await_readers()?)
    };
    status(modify())
}

impl QpObject {
    fn remember(&self, attr: &ibv_qp_attr, mask: M) {
        if !mask.intersects(M::AV | M::ALT_PATH | M::STATE) {
            return;
        }
        let mut query_only = self.query_only.lock();
        if mask.contains(M::STATE) && attr.qp_state == QpState::Reset as u32 {
            *query_only = QueryOnly::default();
        }
        if mask.contains(M::AV) {
            query_only.address = attr.ah_attr;
        }
        if mask.contains(M::ALT_PATH) {
            query_only.alternate = Alternate {
                address: attr.alt_ah_attr,
                pkey_index: attr.alt_pkey_index,
                port_num: attr.alt_port_num,
                timeout: attr.alt_timeout,
            };
        }
    }

    fn describe(&self) -> ibv_qp_attr {
        let now = self.qp.query();
        let query_only = *self.query_only.lock();
        let Alternate { address, pkey_index, port_num, timeout } = query_only.alternate;
        // A UD queue pair has no path; its path MTU is the port's.
        let path_mtu = if self.qp.qp_type() == QpType::Ud {
            self.context.device().port_attributes().active_mtu
        } else {
            now.path_mtu
        };
        ibv_qp_attr {
            qp_state: now.state as u32,
            cur_qp_state: now.state as u32,
            path_mtu: mtu_code(path_mtu),
            path_mig_state: query_only.migration,
            qkey: now.qkey,
            rq_psn: now.rq_psn,
            sq_psn: now.sq_psn,
            dest_qp_num: now.dest_qpn,
            qp_access_flags: now.access,
            cap: capacities::to_c(self.qp.cap()),
            ah_attr: query_only.address,
            alt_ah_attr: address,
            pkey_index: now.pkey_index,
            alt_pkey_index: pkey_index,
            en_sqd_async_notify: u8::from(now.en_sqd_async_notify),
            sq_draining: u8::from(now.sq_draining),
            max_rd_atomic: now.max_rd_atomic,
            max_dest_rd_atomic: now.max_dest_rd_atomic,
            min_rnr_timer: now.min_rnr_timer,
            port_num: now.port_num,
            timeout: now.timeout,
            retry_cnt: now.retry_cnt,
            rnr_retry: now.rnr_retry,
            alt_port_num: port_num,
            alt_timeout: timeout,
            rate_limit: now.rate_limit,
        }
    }
}

/// `ibv_query_qp(3)`: returns all attributes, regardless of the mask.
///
/// # Safety
/// `qp` is null or a queue pair; `attr` and `init_attr` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    let query = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<QpObject>(qp.cast())? };
        let c = object.as_c();
        let now = object.describe();
        // SAFETY: our own structure; only creation and this verb write its fields.
        let init = unsafe {
            (*c).state = now.qp_state;
            ibv_qp_init_attr {
                qp_context: (*c).qp_context,
                send_cq: (*c).send_cq,
                recv_cq: (*c).recv_cq,
                srq: (*c).srq,
                cap: now.cap,
                qp_type: (*c).qp_type,
                sq_sig_all: c_int::from(object.qp.sq_sig_all()),
            }
        };
        // SAFETY: the caller's.
        unsafe {
            object::write(attr, now)?;
            object::write(init_attr, init)
        }
    };
    status(query())
}

/// Whether other processors see the bytes of a message in the order of their addresses: `memory` copies with ordinary
/// stores, whose order x86-64 preserves.
const IN_ORDER: bool = cfg!(target_arch = "x86_64");

/// `ibv_query_qp_data_in_order(3)`: whole messages, of every kind. Packets are handled in sequence and never twice.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, _op: ibv_wr_opcode, flags: u32) -> c_int {
    let known = IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS | IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY;
    if qp.is_null() || flags & !known != 0 || !IN_ORDER {
        return 0;
    }
    if flags & IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS != 0 {
        return IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG | IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES;
    }
    1
}

/// `ibv_set_ece(3)`: there are no enhanced connection options.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    EOPNOTSUPP.0
}

/// `ibv_query_ece(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    EOPNOTSUPP.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_codes_are_errors() {
        assert_eq!(mtu_bytes(1), Ok(256));
        assert_eq!(mtu_bytes(5), Ok(4096));
        assert_eq!(mtu_bytes(0), Err(EINVAL));
        assert_eq!(mtu_bytes(6), Err(EINVAL));
        assert_eq!(state(6), Ok(QpState::Err));
        assert_eq!(state(7), Err(EINVAL));
        assert_eq!(state(u32::MAX), Err(EINVAL));
    }
}
