//! The functions of `terrace.h` for memory that the program swaps itself (NP-RDMA, section 6.2).

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use terrace_hostmem::HostRange;
use terrace_memory::{AccessError, RegionPolicy};
use terrace_nic::{MrRequest, Paging};
use terrace_pages::ProgramPages;

use crate::abi::{ibv_mr, ibv_pd};
use crate::errno::{EBUSY, EINVAL, ENOMEM, Result, pointer, status};
use crate::mr::{Bytes, MrObject, Range, register};
use crate::np;
use crate::object::borrow;

/// `terrace_bring_pages`.
type BringPages = unsafe extern "C" fn(context: *mut c_void, addr: *mut c_void, length: usize);

/// The program's function and its argument.
struct Bring {
    function: BringPages,
    context: *mut c_void,
}

// SAFETY: the program promises that the function may be called from any thread (`terrace.h`).
unsafe impl Send for Bring {}
// SAFETY: as above.
unsafe impl Sync for Bring {}

impl Bring {
    fn call(&self, range: HostRange) {
        // SAFETY: the function and its argument are valid while the region exists, as `terrace.h` demands.
        unsafe { (self.function)(self.context, range.addr as *mut c_void, range.len as usize) };
    }
}

/// `terrace_reg_swapped_mr`: a region of whole pages, all of them present, which the program takes away and brings.
///
/// # Safety
/// `pd` is null or a protection domain; `bring` and `context` are valid while the region exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_reg_swapped_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
    bring: Option<BringPages>,
    context: *mut c_void,
) -> *mut ibv_mr {
    let register = || {
        let bring = Bring { function: bring.ok_or(EINVAL)?, context };
        let range = HostRange { addr: addr as u64, len: length as u64 };
        let pages = ProgramPages::new(range, Box::new(move |range| bring.call(range)));
        let pages = Arc::new(pages.map_err(|_| EINVAL)?);
        let (pager, pattern) = (pages.clone(), np::signature_page());
        let paging = Some(Paging { pager, pattern, policy: RegionPolicy::Wait });
        let access = access as c_uint;
        let request = MrRequest { addr: range.addr, length: range.len, iova: range.addr, access, paging };
        let range = Range { addr, length, bytes: Bytes::Swapped(pages) };
        // SAFETY: the caller's.
        unsafe { register(pd, request, range) }
    };
    pointer(register())
}

/// `terrace_swap_out`: the program is about to take pages away.
///
/// # Safety
/// `mr` is null or a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_swap_out(mr: *mut ibv_mr, addr: *mut c_void, length: usize) -> c_int {
    // SAFETY: the caller's.
    status(unsafe { with_pages(mr, addr, length, ProgramPages::swap_out) })
}

/// `terrace_swap_in`: the program has brought pages.
///
/// # Safety
/// `mr` is null or a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_swap_in(mr: *mut ibv_mr, addr: *mut c_void, length: usize) -> c_int {
    // SAFETY: the caller's.
    status(unsafe { with_pages(mr, addr, length, ProgramPages::swap_in) })
}

/// # Safety
/// `mr` is null or a region.
unsafe fn with_pages(
    mr: *mut ibv_mr,
    addr: *mut c_void,
    length: usize,
    act: impl FnOnce(&ProgramPages, HostRange) -> std::result::Result<(), AccessError>,
) -> Result<()> {
    // SAFETY: the caller's.
    let pages = unsafe { borrow::<MrObject>(mr)? }.swapped().ok_or(EINVAL)?;
    let range = HostRange { addr: addr as u64, len: length as u64 };
    act(pages, range).map_err(|error| match error {
        AccessError::NotReady => EBUSY,
        AccessError::NoSpace => ENOMEM,
        _ => EINVAL,
    })
}
