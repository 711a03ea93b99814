//! `ibv_post_send` and `ibv_post_recv`: C's list is converted while it is posted.

use std::ffi::c_int;

use terrace_nic::{Error, QpType, RecvWr, SendWr};

use super::{PostLimits, QpObject, convert};
use crate::abi::{ibv_qp, ibv_recv_wr, ibv_send_wr};
use crate::errno::{EINVAL, Errno};
use crate::object::borrow;

/// A list of sends.
struct SendList {
    next: *const ibv_send_wr,
    qp_type: QpType,
    limits: PostLimits,
}

impl Iterator for SendList {
    type Item = Result<SendWr, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let wr = self.next;
        if wr.is_null() {
            return None;
        }
        // SAFETY: `post_send`'s caller promised a list of work requests that ends with null.
        unsafe {
            self.next = (*wr).next;
            Some(convert::send(wr, self.qp_type, self.limits))
        }
    }
}

/// A list of receives.
pub struct RecvList {
    next: *const ibv_recv_wr,
    limit: u32,
}

impl RecvList {
    /// Receives of `limit` scatter elements at most.
    ///
    /// # Safety
    /// `first` is null or a list that ends with null.
    pub unsafe fn new(first: *const ibv_recv_wr, limit: u32) -> RecvList {
        RecvList { next: first, limit }
    }
}

impl Iterator for RecvList {
    type Item = Result<RecvWr, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let wr = self.next;
        if wr.is_null() {
            return None;
        }
        // SAFETY: as the caller of `new` promised.
        unsafe {
            self.next = (*wr).next;
            Some(convert::recv(wr, self.limit))
        }
    }
}

/// Names the first work request as the bad one and returns the errno.
///
/// # Safety
/// `bad` is null or writable.
pub unsafe fn refuse<T>(bad: *mut *mut T, first: *mut T, errno: Errno) -> c_int {
    if !bad.is_null() {
        // SAFETY: the caller's.
        unsafe { *bad = first };
    }
    errno.0
}

/// # Safety
/// `first` is a list of more than `index` elements, each linked by `next`; `bad` is null or writable.
unsafe fn report<T>(
    posted: Result<(), (usize, Error)>,
    first: *mut T,
    bad: *mut *mut T,
    next: fn(*mut T) -> *mut T,
) -> c_int {
    let Err((index, error)) = posted else { return 0 };
    let mut culprit = first;
    for _ in 0..index {
        culprit = next(culprit);
    }
    // SAFETY: the caller's.
    unsafe { refuse(bad, culprit, Errno::from(error)) }
}

/// What `ibv_post_recv` and `ibv_post_srq_recv` return.
///
/// # Safety
/// `first` is the list that was posted, `bad` null or writable.
pub unsafe fn report_recv(
    posted: Result<(), (usize, Error)>,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's; only elements of the list are asked for the next one.
    unsafe { report(posted, first, bad, |wr| (*wr).next) }
}

/// `ibv_post_send(3)`.
///
/// # Safety
/// `qp` is null or a queue pair, `wr` a list of work requests, `bad_wr` null or writable.
pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's.
    let Ok(object) = (unsafe { borrow::<QpObject>(qp.cast()) }) else {
        // SAFETY: the caller's.
        return unsafe { refuse(bad_wr, wr, EINVAL) };
    };
    // SAFETY: the caller's.
    let short = if wr.is_null() { None } else { unsafe { convert::short(wr) } };
    let posted = match short {
        // Only connections have no more to say.
        Some(short) if object.qp.qp_type() == QpType::Rc => {
            object.qp.post_short(&short).map_err(|error| (0, error))
        }
        _ => object.qp.post_send(SendList { next: wr, qp_type: object.qp.qp_type(), limits: object.limits }),
    };
    // SAFETY: the caller's; only elements of the list are asked for the next one.
    unsafe { report(posted, wr, bad_wr, |wr| (*wr).next) }
}

/// `ibv_post_recv(3)`.
///
/// # Safety
/// `qp` is null or a queue pair, `wr` a list of work requests, `bad_wr` null or writable.
pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's.
    let Ok(object) = (unsafe { borrow::<QpObject>(qp.cast()) }) else {
        // SAFETY: the caller's.
        return unsafe { refuse(bad_wr, wr, EINVAL) };
    };
    // SAFETY: the caller's.
    let posted = object.qp.post_recv(unsafe { RecvList::new(wr, object.limits.recv_sges) });
    // SAFETY: the caller's.
    unsafe { report_recv(posted, wr, bad_wr) }
}
