//! `ibv_post_send` and `ibv_post_recv`: C's list is converted while it is posted. `ibv_bind_mw` posts a single bind.

use std::ffi::c_int;

use smallvec::SmallVec;
use terrace_nic::{Error, MwBind, MwKind, Posting, RecvWr, SendFlags, SendWr};

use super::{QpObject, convert};
use crate::abi::{
    IBV_ACCESS_ZERO_BASED, IBV_WR_BIND_MW, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, ibv_mw, ibv_mw_bind, ibv_qp,
    ibv_recv_wr, ibv_send_wr,
};
use crate::errno::{EINVAL, Errno, status};
use crate::mw::{self, MwObject};
use crate::object::{self, borrow};

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
        // SAFETY: the promise of `new`'s caller.
        unsafe {
            self.next = (*wr).next;
            Some(convert::recv(wr, self.limit))
        }
    }
}

/// Reports the first work request as the failed one and returns the errno.
///
/// # Safety
/// `bad` is null or writable.
pub unsafe fn report_first<T>(bad: *mut *mut T, first: *mut T, errno: Errno) -> c_int {
    if !bad.is_null() {
        // SAFETY: the caller's.
        unsafe { *bad = first };
    }
    errno.0
}

/// Posts a list of send requests by `post`, which moves the pointer behind each request that it has posted. Returns 0, or an
/// errno, and stores the first request that is not posted.
///
/// # Safety
/// `qp` is null or a queue pair, `first` the list, and `bad` null or writable.
#[inline(always)]
pub unsafe fn post_list<T>(
    qp: *mut ibv_qp,
    first: *mut T,
    bad: *mut *mut T,
    post: impl FnOnce(&QpObject, &mut *mut T) -> Result<(), Error>,
) -> c_int {
    let mut next = first;
    // SAFETY: the caller's.
    let posted = match unsafe { borrow::<QpObject>(qp.cast()) } {
        Ok(object) => post(object, &mut next).map_err(Errno::from),
        Err(_) => Err(EINVAL),
    };
    match posted {
        Ok(()) => 0,
        // SAFETY: the caller's.
        Err(errno) => unsafe { report_first(bad, next, errno) },
    }
}

/// The result of `ibv_post_recv` and `ibv_post_srq_recv`.
///
/// # Safety
/// `first` is the list that was posted, `bad` null or writable.
pub unsafe fn report_recv(
    posted: Result<(), (usize, Error)>,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let Err((index, error)) = posted else { return 0 };
    let mut culprit = first;
    for _ in 0..index {
        // SAFETY: the caller's: this many of the list were posted.
        culprit = unsafe { (*culprit).next };
    }
    // SAFETY: the caller's.
    unsafe { report_first(bad, culprit, Errno::from(error)) }
}

/// Stores the new key in the window that a posted work request binds.
///
/// # Safety
/// `wr` is a bind that was converted.
#[cold]
unsafe fn store_bound_key(wr: *const ibv_send_wr) {
    // SAFETY: the caller's: its window is one.
    unsafe {
        let request = &(*wr).__bindgen_anon_2.bind_mw;
        if let Ok(window) = borrow::<MwObject>(request.mw) {
            window.set_rkey(window.key_with_tag_of(request.rkey));
        }
    }
}

/// The key by which a READ or WRITE and the next work request, which is of the same kind, access memory.
///
/// # Safety
/// `wr` is a list of work requests.
#[inline(always)]
unsafe fn run_key(wr: *const ibv_send_wr) -> Option<u32> {
    // SAFETY: the caller's.
    unsafe {
        let next = (*wr).next;
        let opcode = (*wr).opcode;
        let is_run = !next.is_null()
            && matches!(opcode, IBV_WR_RDMA_READ | IBV_WR_RDMA_WRITE)
            && (*next).opcode == opcode
            && (*next).wr.rdma.rkey == (*wr).wr.rdma.rkey;
        is_run.then(|| (*wr).wr.rdma.rkey)
    }
}

/// Posts the READs or WRITEs by one key at the beginning of a list, as many as the NIC executes together. `next` becomes
/// the first one that is not posted.
///
/// # Safety
/// `next` is a list of work requests of which [`run_key`] has returned the key.
#[inline(never)]
unsafe fn post_run(
    posting: &mut Posting<'_>,
    object: &QpObject,
    next: &mut *mut ibv_send_wr,
) -> Result<(), Error> {
    let mut wrs: SmallVec<[SendWr; Posting::LIST_MAX]> = SmallVec::new();
    let (first, mut end) = (*next, *next);
    let mut converted = Ok(());
    // SAFETY: the caller's.
    unsafe {
        let is_of_run = |wr: *mut ibv_send_wr| {
            (*wr).opcode == (*first).opcode && (*wr).wr.rdma.rkey == (*first).wr.rdma.rkey
        };
        while converted.is_ok() && wrs.len() < Posting::LIST_MAX && !end.is_null() && is_of_run(end) {
            converted = convert::send(end, object.qp.qp_type(), object.limits, |wr| {
                wrs.push(wr);
                Ok(())
            });
            if converted.is_ok() {
                end = (*end).next;
            }
        }
    }
    match posting.post_list(&mut wrs) {
        Ok(()) => {
            *next = end;
            converted
        }
        Err((index, error)) => {
            // SAFETY: the caller's: so many of the list were posted.
            (0..index).for_each(|_| *next = unsafe { (**next).next });
            Err(error)
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
    let post = |object: &QpObject, next: &mut *mut ibv_send_wr| {
        if let Some(queues) = &object.cross_channel {
            // SAFETY: the caller's.
            return unsafe { queues.post_sends(object, next) };
        }
        object.qp.post(|posting| {
            while !next.is_null() {
                // SAFETY: the caller's: a list of work requests that ends with null.
                unsafe {
                    if run_key(*next).is_some_and(|rkey| posting.is_list_faster(rkey)) {
                        post_run(posting, object, next)?;
                        continue;
                    }
                    convert::send(*next, object.qp.qp_type(), object.limits, |wr| posting.post(wr))?;
                    if (**next).opcode == IBV_WR_BIND_MW {
                        store_bound_key(*next);
                    }
                    *next = (**next).next;
                }
            }
            Ok(())
        })
    };
    // SAFETY: the caller's.
    unsafe { post_list(qp, wr, bad_wr, post) }
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
        return unsafe { report_first(bad_wr, wr, EINVAL) };
    };
    let posted = match &object.cross_channel {
        // SAFETY: the caller's.
        None => object.qp.post_recv(unsafe { RecvList::new(wr, object.limits.recv_sges) }),
        // SAFETY: the caller's.
        Some(queues) => unsafe { queues.post_receives(object, wr) },
    };
    // SAFETY: the caller's.
    unsafe { report_recv(posted, wr, bad_wr) }
}

/// `ibv_bind_mw(3)`, for windows of type 1.
///
/// # Safety
/// `qp` is a queue pair, `mw` a window, `bind` attributes, or any of them null.
pub unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    let post = || {
        // SAFETY: the caller's.
        let (queue_pair, window, bind) =
            unsafe { (borrow::<QpObject>(qp.cast())?, borrow::<MwObject>(mw)?, object::read(bind)?) };
        let info = &bind.bind_info;
        // Zero-based windows are type 2 only.
        if !matches!(window.mw().kind(), MwKind::Type1) || info.mw_access_flags & IBV_ACCESS_ZERO_BASED != 0 {
            return Err(EINVAL);
        }
        // SAFETY: the caller's.
        let region_lkey = unsafe { mw::bound_region(info)? };
        let request = MwBind {
            wr_id: bind.wr_id,
            flags: SendFlags::from_bits_truncate(bind.send_flags),
            region_lkey,
            addr: info.addr,
            length: info.length,
            access: info.mw_access_flags,
        };
        let rkey = queue_pair.qp.bind_mw(window.mw(), &request)?;
        window.set_rkey(rkey);
        Ok(())
    };
    status(post())
}
