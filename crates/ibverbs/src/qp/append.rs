//! `terrace_post_append` and `terrace_post_write_commit` of `terrace.h`.

use std::ffi::c_int;

use terrace_nic::{Error, Payload, SendFlags, SendOp, SendWr};

use super::post::post_list;
use super::{QpObject, convert};
use crate::abi::terrace::{TERRACE_COMMIT, terrace_append_wr};
use crate::abi::{IBV_WR_RDMA_WRITE, ibv_qp, ibv_send_wr};

/// Fields of the FETH (IBTA annex A19): persistence, and the range of the RETH.
const PERSISTENT: u8 = 2;
const RANGE: u8 = 0;

/// `terrace_post_append` of `terrace.h`.
///
/// # Safety
/// `qp` is null or a queue pair, `wr` a list of requests, `bad_wr` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_post_append(
    qp: *mut ibv_qp,
    wr: *mut terrace_append_wr,
    bad_wr: *mut *mut terrace_append_wr,
) -> c_int {
    let post = |object: &QpObject, next: &mut *mut terrace_append_wr| {
        object.qp.post(|posting| {
            while !next.is_null() {
                // SAFETY: the caller's: a list of requests that ends with null.
                unsafe {
                    posting.post(append_request(*next, object.limits)?)?;
                    *next = (**next).next;
                }
            }
            Ok(())
        })
    };
    // SAFETY: the caller's.
    unsafe { post_list(qp, wr, bad_wr, post) }
}

/// The NIC's request from C's.
///
/// # Safety
/// `wr` is a request of a program that keeps to `terrace.h`.
unsafe fn append_request(wr: *const terrace_append_wr, limits: convert::PostLimits) -> Result<SendWr, Error> {
    // SAFETY: the caller's.
    let wr = unsafe { &*wr };
    let flags = convert::check_flags(wr.send_flags)?;
    if flags.contains(SendFlags::INLINE) || wr.flags & !TERRACE_COMMIT != 0 {
        return Err(Error::Invalid("an APPEND with inline data or unknown flags"));
    }
    // SAFETY: the caller's.
    let record = unsafe { convert::elements(wr.sg_list, wr.num_sge, limits.send_sges)? };
    let mut sges = convert::sge_list(record);
    sges.extend(convert::sge_list(std::slice::from_ref(&wr.result)));
    let op = SendOp::Append { rkey: wr.rkey, commit: wr.flags & TERRACE_COMMIT != 0 };
    Ok(SendWr { wr_id: wr.wr_id, op, payload: Payload::Sges(sges), flags, target: None })
}

/// `terrace_post_write_commit` of `terrace.h`.
///
/// # Safety
/// As for `ibv_post_send(3)`; `qp` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_post_write_commit(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    let post = |object: &QpObject, next: &mut *mut ibv_send_wr| {
        while !next.is_null() {
            // SAFETY: the caller's: a list of requests that ends with null.
            let pair = unsafe { write_and_flush(*next, object)? };
            // Both or none: a WRITE without its FLUSH would never complete.
            object.qp.post_send_batch(&mut Vec::from(pair))?;
            // SAFETY: the caller's.
            *next = unsafe { (**next).next };
        }
        Ok(())
    };
    // SAFETY: the caller's.
    unsafe { post_list(qp, wr, bad_wr, post) }
}

/// A WRITE, and the FLUSH of its range that completes for both.
///
/// # Safety
/// `wr` is a request of a program that keeps to `ibv_post_send(3)`.
unsafe fn write_and_flush(wr: *const ibv_send_wr, object: &QpObject) -> Result<[SendWr; 2], Error> {
    // SAFETY: the caller's.
    if unsafe { (*wr).opcode } != IBV_WR_RDMA_WRITE {
        return Err(Error::Invalid("only a WRITE is committed"));
    }
    let mut write = None;
    // SAFETY: the caller's.
    unsafe {
        convert::send(wr, object.qp.qp_type(), object.limits, |wr| {
            write = Some(wr);
            Ok(())
        })?;
    }
    let mut write = write.ok_or(Error::Invalid("no WRITE"))?;
    let SendOp::Write { va, rkey } = write.op else {
        return Err(Error::Invalid("only a WRITE is committed"));
    };
    let length = u32::try_from(write.payload.len()).map_err(|_| Error::Invalid("the WRITE is too long"))?;
    let op = SendOp::Flush { va, rkey, length, placement: PERSISTENT, selectivity: RANGE };
    let nothing = Payload::Sges(convert::sge_list(&[]));
    let of_write = SendFlags::FENCE | SendFlags::INLINE | SendFlags::ORDER_BEFORE;
    let flags = write.flags.difference(of_write);
    let flush = SendWr { wr_id: write.wr_id, op, payload: nothing, flags, target: None };
    write.flags.remove(SendFlags::SIGNALED | SendFlags::ORDER_AFTER);
    Ok([write, flush])
}
