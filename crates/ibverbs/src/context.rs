//! `ibv_context`: an open device, and the table of functions that programs reach through it.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use terrace_memory::HostRange;
use terrace_nic::Device;

use crate::abi::{ibv_context, ibv_context_ops, ibv_device, verbs_context};
use crate::errno::{EINVAL, Errno, Result, minus_one, pointer};
use crate::object::{self, CPart};
use crate::paged::{self, Lease};
use crate::{cq, cq_ex, device_list, dm, fork, mr, mw, nic, pd, qp, query, room, srq, xrcd};

/// Completion vectors: all completions of a device come from one engine.
pub const COMP_VECTORS: c_int = 1;

/// `__VERBS_ABI_IS_EXTENDED`: the extended functions lie before the context.
const ABI_IS_EXTENDED: *mut c_void = usize::MAX as *mut c_void;

/// An open device. Programs hold a pointer to `verbs.context`; every object of the device holds a share, so that
/// destroying one after `ibv_close_device` does not crash.
#[repr(C)]
pub struct Context {
    verbs: CPart<verbs_context>,
    device: Arc<Device>,
    /// A real descriptor: programs duplicate it and pass it on.
    command: OwnedFd,
    /// For the objects' `handle` fields.
    next_handle: AtomicU32,
    /// Device memory given out, in bytes.
    device_memory: AtomicU64,
    /// The generation of the process in which the device was given a tier to drive; 0: none.
    tier_attached: AtomicU32,
}

const CONTEXT_OFFSET: usize = offset_of!(Context, verbs) + offset_of!(verbs_context, context);

impl Context {
    fn open() -> Result<*mut ibv_context> {
        room::for_device()?;
        fork::install()?;
        // The fallible steps come first: an open device has a thread, which only `close` ends.
        let command = command_descriptor()?;
        paged::check_environment()?;
        let device = nic::for_context()?;
        let context = Arc::new(Context {
            verbs: CPart::new(verbs_template()),
            device,
            command,
            next_handle: AtomicU32::new(1),
            device_memory: AtomicU64::new(0),
            tier_attached: AtomicU32::new(0),
        });
        let verbs = context.verbs.get();
        // SAFETY: nothing else has it before it is returned.
        unsafe {
            (*verbs).context.device = device_list::device();
            (*verbs).context.cmd_fd = context.command.as_raw_fd();
            (*verbs).context.async_fd = context.device.async_fd().as_raw_fd();
        }
        let base = Arc::into_raw(context).cast_mut();
        Ok(base.wrapping_byte_add(CONTEXT_OFFSET).cast())
    }

    /// A share of the context behind a pointer of the program, or of one of its objects.
    ///
    /// # Errors
    /// EINVAL for a null pointer.
    ///
    /// # Safety
    /// The pointer is null or came from `ibv_open_device` and was not closed.
    pub unsafe fn share(context: *mut ibv_context) -> Result<Arc<Context>> {
        // SAFETY: the caller's; the pointer holds a share itself.
        unsafe {
            let base = base(context)?;
            Arc::increment_strong_count(base);
            Ok(Arc::from_raw(base))
        }
    }

    /// A reference for the time of a call.
    ///
    /// # Errors
    /// EINVAL for a null pointer.
    ///
    /// # Safety
    /// As for [`Context::share`].
    pub unsafe fn borrow<'a>(context: *mut ibv_context) -> Result<&'a Context> {
        // SAFETY: the caller's.
        Ok(unsafe { &*base(context)? })
    }

    /// The pointer that C has.
    pub fn as_c(&self) -> *mut ibv_context {
        self.verbs.get().wrapping_byte_add(offset_of!(verbs_context, context)).cast()
    }

    /// The NIC.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A number for an object's `handle` field, unique within the context.
    pub fn new_handle(&self) -> u32 {
        self.next_handle.fetch_add(1, Relaxed)
    }

    /// A share of the mapping below a range that is about to be registered, if the mapping is to be extended by a
    /// file. From the first one on, the device's engine drives the tier, too.
    ///
    /// # Errors
    /// ENOMEM when the budget exceeds the memory that is available.
    pub fn lease(&self, range: HostRange, access: u32) -> Result<Option<Lease>> {
        let lease = paged::lease(range, access)?;
        if let Some(lease) = &lease
            && self.tier_attached.swap(lease.generation(), Relaxed) != lease.generation()
        {
            self.device.attach(lease.callback());
        }
        Ok(lease)
    }

    /// Takes that many bytes of device memory; false if more than `limit` would be taken in all.
    pub fn take_device_memory(&self, bytes: u64, limit: u64) -> bool {
        let more = |taken: u64| taken.checked_add(bytes).filter(|&sum| sum <= limit);
        self.device_memory.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Returns bytes of device memory.
    pub fn give_back_device_memory(&self, bytes: u64) {
        self.device_memory.fetch_sub(bytes, Relaxed);
    }
}

/// The whole object of `Context::open`, of which C has a pointer to the middle.
fn base(context: *mut ibv_context) -> Result<*const Context> {
    if context.is_null() {
        return Err(EINVAL);
    }
    Ok(context.wrapping_byte_sub(CONTEXT_OFFSET).cast_const().cast())
}

/// An empty anonymous file: what `cmd_fd` is.
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
    verbs.context.cmd_fd = -1;
    verbs.context.async_fd = -1;
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
    ops.bind_mw = Some(mw::bind_mw);
    ops.dealloc_mw = Some(mw::dealloc_mw);
    ops.poll_cq = Some(cq::poll_cq);
    ops.req_notify_cq = Some(cq::req_notify_cq);
    ops.post_srq_recv = Some(srq::post_srq_recv);
    ops.post_send = Some(qp::post::post_send);
    ops.post_recv = Some(qp::post::post_recv);
    ops
}

/// `ibv_open_device(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    pointer(if device_list::is_ours(device) { Context::open() } else { Err(EINVAL) })
}

/// `ibv_close_device(3)`: the NIC is closed at once; objects that the program leaves behind keep their memory until
/// they are destroyed.
///
/// # Safety
/// `context` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    minus_one(base(context).map(|base| {
        // SAFETY: the caller's; this takes back the share that the program's pointer held.
        let context = unsafe { Arc::from_raw(base) };
        nic::closed_by_context(&context.device);
    }))
}
