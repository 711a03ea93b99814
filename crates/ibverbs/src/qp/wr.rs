//! The builder functions behind `ibv_wr_*`: work requests are collected from `wr_start` on, and posted as one list by
//! `wr_complete`, which also returns the error of a failed step, because the steps return nothing.

use std::ffi::{c_int, c_void};

use terrace_nic::{Error, Payload, QpType, SendFlags, SendOp, SendWr, SgeList, Target};

use super::builder::{Builder, List};
use super::{QpObject, convert};
use crate::abi::newer::{IBV_QP_EX_WITH_FLUSH, QpEx};
use crate::abi::{
    IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_ATOMIC_WRITE,
    IBV_QP_EX_WITH_BIND_MW, IBV_QP_EX_WITH_LOCAL_INV, IBV_QP_EX_WITH_RDMA_READ, IBV_QP_EX_WITH_RDMA_WRITE,
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_SEND, IBV_QP_EX_WITH_SEND_WITH_IMM,
    IBV_QP_EX_WITH_SEND_WITH_INV, ibv_ah, ibv_data_buf, ibv_mw, ibv_mw_bind_info, ibv_qp_ex, ibv_sge,
};
use crate::errno::{EINVAL, Errno, Result};
use crate::mw::MwObject;
use crate::object::borrow;

/// Stores the functions in C's structure.
pub fn install(c: &mut QpEx) {
    let ops = &mut c.base;
    ops.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    ops.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    ops.wr_atomic_write = Some(wr_atomic_write);
    ops.wr_bind_mw = Some(wr_bind_mw);
    ops.wr_local_inv = Some(wr_local_inv);
    ops.wr_rdma_read = Some(wr_rdma_read);
    ops.wr_rdma_write = Some(wr_rdma_write);
    ops.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    ops.wr_send = Some(wr_send);
    ops.wr_send_imm = Some(wr_send_imm);
    ops.wr_send_inv = Some(wr_send_inv);
    ops.wr_send_tso = Some(wr_send_tso);
    ops.wr_set_ud_addr = Some(wr_set_ud_addr);
    ops.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    ops.wr_set_inline_data = Some(wr_set_inline_data);
    ops.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    ops.wr_set_sge = Some(wr_set_sge);
    ops.wr_set_sge_list = Some(wr_set_sge_list);
    ops.wr_start = Some(wr_start);
    ops.wr_complete = Some(wr_complete);
    ops.wr_abort = Some(wr_abort);
    c.wr_flush = Some(wr_flush);
}

/// The queue pair and its builder.
///
/// # Safety
/// `qp` is null or a queue pair with a builder.
unsafe fn parts<'a>(qp: *mut ibv_qp_ex) -> Result<(&'a QpObject, &'a Builder)> {
    // SAFETY: the caller's.
    let object = unsafe { borrow::<QpObject>(qp.cast())? };
    Ok((object, object.builder.as_ref().ok_or(EINVAL)?))
}

/// Runs a step on the list, unless an earlier step failed.
///
/// # Safety
/// As for [`parts`], and the calling thread is between `wr_start` and `wr_complete`.
unsafe fn step(
    qp: *mut ibv_qp_ex,
    work: impl FnOnce(&QpObject, &Builder, &mut Vec<SendWr>) -> std::result::Result<(), Error>,
) {
    // SAFETY: the caller's.
    let Ok((object, builder)) = (unsafe { parts(qp) }) else { return };
    let step = |list: &mut List| {
        if list.error.is_none() {
            list.error = work(object, builder, &mut list.wrs).err();
        }
    };
    // SAFETY: the calling thread holds the session.
    unsafe { builder.with_list(step) };
}

/// Begins a work request.
///
/// # Safety
/// As for [`step`].
unsafe fn begin(qp: *mut ibv_qp_ex, needs: u64, op: std::result::Result<SendOp, Error>) {
    let work = |object: &QpObject, builder: &Builder, wrs: &mut Vec<SendWr>| {
        if !builder.allows(needs) {
            return Err(Error::Invalid("the queue pair was created without this operation"));
        }
        if wrs.len() >= object.limits.sends as usize {
            return Err(Error::NoMemory("more work requests than the send queue allows"));
        }
        // SAFETY: our own structure; the program set the two fields before this call.
        let (wr_id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
        let flags = convert::check_flags(flags)? - SendFlags::INLINE;
        wrs.push(SendWr { wr_id, op: op?, payload: Payload::Sges(SgeList::new()), flags, target: None });
        Ok(())
    };
    // SAFETY: the caller's.
    unsafe { step(qp, work) }
}

/// Changes the last work request.
///
/// # Safety
/// As for [`step`].
unsafe fn amend(
    qp: *mut ibv_qp_ex,
    change: impl FnOnce(&QpObject, &mut SendWr) -> std::result::Result<(), Error>,
) {
    let work = |object: &QpObject, _: &Builder, wrs: &mut Vec<SendWr>| {
        let last = wrs.last_mut().ok_or(Error::Invalid("a setter before any work request"))?;
        change(object, last)
    };
    // SAFETY: the caller's.
    unsafe { step(qp, work) }
}

fn set_inline(wr: &mut SendWr, payload: Payload) {
    wr.payload = payload;
    wr.flags |= SendFlags::INLINE;
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the program passes the queue pair that contains the pointer to this function; the same applies below.
    let Ok((_, builder)) = (unsafe { parts(qp) }) else { return };
    builder.begin();
}

/// Posts a list, unless a step has failed, and empties it.
fn post(object: &QpObject, list: &mut List) -> std::result::Result<(), Error> {
    let posted = match list.error.take() {
        Some(error) => Err(error),
        None => object.qp.post_send_batch(&mut list.wrs),
    };
    for (mw, rkey) in list.bound.drain(..).filter(|_| posted.is_ok()) {
        // SAFETY: the program's windows, alive as long as a bind of them is not complete.
        if let Ok(window) = unsafe { borrow::<MwObject>(mw) } {
            window.set_rkey(rkey);
        }
    }
    list.wrs.clear();
    posted
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: as above.
    let Ok((object, builder)) = (unsafe { parts(qp) }) else { return EINVAL.0 };
    if !builder.has_begun() {
        return EINVAL.0;
    }
    // SAFETY: this thread holds the session, and ends it.
    let posted = unsafe {
        let posted = builder.with_list(|list| post(object, list));
        builder.end();
        posted
    };
    posted.map_or_else(|error| Errno::from(error).0, |()| 0)
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: as above.
    let Ok((_, builder)) = (unsafe { parts(qp) }) else { return };
    if builder.has_begun() {
        // SAFETY: this thread holds the session, and ends it.
        unsafe {
            builder.with_list(|list| list.wrs.clear());
            builder.end();
        }
    }
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_SEND.into(), Ok(SendOp::Send)) }
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm: u32) {
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_SEND_WITH_IMM.into(), Ok(SendOp::SendImm(imm))) }
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_SEND_WITH_INV.into(), Ok(SendOp::SendInvalidate(rkey))) }
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, va: u64) {
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_RDMA_WRITE.into(), Ok(SendOp::Write { va, rkey })) }
}

unsafe extern "C" fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, va: u64, imm: u32) {
    let op = Ok(SendOp::WriteImm { va, rkey, imm });
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM.into(), op) }
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, va: u64) {
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_RDMA_READ.into(), Ok(SendOp::Read { va, rkey })) }
}

unsafe extern "C" fn wr_atomic_cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, va: u64, compare: u64, swap: u64) {
    let op = Ok(SendOp::CompareSwap { va, rkey, compare, swap });
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP.into(), op) }
}

unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, va: u64, add: u64) {
    let op = Ok(SendOp::FetchAdd { va, rkey, add });
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD.into(), op) }
}

/// Bytes of an atomic write.
const ATOMIC_BYTES: u32 = 8;

unsafe extern "C" fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, va: u64, value: *const c_void) {
    // SAFETY: as above; the value is 8 bytes in the program's memory.
    unsafe {
        begin(qp, IBV_QP_EX_WITH_ATOMIC_WRITE.into(), Ok(SendOp::AtomicWrite { va, rkey }));
        amend(qp, |_, wr| {
            let part = std::iter::once((value as u64, u64::from(ATOMIC_BYTES)));
            set_inline(wr, convert::inline_data(part, ATOMIC_BYTES)?);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_flush(qp: *mut ibv_qp_ex, rkey: u32, va: u64, length: usize, kind: u8, level: u8) {
    let op = u32::try_from(length)
        .map_err(|_| Error::Invalid("a flush of 4 GiB or more"))
        .map(|length| SendOp::Flush { va, rkey, length, placement: kind, selectivity: level });
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_FLUSH, op) }
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: as above.
    unsafe { begin(qp, IBV_QP_EX_WITH_LOCAL_INV.into(), Ok(SendOp::LocalInvalidate(rkey))) }
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: as above; the window and the region are the program's.
    unsafe {
        let info = info.as_ref().ok_or(Error::Invalid("no bind information"));
        let op = info.and_then(|info| convert::bind(mw, rkey, info));
        if let (Ok(SendOp::BindWindow(bind)), Ok((_, builder))) = (&op, parts(qp)) {
            builder.with_list(|list| list.bound.push((mw, bind.new_rkey)));
        }
        begin(qp, IBV_QP_EX_WITH_BIND_MW.into(), op);
    }
}

unsafe extern "C" fn wr_send_tso(qp: *mut ibv_qp_ex, _hdr: *mut c_void, _hdr_sz: u16, _mss: u16) {
    // SAFETY: as above. No queue pair is created with this operation, so it fails.
    unsafe { begin(qp, 0, Ok(SendOp::Send)) }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: as above; the address handle is the program's.
    unsafe {
        amend(qp, |_, wr| {
            wr.target = Some(convert::datagram(ah, qpn, qkey)?);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, srqn: u32) {
    let change = |object: &QpObject, wr: &mut SendWr| {
        if object.qp.qp_type() != QpType::XrcSend {
            return Err(Error::Invalid("the queue pair is no XRC initiator"));
        }
        wr.target = Some(Target::SharedQueue(srqn));
        Ok(())
    };
    // SAFETY: as above.
    unsafe { amend(qp, change) }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: as above; the data is the program's.
    unsafe {
        amend(qp, |object, wr| {
            let part = std::iter::once((addr as u64, length as u64));
            set_inline(wr, convert::inline_data(part, object.limits.inline_bytes)?);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: as above; the list and the data are the program's.
    unsafe {
        amend(qp, |object, wr| {
            if list.is_null() && count > 0 || count > object.limits.inline_bytes as usize {
                return Err(Error::Invalid("more inline buffers than inline bytes"));
            }
            let buffers = if count == 0 { &[] } else { std::slice::from_raw_parts(list, count) };
            let parts = buffers.iter().map(|buffer| (buffer.addr as u64, buffer.length as u64));
            set_inline(wr, convert::inline_data(parts, object.limits.inline_bytes)?);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = ibv_sge { addr, length, lkey };
    // SAFETY: as above.
    unsafe { set_sges(qp, &[sge]) }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: as above; the list is the program's, and its length is checked before it is read.
    unsafe {
        let limit = parts(qp).map_or(0, |(object, _)| object.limits.send_sges as usize);
        if count > limit || (list.is_null() && count > 0) {
            amend(qp, |_, _| Err(Error::Invalid("more gather elements than the queue allows")));
        } else if count > 0 {
            set_sges(qp, std::slice::from_raw_parts(list, count));
        } else {
            set_sges(qp, &[]);
        }
    }
}

/// # Safety
/// As for [`step`].
unsafe fn set_sges(qp: *mut ibv_qp_ex, sges: &[ibv_sge]) {
    let change = |object: &QpObject, wr: &mut SendWr| {
        if sges.len() > object.limits.send_sges as usize {
            return Err(Error::Invalid("more gather elements than the queue allows"));
        }
        wr.payload = convert::payload(sges);
        Ok(())
    };
    // SAFETY: the caller's.
    unsafe { amend(qp, change) }
}
