//! Device memory: ordinary memory that programs access only by verbs.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use terrace_nic::MrRequest;

use crate::abi::{
    IBV_ACCESS_ON_DEMAND, IBV_ACCESS_ZERO_BASED, ibv_alloc_dm_attr, ibv_context, ibv_dm, ibv_mr, ibv_pd,
};
use crate::buffer::{map, unmap};
use crate::context::Context;
use crate::errno::{EINVAL, ENOMEM, Result, pointer, status};
use crate::mr::{self, Bytes, Range};
use crate::object::{self, CPart, Object, borrow, retire};
use crate::pd::{PdObject, Users};

/// Most bytes of device memory in a context.
pub const MAX_BYTES: u64 = 1 << 20;

/// Largest alignment of an allocation, as a power of two. It is the alignment of pages, which every allocation has.
const MAX_LOG_ALIGN: u32 = 12;

/// The address of an empty region: the first page, which is never mapped, so that every access to it fails. Only an
/// on-demand region may have such an address.
const UNMAPPED_ADDRESS: u64 = 1;

/// Copies from and to device memory consist of whole words.
const WORD: u64 = 4;

/// `ibv_dm`.
#[repr(C)]
pub struct DmObject {
    c: CPart<ibv_dm>,
    context: Arc<Context>,
    base: *mut c_void,
    length: usize,
    /// Regions in this device memory.
    users: Users,
}

// SAFETY: the memory is the object's own, and the program is responsible for concurrent copies to it.
unsafe impl Sync for DmObject {}
// SAFETY: as above.
unsafe impl Send for DmObject {}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for DmObject {
    type C = ibv_dm;
}

impl Drop for DmObject {
    fn drop(&mut self) {
        unmap(self.base, self.length);
        self.context.release_device_memory(self.length as u64);
    }
}

impl DmObject {
    /// The address of a range: EINVAL unless the device memory contains it.
    fn range(&self, offset: u64, length: usize) -> Result<*mut c_void> {
        let end = offset.checked_add(length as u64).ok_or(EINVAL)?;
        if end > self.length as u64 {
            return Err(EINVAL);
        }
        Ok(self.base.wrapping_byte_add(offset as usize))
    }

    /// The address of a range to copy, which must consist of whole words.
    fn words(&self, offset: u64, length: usize) -> Result<*mut c_void> {
        if !offset.is_multiple_of(WORD) || !length.is_multiple_of(WORD as usize) {
            return Err(EINVAL);
        }
        self.range(offset, length)
    }
}

/// `ibv_alloc_dm(3)`.
///
/// # Safety
/// `context` is null or open, `attr` null or attributes.
pub unsafe extern "C" fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    let alloc = || {
        // SAFETY: the caller's.
        let (context, attr) = unsafe { (Context::share(context)?, object::read(attr)?) };
        if attr.comp_mask != 0 || attr.length == 0 || attr.log_align_req > MAX_LOG_ALIGN {
            return Err(EINVAL);
        }
        if !context.reserve_device_memory(attr.length as u64, MAX_BYTES) {
            return Err(ENOMEM);
        }
        let base = map(attr.length).inspect_err(|_| context.release_device_memory(attr.length as u64))?;
        let c = ibv_dm {
            context: context.as_c(),
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: 0,
            handle: context.new_handle(),
        };
        let length = attr.length;
        Ok(DmObject { c: CPart::new(c), context, base, length, users: Users::default() }.publish())
    };
    pointer(alloc())
}

/// `ibv_free_dm(3)`: EBUSY while regions are registered in it.
///
/// # Safety
/// `dm` is null or device memory.
pub unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    let free = || {
        // SAFETY: the caller's.
        unsafe { borrow::<DmObject>(dm)? }.users.none()?;
        // SAFETY: nothing refers to it any more.
        unsafe { retire::<DmObject>(dm) };
        Ok(())
    };
    status(free())
}

unsafe extern "C" fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, length: usize) -> c_int {
    let copy = || {
        // SAFETY: the program passes the device memory that contains the pointer to this function.
        let to = unsafe { borrow::<DmObject>(dm)? }.words(offset, length)?;
        if from.is_null() && length > 0 {
            return Err(EINVAL);
        }
        // SAFETY: the program's bytes, and a range of device memory, to which programs have no pointer.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), length) };
        Ok(())
    };
    status(copy())
}

unsafe extern "C" fn memcpy_from_dm(to: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    let copy = || {
        // SAFETY: as above.
        let from = unsafe { borrow::<DmObject>(dm)? }.words(offset, length)?;
        if to.is_null() && length > 0 {
            return Err(EINVAL);
        }
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), length) };
        Ok(())
    };
    status(copy())
}

/// `ibv_reg_dm_mr(3)`: peers and work requests address the region from 0.
///
/// # Safety
/// `pd` is null or a protection domain, `dm` null or device memory.
pub unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    let register = || {
        // SAFETY: the caller's.
        let (domain, memory) = unsafe { (borrow::<PdObject>(pd)?, borrow::<DmObject>(dm)?) };
        if access & IBV_ACCESS_ZERO_BASED == 0 || !Arc::ptr_eq(domain.context(), &memory.context) {
            return Err(EINVAL);
        }
        let addr = memory.range(offset, length)? as u64;
        let request = match length {
            0 => MrRequest {
                addr: UNMAPPED_ADDRESS,
                length: 1,
                iova: 0,
                access: access | IBV_ACCESS_ON_DEMAND,
                paging: None,
            },
            _ => MrRequest { addr, length: length as u64, iova: 0, access, paging: None },
        };
        let bytes = Bytes::Device { _in_use: memory.users.add() };
        let place = Range { addr: null_mut(), length, bytes };
        // SAFETY: the caller's.
        unsafe { mr::register(pd, request, place) }
    };
    pointer(register())
}
