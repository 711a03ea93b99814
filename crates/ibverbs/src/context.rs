//! `ibv_context`: an open device.

use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use terrace_hostmem::HostRange;
use terrace_nic::Device;

use crate::abi::{ibv_context, verbs_context};
use crate::errno::{EINVAL, Result};
use crate::object::CPart;
use crate::paged::{self, Lease};

/// Completion vectors: all completions of a device come from one engine.
pub const COMP_VECTORS: c_int = 1;

/// An open device. Programs have a pointer to `verbs.context`. Every object of the device holds a reference, so that an
/// object can be destroyed after `ibv_close_device`.
#[repr(C)]
pub struct Context {
    verbs: CPart<verbs_context>,
    device: Arc<Device>,
    /// The descriptor `cmd_fd`. It is valid, because programs duplicate it and pass it to other processes.
    command: OwnedFd,
    /// For the objects' `handle` fields.
    next_handle: AtomicU32,
    /// Allocated device memory, in bytes.
    device_memory: AtomicU64,
    /// The generation of the process in which the pager was attached to the device's engine; 0 without one.
    pager_attached: AtomicU32,
}

const CONTEXT_OFFSET: usize = offset_of!(Context, verbs) + offset_of!(verbs_context, context);

impl Context {
    /// Passes a context with these tables to the program, until [`Context::close`].
    pub fn publish(verbs: verbs_context, device: Arc<Device>, command: OwnedFd) -> *mut ibv_context {
        device.set_report(Box::new(crate::files::report));
        let context = Arc::new(Context {
            verbs: CPart::new(verbs),
            device,
            command,
            next_handle: AtomicU32::new(1),
            device_memory: AtomicU64::new(0),
            pager_attached: AtomicU32::new(0),
        });
        let verbs = context.verbs.get();
        // SAFETY: nothing else has it before it is returned.
        unsafe {
            (*verbs).context.cmd_fd = context.command.as_raw_fd();
            (*verbs).context.async_fd = context.device.async_fd().as_raw_fd();
        }
        let base = Arc::into_raw(context).cast_mut();
        base.wrapping_byte_add(CONTEXT_OFFSET).cast()
    }

    /// Takes over the reference of the program's pointer.
    ///
    /// # Errors
    /// EINVAL for a null pointer.
    ///
    /// # Safety
    /// As for [`Context::share`]; the program does not use the pointer any more.
    pub unsafe fn close(context: *mut ibv_context) -> Result<Arc<Context>> {
        // SAFETY: the caller's.
        base(context).map(|base| unsafe { Arc::from_raw(base) })
    }

    /// A new reference to the context behind a pointer of the program, or of one of its objects.
    ///
    /// # Errors
    /// EINVAL for a null pointer.
    ///
    /// # Safety
    /// The pointer is null or came from `ibv_open_device` and was not closed.
    pub unsafe fn share(context: *mut ibv_context) -> Result<Arc<Context>> {
        // SAFETY: the caller's; the pointer holds a reference itself.
        unsafe {
            let base = base(context)?;
            Arc::increment_strong_count(base);
            Ok(Arc::from_raw(base))
        }
    }

    /// Borrows the context for the duration of a call.
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

    /// The pointer for C.
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

    /// A lease of the memory of a range that is about to be registered, if memory is paged. The first lease of a paged
    /// mapping attaches the pager to the device's engine.
    ///
    /// # Errors
    /// ENOMEM if the budget exceeds the available memory.
    pub fn lease(&self, range: HostRange, access: u32) -> Result<Option<Lease>> {
        let lease = paged::lease(range, access)?;
        if let Some(lease) = &lease
            && let Some(callback) = lease.callback()
            && self.pager_attached.swap(lease.generation(), Relaxed) != lease.generation()
        {
            self.device.attach(callback);
        }
        Ok(lease)
    }

    /// Reserves bytes of device memory. Returns false if the total would exceed `limit`.
    pub fn reserve_device_memory(&self, bytes: u64, limit: u64) -> bool {
        let more = |taken: u64| taken.checked_add(bytes).filter(|&sum| sum <= limit);
        self.device_memory.fetch_update(Relaxed, Relaxed, more).is_ok()
    }

    /// Releases bytes of device memory.
    pub fn release_device_memory(&self, bytes: u64) {
        self.device_memory.fetch_sub(bytes, Relaxed);
    }
}

/// The object of [`Context::publish`] for C's pointer to a field of it.
fn base(context: *mut ibv_context) -> Result<*const Context> {
    if context.is_null() {
        return Err(EINVAL);
    }
    Ok(context.wrapping_byte_sub(CONTEXT_OFFSET).cast_const().cast())
}
