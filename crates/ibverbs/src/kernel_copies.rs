//! Copies between the kernel's structures and the verbs', for librdmacm.

use crate::abi::{
    ib_user_path_rec, ib_uverbs_ah_attr, ib_uverbs_qp_attr, ibv_ah_attr, ibv_gid, ibv_global_route,
    ibv_qp_attr, ibv_qp_cap, ibv_sa_path_rec,
};
use crate::object::read;

fn address(from: &ib_uverbs_ah_attr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: from.grh.dgid },
            flow_label: from.grh.flow_label,
            sgid_index: from.grh.sgid_index,
            hop_limit: from.grh.hop_limit,
            traffic_class: from.grh.traffic_class,
        },
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global,
        port_num: from.port_num,
    }
}

/// The kernel's address vector as a verbs one.
///
/// # Safety
/// The pointers are null or to structures of their types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_ah_attr_from_kern(to: *mut ibv_ah_attr, from: *const ib_uverbs_ah_attr) {
    // SAFETY: the caller's.
    if let (false, Ok(from)) = (to.is_null(), unsafe { read(from) }) {
        // SAFETY: the caller's.
        unsafe { to.write(address(from)) };
    }
}

/// The kernel's queue pair attributes as the verbs'. The state itself and the rate limit are not among them.
///
/// # Safety
/// The pointers are null or to structures of their types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_qp_attr_from_kern(to: *mut ibv_qp_attr, from: *const ib_uverbs_qp_attr) {
    // SAFETY: the caller's.
    let (Some(to), Ok(from)) = (unsafe { to.as_mut() }, (unsafe { read(from) })) else { return };
    to.cur_qp_state = from.cur_qp_state;
    to.path_mtu = from.path_mtu;
    to.path_mig_state = from.path_mig_state;
    (to.qkey, to.rq_psn, to.sq_psn) = (from.qkey, from.rq_psn, from.sq_psn);
    (to.dest_qp_num, to.qp_access_flags) = (from.dest_qp_num, from.qp_access_flags);
    to.cap = ibv_qp_cap {
        max_send_wr: from.max_send_wr,
        max_recv_wr: from.max_recv_wr,
        max_send_sge: from.max_send_sge,
        max_recv_sge: from.max_recv_sge,
        max_inline_data: from.max_inline_data,
    };
    (to.ah_attr, to.alt_ah_attr) = (address(&from.ah_attr), address(&from.alt_ah_attr));
    (to.pkey_index, to.alt_pkey_index) = (from.pkey_index, from.alt_pkey_index);
    (to.en_sqd_async_notify, to.sq_draining) = (from.en_sqd_async_notify, from.sq_draining);
    (to.max_rd_atomic, to.max_dest_rd_atomic) = (from.max_rd_atomic, from.max_dest_rd_atomic);
    (to.min_rnr_timer, to.port_num, to.timeout) = (from.min_rnr_timer, from.port_num, from.timeout);
    (to.retry_cnt, to.rnr_retry) = (from.retry_cnt, from.rnr_retry);
    (to.alt_port_num, to.alt_timeout) = (from.alt_port_num, from.alt_timeout);
}

/// The kernel's path record as the verbs'.
///
/// # Safety
/// The pointers are null or to structures of their types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_path_rec_from_kern(
    to: *mut ibv_sa_path_rec,
    from: *const ib_user_path_rec,
) {
    // SAFETY: the caller's.
    let (Some(to), Ok(from)) = (unsafe { to.as_mut() }, (unsafe { read(from) })) else { return };
    (to.dgid.raw, to.sgid.raw) = (from.dgid, from.sgid);
    (to.dlid, to.slid, to.raw_traffic) = (from.dlid, from.slid, from.raw_traffic as _);
    (to.flow_label, to.reversible, to.mtu) = (from.flow_label, from.reversible as _, from.mtu as _);
    (to.pkey, to.hop_limit, to.traffic_class) = (from.pkey, from.hop_limit, from.traffic_class);
    (to.numb_path, to.sl, to.mtu_selector) = (from.numb_path, from.sl, from.mtu_selector);
    (to.rate_selector, to.rate) = (from.rate_selector, from.rate);
    (to.packet_life_time_selector, to.packet_life_time) =
        (from.packet_life_time_selector, from.packet_life_time);
    to.preference = from.preference;
}

/// The verbs' path record as the kernel's.
///
/// # Safety
/// The pointers are null or to structures of their types.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_copy_path_rec_to_kern(to: *mut ib_user_path_rec, from: *const ibv_sa_path_rec) {
    // SAFETY: the caller's.
    let (Some(to), Ok(from)) = (unsafe { to.as_mut() }, (unsafe { read(from) })) else { return };
    // SAFETY: every view of the union is 16 plain bytes.
    (to.dgid, to.sgid) = unsafe { (from.dgid.raw, from.sgid.raw) };
    (to.dlid, to.slid, to.raw_traffic) = (from.dlid, from.slid, from.raw_traffic as _);
    (to.flow_label, to.reversible, to.mtu) = (from.flow_label, from.reversible as _, from.mtu as _);
    (to.pkey, to.hop_limit, to.traffic_class) = (from.pkey, from.hop_limit, from.traffic_class);
    (to.numb_path, to.sl, to.mtu_selector) = (from.numb_path, from.sl, from.mtu_selector);
    (to.rate_selector, to.rate) = (from.rate_selector, from.rate);
    (to.packet_life_time_selector, to.packet_life_time) =
        (from.packet_life_time_selector, from.packet_life_time);
    to.preference = from.preference;
}
