//! Memory windows.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use terrace_nic::{Mw, MwKind};

use crate::abi::{IBV_MW_TYPE_1, IBV_MW_TYPE_2, ibv_mw, ibv_mw_bind_info, ibv_pd};
use crate::context::Context;
use crate::errno::{EINVAL, Result, pointer, status};
use crate::mr::MrObject;
use crate::object::{CPart, Object, borrow, retire};
use crate::pd::{PdObject, Use};
use crate::room;

/// `ibv_mw`.
#[repr(C)]
pub struct MwObject {
    c: CPart<ibv_mw>,
    _context: Arc<Context>,
    mw: Arc<Mw>,
    _pd: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for MwObject {
    type C = ibv_mw;
}

impl MwObject {
    /// The NIC's window.
    pub fn mw(&self) -> &Arc<Mw> {
        &self.mw
    }

    /// The key to which a work request with this rkey binds a type 2 window: the low 8 bits are the program's choice,
    /// the others are the window's.
    pub fn key_with_tag_of(&self, rkey: u32) -> u32 {
        self.mw.rkey() & !0xff | rkey & 0xff
    }

    /// Stores the key of a posted bind where the program reads it.
    pub fn set_rkey(&self, rkey: u32) {
        // SAFETY: our own structure; only posting a bind changes the field.
        unsafe { (*self.c.get()).rkey = rkey };
    }
}

/// `ibv_alloc_mw(3)`.
///
/// # Safety
/// `pd` is null or a protection domain.
pub unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: c_uint) -> *mut ibv_mw {
    let alloc = || {
        // SAFETY: the caller's.
        let domain = unsafe { borrow::<PdObject>(pd)? };
        room::for_object()?;
        let mw = domain.pd().alloc_mw(match kind {
            IBV_MW_TYPE_1 => MwKind::Type1,
            IBV_MW_TYPE_2 => MwKind::Type2,
            _ => return Err(EINVAL),
        })?;
        let context = domain.context().clone();
        let (rkey, handle) = (mw.rkey(), context.new_handle());
        let c = ibv_mw { context: context.as_c(), pd, rkey, handle, type_: kind };
        Ok(MwObject { c: CPart::new(c), _context: context, mw, _pd: domain.in_use() }.publish())
    };
    pointer(alloc())
}

/// `ibv_dealloc_mw(3)`: unbinds a bound window.
///
/// # Safety
/// `mw` is null or a window.
pub unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let dealloc = || {
        // SAFETY: the caller's.
        unsafe { borrow::<MwObject>(mw)? }.mw.dealloc()?;
        // SAFETY: the NIC no longer refers to it.
        unsafe { retire::<MwObject>(mw) };
        Ok(())
    };
    status(dealloc())
}

/// The key of a bind's region. Without a region the range must be empty: such a bind unbinds the window.
///
/// # Safety
/// `info.mr` is null or a region.
pub unsafe fn bound_region(info: &ibv_mw_bind_info) -> Result<u32> {
    if info.mr.is_null() {
        return if info.addr == 0 && info.length == 0 { Ok(0) } else { Err(EINVAL) };
    }
    // SAFETY: the caller's.
    Ok(unsafe { borrow::<MrObject>(info.mr)? }.mr().lkey())
}
