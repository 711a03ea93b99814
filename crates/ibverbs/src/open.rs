//! Opening and closing the device, and the tables of functions that programs reach through a context.

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};

use crate::abi::{ibv_context, ibv_context_ops, ibv_device, verbs_context};
use crate::context::{COMP_VECTORS, Context};
use crate::errno::{EINVAL, Errno, Result, minus_one, pointer};
use crate::{cq, cq_ex, device_list, dm, fork, mr, mw, nic, object, paged, pd, qp, query, room, srq, xrcd};

/// `__VERBS_ABI_IS_EXTENDED`: the extended functions lie before the context.
const ABI_IS_EXTENDED: *mut c_void = usize::MAX as *mut c_void;

/// `ibv_open_device(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(if device_list::is_ours(device) { open() } else { Err(EINVAL) })
}

fn open() -> Result<*mut ibv_context> {
    room::for_device()?;
    fork::install()?;
    // The fallible steps come first: an open device has a thread, which only `close` ends.
    let command = command_descriptor()?;
    paged::check_environment()?;
    Ok(Context::publish(verbs_template(), nic::acquire_for_context()?, command))
}

/// `ibv_close_device(3)`: the NIC is closed immediately. Objects that the program has not destroyed keep their memory
/// until they are destroyed.
///
/// # Safety
/// `context` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the caller's.
    minus_one(unsafe { Context::close(context) }.map(|context| nic::release_from_context(context.device())))
}

/// Opens an empty anonymous file for `cmd_fd`.
fn command_descriptor() -> Result<OwnedFd> {
    // SAFETY: a literal name and flags.
    let fd = unsafe { libc::memfd_create(c"terrace-uverbs".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Errno::last());
    }
    // SAFETY: just opened, owned by nothing else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The tables that are the same for every context. Null functions are those that the device does not support: the
/// inline functions of `verbs.h` answer EOPNOTSUPP for them.
fn verbs_template() -> verbs_context {
    // SAFETY: integers, pointers and optional functions.
    let mut verbs: verbs_context = unsafe { object::zeroed() };
    verbs.sz = size_of::<verbs_context>();
    verbs.query_port = Some(query::query_port);
    verbs.query_device_ex = Some(query::query_device_ex);
    verbs.query_rt_values = Some(query::query_rt_values);
    verbs.advise_mr = Some(mr::advise_mr);
    verbs.alloc_dm = Some(dm::alloc_dm);
    verbs.free_dm = Some(dm::free_dm);
    verbs.reg_dm_mr = Some(dm::reg_dm_mr);
    verbs.alloc_td = Some(pd::alloc_td);
    verbs.dealloc_td = Some(pd::dealloc_td);
    verbs.alloc_parent_domain = Some(pd::alloc_parent_domain);
    verbs.create_cq_ex = Some(cq_ex::create_cq_ex);
    verbs.create_qp_ex = Some(qp::create::create_qp_ex);
    verbs.create_srq_ex = Some(srq::create_srq_ex);
    verbs.get_srq_num = Some(srq::get_srq_num);
    verbs.open_xrcd = Some(xrcd::open_xrcd);
    verbs.close_xrcd = Some(xrcd::close_xrcd);
    verbs.open_qp = Some(qp::create::open_qp);
    verbs.context.ops = operations();
    verbs.context.num_comp_vectors = COMP_VECTORS;
    verbs.context.device = device_list::device();
    verbs.context.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    verbs.context.abi_compat = ABI_IS_EXTENDED;
    verbs
}

fn operations() -> ibv_context_ops {
    // SAFETY: optional functions only.
    let mut ops: ibv_context_ops = unsafe { object::zeroed() };
    ops._compat_query_device = Some(query::ibv_query_device);
    ops._compat_query_port = Some(query::ibv_query_port);
    ops.alloc_mw = Some(mw::alloc_mw);
    ops.bind_mw = Some(qp::post::bind_mw);
    ops.dealloc_mw = Some(mw::dealloc_mw);
    ops.poll_cq = Some(cq::poll_cq);
    ops.req_notify_cq = Some(cq::req_notify_cq);
    ops.post_srq_recv = Some(srq::post_srq_recv);
    ops.post_send = Some(qp::post::post_send);
    ops.post_recv = Some(qp::post::post_recv);
    ops
}
