//! Memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use terrace_files::{FileExtent, FileRegion};
use terrace_hostmem::HostRange;
use terrace_nic::{Mr, MrRequest, Sge};
use terrace_pages::ProgramPages;
use terrace_sync::Mutex;

use crate::abi::newer::{ibv_buf, ibv_mr_init_attr, mr_init};
use crate::abi::{
    IB_UVERBS_ACCESS_OPTIONAL_FIRST, IB_UVERBS_ACCESS_OPTIONAL_LAST, IBV_REREG_MR_CHANGE_ACCESS,
    IBV_REREG_MR_CHANGE_PD, IBV_REREG_MR_CHANGE_TRANSLATION, ibv_mr, ibv_pd, ibv_sge,
};
use crate::buffer;
use crate::context::Context;
use crate::errno::{EACCES, EBADF, EINVAL, EOPNOTSUPP, Result, pointer, status};
use crate::files::{self, FileLease};
use crate::object::{self, CPart, Object, borrow, retire};
use crate::paged::Lease;
use crate::pd::{PdObject, Use};
use crate::room;

/// Access flags that a device may ignore if it does not implement them (relaxed ordering and similar).
const OPTIONAL_ACCESS: u32 = (IB_UVERBS_ACCESS_OPTIONAL_LAST << 1) - IB_UVERBS_ACCESS_OPTIONAL_FIRST;

/// `IBV_REREG_MR_ERR_INPUT`: the region is unchanged. It is the only error.
const REREG_REFUSED: c_int = -1;

/// `ibv_mr`.
#[repr(C)]
pub struct MrObject {
    c: CPart<ibv_mr>,
    context: Arc<Context>,
    mr: Arc<Mr>,
    pd: Mutex<Use>,
    access: AtomicU32,
    bytes: Bytes,
}

/// Where a region's bytes are, and the reference that keeps them there.
pub enum Bytes {
    /// Memory of the program. The lease is of its range, where memory is paged.
    Program(Mutex<Option<Lease>>),
    /// Device memory.
    Device { _in_use: Use },
    /// A file.
    File(FileLease),
    /// Memory that the program swaps itself.
    Swapped(Arc<ProgramPages>),
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for MrObject {
    type C = ibv_mr;
}

impl MrObject {
    /// The NIC's region.
    pub fn mr(&self) -> &Arc<Mr> {
        &self.mr
    }

    /// The file, if the region is one.
    ///
    /// # Errors
    /// EINVAL if it is none, or its process's parent made it.
    pub fn file(&self) -> Result<&Arc<FileRegion>> {
        match &self.bytes {
            Bytes::File(lease) => lease.region().ok_or(EINVAL),
            _ => Err(EINVAL),
        }
    }

    /// The pages, if the program swaps them itself.
    pub fn swapped(&self) -> Option<&ProgramPages> {
        match &self.bytes {
            Bytes::Swapped(pages) => Some(pages),
            _ => None,
        }
    }

    /// Changes domain and access of a region that is a file.
    fn change_file(&self, domain: Option<&PdObject>, access: Option<u32>) -> Result<()> {
        let writes = access.is_some_and(|access| access & files::WRITES != 0);
        if writes && !self.file()?.is_writable() {
            return Err(EACCES);
        }
        self.change_terms(domain, access)
    }

    /// Changes domain and access, and nothing of the memory.
    fn change_terms(&self, domain: Option<&PdObject>, access: Option<u32>) -> Result<()> {
        self.mr.rereg(domain.map(PdObject::pd), None, access, None)?;
        self.access.store(access.unwrap_or(self.access.load(Relaxed)), Relaxed);
        Ok(())
    }

    /// Changes domain, range (address, length, iova) and access of a region in the program's memory, where given. If range or
    /// access change, the region may gain or lose its lease. Changes nothing on error.
    fn change_program(
        &self,
        lease: &Mutex<Option<Lease>>,
        domain: Option<&PdObject>,
        range: Option<(u64, u64, u64)>,
        access: Option<u32>,
    ) -> Result<()> {
        // The lock is held throughout, so that concurrent changes do not interleave.
        let mut lease = lease.lock();
        let (addr, len, _) = range.unwrap_or((self.mr.addr(), self.mr.length(), 0));
        let wanted = access.unwrap_or(self.access.load(Relaxed));
        let decided_anew = range.is_some() || access.is_some();
        let new = if decided_anew { self.context.lease(HostRange { addr, len }, wanted)? } else { None };
        let paging = decided_anew.then(|| new.as_ref().and_then(Lease::paging));
        self.mr.rereg(domain.map(PdObject::pd), range, access, paging)?;
        self.access.store(wanted, Relaxed);
        if decided_anew {
            *lease = new;
        }
        Ok(())
    }
}

/// The range of a region for C, and its bytes.
pub struct Range {
    /// First byte; null in device memory.
    pub addr: *mut c_void,
    /// Length in bytes.
    pub length: usize,
    /// Where the bytes are.
    pub bytes: Bytes,
}

/// Registers a region and creates its object.
///
/// # Safety
/// `pd` is null or a protection domain.
pub unsafe fn register(pd: *mut ibv_pd, request: MrRequest, range: Range) -> Result<*mut ibv_mr> {
    // SAFETY: the caller's.
    let object = unsafe { borrow::<PdObject>(pd)? };
    room::for_object()?;
    let access = request.access & !OPTIONAL_ACCESS;
    let mr = object.pd().reg_mr(MrRequest { access, ..request })?;
    let context = object.context().clone();
    let Range { addr, length, bytes } = range;
    let (handle, lkey, rkey) = (context.new_handle(), mr.lkey(), mr.rkey());
    let c = CPart::new(ibv_mr { context: context.as_c(), pd, addr, length, handle, lkey, rkey });
    let (pd, access) = (Mutex::new(object.in_use()), AtomicU32::new(access));
    Ok(MrObject { c, context, mr, pd, access, bytes }.publish())
}

/// As [`register`], for memory of the program.
///
/// # Safety
/// As for [`register`].
unsafe fn register_range(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<*mut ibv_mr> {
    let range = HostRange { addr: addr as u64, len: length as u64 };
    // SAFETY: the caller's.
    let lease = unsafe { borrow::<PdObject>(pd)? }.context().lease(range, access)?;
    let paging = lease.as_ref().and_then(Lease::paging);
    let request = MrRequest { addr: range.addr, length: range.len, iova, access, paging };
    // SAFETY: the caller's.
    unsafe { register(pd, request, Range { addr, length, bytes: Bytes::Program(Mutex::new(lease)) }) }
}

/// As [`register`], for the file behind a descriptor. Peers name its bytes by `iova` plus the offset from the extent's.
///
/// # Errors
/// EBADF for no descriptor; EOPNOTSUPP for one of no regular file; EACCES if `access` permits more than the descriptor is
/// open for; EMFILE and ENFILE without a descriptor left.
///
/// # Safety
/// As for [`register`].
pub unsafe fn register_file(
    pd: *mut ibv_pd,
    fd: c_int,
    extent: FileExtent,
    iova: u64,
    access: c_uint,
) -> Result<*mut ibv_mr> {
    if fd < 0 {
        return Err(EBADF);
    }
    let range = extent.range().ok_or(EINVAL)?;
    // SAFETY: borrowed for this call. A number that is no descriptor is an error of the first system call.
    let descriptor = unsafe { BorrowedFd::borrow_raw(fd) };
    let file = files::open(descriptor, access & files::WRITES != 0, extent)?;
    let rest = file.region().map_or(0, |region| region.file_len().saturating_sub(extent.offset));
    let length = extent.len.unwrap_or(rest) as usize;
    let paging = file.paging();
    let request = MrRequest { addr: range.addr, length: range.len, iova, access, paging };
    let range = Range { addr: null_mut(), length, bytes: Bytes::File(file) };
    // SAFETY: the caller's.
    unsafe { register(pd, request, range) }
}

/// `ibv_reg_mr(3)`.
///
/// # Safety
/// `pd` is null or a protection domain. The memory need not be mapped: an access to it then fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's.
    pointer(unsafe { register_range(pd, addr, length, addr as u64, access as c_uint) })
}

/// `ibv_reg_mr_iova`: peers address the region from `iova`.
///
/// # Safety
/// As for `ibv_reg_mr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's.
    pointer(unsafe { register_range(pd, addr, length, iova, access as c_uint) })
}

/// The symbol that the macros of `verbs.h` call if `access` may contain optional flags.
///
/// # Safety
/// As for `ibv_reg_mr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller's.
    pointer(unsafe { register_range(pd, addr, length, iova, access) })
}

/// `ibv_reg_mr_ex` (rdma-core 60): by address, optionally with another base address for peers; or a file, by a
/// descriptor. The file's bytes are named by their offset from `fd_offset`, plus `iova` if that is given. With a length of
/// 0 or `SIZE_MAX` the region ends where the file ends, at the time of an access.
///
/// # Safety
/// `pd` is null or a protection domain, `attr` null or attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    let register = || {
        // SAFETY: the caller's.
        let attr = unsafe { object::read(attr)? };
        let of_file = mr_init::FD | mr_init::FD_OFFSET;
        if attr.comp_mask & !(mr_init::IOVA | mr_init::ADDR | mr_init::BUF | of_file) != 0 {
            return Err(EOPNOTSUPP);
        }
        let has_iova = attr.comp_mask & mr_init::IOVA != 0;
        if attr.comp_mask & of_file != 0 {
            if attr.comp_mask & mr_init::FD == 0 || attr.comp_mask & (mr_init::ADDR | mr_init::BUF) != 0 {
                return Err(EINVAL);
            }
            let offset = if attr.comp_mask & mr_init::FD_OFFSET != 0 { attr.fd_offset } else { 0 };
            let len = Some(attr.length as u64).filter(|_| !matches!(attr.length, 0 | usize::MAX));
            let (extent, iova) = (FileExtent { offset, len }, if has_iova { attr.iova } else { 0 });
            // SAFETY: the caller's.
            return unsafe { register_file(pd, attr.fd, extent, iova, attr.access as c_uint) };
        }
        if attr.comp_mask & mr_init::ADDR == 0 {
            return Err(EINVAL);
        }
        if attr.comp_mask & mr_init::BUF != 0 {
            // SAFETY: the caller's.
            unsafe { buffer::check_range(pd, attr)? };
        }
        let iova = if has_iova { attr.iova } else { attr.addr as u64 };
        // SAFETY: the caller's.
        unsafe { register_range(pd, attr.addr, attr.length, iova, attr.access as c_uint) }
    };
    pointer(register())
}

/// `ibv_reg_buf_mr(3)`.
///
/// # Safety
/// `pd` is null or a protection domain, `buf` null or a buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let comp_mask = mr_init::ADDR | mr_init::BUF;
    let (fd, fd_offset, dmah) = (-1, 0, null_mut());
    let mut attr = ibv_mr_init_attr { length, access, comp_mask, iova: 0, addr, fd, fd_offset, dmah, buf };
    // SAFETY: the caller's; the attributes are ours.
    unsafe { ibv_reg_mr_ex(pd, &raw mut attr) }
}

/// `ibv_rereg_mr(3)`: the keys do not change. The base address for peers becomes the new address.
///
/// # Safety
/// `mr` is null or a region, `pd` null or a protection domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    // SAFETY: the caller's.
    match unsafe { reregister(mr, flags as c_uint, pd, addr, length, access as c_uint) } {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            REREG_REFUSED
        }
    }
}

/// # Safety
/// As for `ibv_rereg_mr`.
unsafe fn reregister(
    mr: *mut ibv_mr,
    flags: c_uint,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
) -> Result<()> {
    let (new_pd, new_place, new_access) = (
        flags & IBV_REREG_MR_CHANGE_PD != 0,
        flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0,
        flags & IBV_REREG_MR_CHANGE_ACCESS != 0,
    );
    let known = IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS;
    let senseless = flags == 0
        || flags & !known != 0
        || (new_place && (addr.is_null() || length == 0))
        || (access != 0 && !new_access);
    if senseless {
        return Err(EINVAL);
    }
    // SAFETY: the caller's.
    let object = unsafe { borrow::<MrObject>(mr)? };
    // SAFETY: the caller's.
    let domain = if new_pd { Some(unsafe { borrow::<PdObject>(pd)? }) } else { None };
    if domain.is_some_and(|domain| !Arc::ptr_eq(domain.context(), &object.context)) {
        return Err(EINVAL);
    }
    let range = new_place.then_some((addr as u64, length as u64, addr as u64));
    let access = new_access.then_some(access & !OPTIONAL_ACCESS);
    match &object.bytes {
        Bytes::Program(lease) => object.change_program(lease, domain, range, access)?,
        Bytes::File(_) if !new_place => object.change_file(domain, access)?,
        Bytes::Swapped(_) if !new_place => object.change_terms(domain, access)?,
        Bytes::File(_) | Bytes::Swapped(_) | Bytes::Device { .. } => return Err(EINVAL),
    }
    let c = object.c.get();
    if let Some(domain) = domain {
        *object.pd.lock() = domain.in_use();
        // SAFETY: our own structure; only this verb changes these fields.
        unsafe { (*c).pd = pd };
    }
    if new_place {
        // SAFETY: as above.
        unsafe { ((*c).addr, (*c).length) = (addr, length) };
    }
    Ok(())
}

/// `ibv_dereg_mr(3)`: EBUSY while windows are bound to the region.
///
/// # Safety
/// `mr` is null or a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let deregister = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<MrObject>(mr)? };
        object.mr.dereg()?;
        object.swapped().into_iter().for_each(ProgramPages::close);
        // SAFETY: the NIC no longer refers to it.
        unsafe { retire::<MrObject>(mr) };
        Ok(())
    };
    status(deregister())
}

/// Limit of the ranges of one `ibv_advise_mr`. The kernel's limit has the same order of magnitude.
const MAX_ADVISED_RANGES: u32 = 4096;

/// `ibv_advise_mr(3)`.
///
/// # Safety
/// `pd` is null or a protection domain; `sg_list` has `num_sge` elements.
pub unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: c_uint,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sge: u32,
) -> c_int {
    let advise = || {
        // SAFETY: the caller's.
        let object = unsafe { borrow::<PdObject>(pd)? };
        if sg_list.is_null() || num_sge == 0 || num_sge > MAX_ADVISED_RANGES {
            return Err(EINVAL);
        }
        // SAFETY: the caller's.
        let ranges = unsafe { std::slice::from_raw_parts(sg_list, num_sge as usize) };
        let sge = |range: &ibv_sge| Sge { addr: range.addr, length: range.length, lkey: range.lkey };
        let ranges: Vec<Sge> = ranges.iter().map(sge).collect();
        Ok(object.pd().advise_mr(advice, flags, &ranges)?)
    };
    status(advise())
}
