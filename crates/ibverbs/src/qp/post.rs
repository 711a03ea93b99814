//! `ibv_post_send` and `ibv_post_recv`: C's list is converted while it is posted.

use std::ffi::c_int;

use terrace_nic::{Error, QpType, RecvWr, SendWr};

use super::{PostLimits, QpObject, convert};
use crate::abi::{IBV_WR_BIND_MW, ibv_qp, ibv_recv_wr, ibv_send_wr};
use crate::errno::{EINVAL, Errno};
use crate::mw::MwObject;
use crate::object::borrow;

/// A list of sends.
struct SendList {
    next: *const ibv_send_wr,
    /// Whether a converted request was a bind.
    has_binds: bool,
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
            self.has_binds |= (*wr).opcode == IBV_WR_BIND_MW;
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

/// Reports the first work request as the bad one and returns the errno.
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
    // SAFETY: the caller's; `next` is read of elements of the list only.
    unsafe { report(posted, first, bad, |wr| (*wr).next) }
}

/// Stores the new keys in the windows that the first `count` work requests bind.
///
/// # Safety
/// `first` is a list that ends with null; those work requests were posted.
#[cold]
unsafe fn show_bound_keys(first: *const ibv_send_wr, count: usize) {
    let mut wr = first;
    for _ in 0..count {
        if wr.is_null() {
            return;
        }
        // SAFETY: the caller's; a bind was converted, so its window is one.
        unsafe {
            if (*wr).opcode == IBV_WR_BIND_MW {
                let request = &(*wr).__bindgen_anon_2.bind_mw;
                if let Ok(window) = borrow::<MwObject>(request.mw) {
                    window.set_rkey(window.key_with_tag_of(request.rkey));
                }
            }
            wr = (*wr).next;
        }
    }
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
        // Only RC work requests have no further fields.
        Some(short) if object.qp.qp_type() == QpType::Rc => {
            object.qp.post_short(&short).map_err(|error| (0, error))
        }
        _ => {
            let qp_type = object.qp.qp_type();
            let mut list = SendList { next: wr, has_binds: false, qp_type, limits: object.limits };
            let posted = object.qp.post_send(&mut list);
            if list.has_binds {
                let count = posted.as_ref().map_or_else(|(index, _)| *index, |()| usize::MAX);
                // SAFETY: the caller's; so many of them were posted.
                unsafe { show_bound_keys(wr, count) };
            }
            posted
        }
    };
    // SAFETY: the caller's; `next` is read of elements of the list only.
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
