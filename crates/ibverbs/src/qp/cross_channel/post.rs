//! Posting to cross-channel queue pairs.

use std::ffi::c_int;

use terrace_nic::Error;
use terrace_nic::wqe_format::SendEntry;

use super::super::post::{RecvList, post_list, post_recv, report_first};
use super::super::{QpObject, convert as plain};
use super::CrossChannel;
use super::convert::{Entry, convert, request};
use crate::abi::cross_channel::{IBV_EXP_TASK_RECV, ibv_exp_send_wr, ibv_exp_task};
use crate::abi::{ibv_context, ibv_qp, ibv_recv_wr, ibv_send_wr};
use crate::errno::Errno;

impl CrossChannel {
    fn post_entry(&self, object: &QpObject, entry: Entry) -> Result<(), Error> {
        // One after the other: an ENABLE of this queue counts those before it.
        let mut positions = self.send.lock();
        let end = object.qp.post_entries([Ok(entry)]).map_err(|(_, error)| error)?;
        positions.push(end);
        Ok(())
    }

    /// `ibv_post_send` of such a queue pair. On error, `next` is the first work request that is not posted.
    ///
    /// # Safety
    /// `next` is a list of work requests.
    #[cold]
    pub unsafe fn post_sends(&self, object: &QpObject, next: &mut *mut ibv_send_wr) -> Result<(), Error> {
        while !next.is_null() {
            // SAFETY: the caller's: a list of work requests that ends with null.
            unsafe {
                plain::send(*next, object.qp.qp_type(), object.limits, |wr| {
                    let (flags, wr_id) = (wr.flags, wr.wr_id);
                    self.post_entry(
                        object,
                        (SendEntry::Request { op: wr.op, payload: wr.payload }, flags, wr_id),
                    )
                })?;
                *next = (**next).next;
            }
        }
        Ok(())
    }

    /// `ibv_post_recv` of such a queue pair. The error has the index of the first work request that is not posted.
    ///
    /// # Safety
    /// `first` is null or a list of work requests.
    #[cold]
    pub unsafe fn post_receives(
        &self,
        object: &QpObject,
        first: *mut ibv_recv_wr,
    ) -> Result<(), (usize, Error)> {
        if self.queues.recv.is_none() {
            return Err((0, Error::Invalid("the receive queue is shared")));
        }
        // SAFETY: the caller's.
        let wrs = unsafe { RecvList::new(first, object.limits.recv_sges) };
        let mut positions = self.recv.lock();
        wrs.enumerate().try_for_each(|(index, wr)| {
            let end = object.qp.post_receive_entries([wr]).map_err(|(_, error)| (index, error))?;
            positions.push(end);
            Ok(())
        })
    }
}

/// Posts a list. On error, `next` is the first work request that is not posted.
///
/// # Safety
/// `next` is a list of work requests.
unsafe fn post_requests(object: &QpObject, next: &mut *mut ibv_exp_send_wr) -> Result<(), Error> {
    while !next.is_null() {
        // SAFETY: the caller's: a list of work requests that ends with null.
        unsafe {
            match &object.cross_channel {
                Some(queues) => convert(*next, object, |entry| queues.post_entry(object, entry))?,
                None => {
                    let flags = plain::check_flags((**next).exp_send_flags as u32)?;
                    let wr = request(*next, flags, object)?;
                    object.qp.post(|posting| posting.post(wr))?;
                }
            }
            *next = (**next).next;
        }
    }
    Ok(())
}

/// `ibv_exp_post_send`. WAIT and ENABLE are for cross-channel queue pairs only.
///
/// # Safety
/// `qp` is null or a queue pair, `wr` a list of work requests, `bad_wr` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_exp_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_exp_send_wr,
    bad_wr: *mut *mut ibv_exp_send_wr,
) -> c_int {
    // SAFETY: the caller's.
    let post = |object: &QpObject, next: &mut _| unsafe { post_requests(object, next) };
    // SAFETY: the caller's.
    unsafe { post_list(qp, wr, bad_wr, post) }
}

/// `ibv_exp_post_task`: posts the lists of several queue pairs, one after the other.
///
/// # Safety
/// `task` is a list of tasks with this library's queue pairs and valid work requests, `bad_task` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_exp_post_task(
    _context: *mut ibv_context,
    task: *mut ibv_exp_task,
    bad_task: *mut *mut ibv_exp_task,
) -> c_int {
    let mut next = task;
    while !next.is_null() {
        // SAFETY: the caller's.
        let errno = unsafe {
            let (qp, list) = ((*next).qp, (*next).list);
            match (*next).task_type {
                IBV_EXP_TASK_RECV => post_recv(qp, list.recv_wr, std::ptr::null_mut()),
                _ => ibv_exp_post_send(qp, list.send_wr, std::ptr::null_mut()),
            }
        };
        if errno != 0 {
            // SAFETY: the caller's.
            return unsafe { report_first(bad_task, next, Errno(errno)) };
        }
        // SAFETY: the caller's.
        next = unsafe { (*next).next };
    }
    0
}
