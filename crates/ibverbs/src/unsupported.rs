//! Verbs of features that this device does not have: other processes' objects, DMA handles, DMA-bufs, completion
//! counters. They return EOPNOTSUPP, as providers without these features do.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::abi::newer::ibv_dmah;
use crate::abi::{ibv_context, ibv_dm, ibv_mr, ibv_pd, ibv_qp};
use crate::errno::{EINVAL, EOPNOTSUPP, Errno};
use crate::object;

/// Null, and EOPNOTSUPP in `errno`.
fn none<T>() -> *mut T {
    EOPNOTSUPP.set();
    null_mut()
}

/// `ibv_import_device(3)`: a NIC inside a process cannot be shared with another process. EINVAL for a descriptor that is
/// no device's, ENODEV for that of another device.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context {
    let errno = match DescriptorKind::of(cmd_fd) {
        DescriptorKind::Command => EOPNOTSUPP,
        DescriptorKind::CharacterDevice => Errno(libc::ENODEV),
        DescriptorKind::Other => EINVAL,
    };
    errno.set();
    null_mut()
}

/// What a descriptor may be that a program imports a device by.
enum DescriptorKind {
    /// An anonymous file, as a context's `cmd_fd` (`open`).
    Command,
    CharacterDevice,
    Other,
}

impl DescriptorKind {
    fn of(fd: c_int) -> DescriptorKind {
        // Only anonymous files have seals.
        // SAFETY: no arguments.
        if unsafe { libc::fcntl(fd, libc::F_GET_SEALS) } >= 0 {
            return DescriptorKind::Command;
        }
        // SAFETY: integers only.
        let mut status: libc::stat = unsafe { object::zeroed() };
        // SAFETY: the structure may be written.
        let failed = unsafe { libc::fstat(fd, &raw mut status) } != 0;
        if failed || status.st_mode & libc::S_IFMT != libc::S_IFCHR {
            return DescriptorKind::Other;
        }
        DescriptorKind::CharacterDevice
    }
}

/// `ibv_import_pd(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_import_pd(_context: *mut ibv_context, _handle: u32) -> *mut ibv_pd {
    none()
}

/// `ibv_unimport_pd(3)`: nothing was imported.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_unimport_pd(_pd: *mut ibv_pd) {}

/// `ibv_import_mr(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_import_mr(_pd: *mut ibv_pd, _handle: u32) -> *mut ibv_mr {
    none()
}

/// `ibv_unimport_mr(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_unimport_mr(_mr: *mut ibv_mr) {}

/// `ibv_import_dm(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_import_dm(_context: *mut ibv_context, _handle: u32) -> *mut ibv_dm {
    none()
}

/// `ibv_unimport_dm(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_unimport_dm(_dm: *mut ibv_dm) {}

/// `ibv_dm_export_dmabuf_fd(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dm_export_dmabuf_fd(_dm: *mut ibv_dm) -> c_int {
    EOPNOTSUPP.set();
    -1
}

/// `ibv_reg_dmabuf_mr(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_reg_dmabuf_mr(
    _pd: *mut ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut ibv_mr {
    none()
}

/// `ibv_alloc_dmah(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_alloc_dmah(_context: *mut ibv_context, _attr: *mut c_void) -> *mut ibv_dmah {
    none()
}

/// `ibv_dealloc_dmah(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dealloc_dmah(_dmah: *mut ibv_dmah) -> c_int {
    EOPNOTSUPP.0
}

/// `ibv_create_comp_cntr(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_create_comp_cntr(_context: *mut ibv_context, _attr: *mut c_void) -> *mut c_void {
    none()
}

/// `ibv_query_comp_cntr_caps(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn _ibv_query_comp_cntr_caps(
    _context: *mut ibv_context,
    _caps: *mut c_void,
    _size: usize,
) -> c_int {
    EOPNOTSUPP.0
}

/// Defines verbs on a completion counter.
macro_rules! counter_verbs {
    ($($name:ident)*) => {
        $(
            /// A verb on a completion counter; there are no counters.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name(_counter: *mut c_void, _value: u64) -> c_int {
                EOPNOTSUPP.0
            }
        )*
    };
}

counter_verbs! {
    ibv_destroy_comp_cntr
    ibv_set_comp_cntr
    ibv_set_err_comp_cntr
    ibv_inc_comp_cntr
    ibv_inc_err_comp_cntr
    ibv_read_comp_cntr
    ibv_read_err_comp_cntr
}

/// `ibv_qp_attach_comp_cntr(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_qp_attach_comp_cntr(
    _qp: *mut ibv_qp,
    _counter: *mut c_void,
    _attr: *mut c_void,
) -> c_int {
    EOPNOTSUPP.0
}

/// The function by which drivers of 2006 registered.
#[unsafe(no_mangle)]
pub extern "C" fn compat_1_1__ibv_register_driver(_name: *const c_void, _init: *const c_void) {}
