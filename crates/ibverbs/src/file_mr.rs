//! The functions of `terrace.h` for regions that are files.

use std::ffi::{c_int, c_uint};
use std::io::ErrorKind;

use terrace_files::{FileExtent, LayoutError};

use crate::abi::{ibv_mr, ibv_pd};
use crate::errno::{EACCES, EBUSY, Errno, Result, pointer, status};
use crate::mr::{MrObject, register_file};
use crate::object::borrow;

/// `terrace_bind_file`: a region of all of the file behind a descriptor, however long it becomes. Its addresses are offsets
/// in the file.
///
/// # Safety
/// `pd` is null or a protection domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_bind_file(pd: *mut ibv_pd, fd: c_int, access: c_int) -> *mut ibv_mr {
    // SAFETY: the caller's.
    pointer(unsafe { register_file(pd, fd, FileExtent::WHOLE, 0, access as c_uint) })
}

/// `terrace_truncate`: makes the file of a region this many bytes long. No access beyond a new end runs afterwards.
///
/// # Safety
/// `mr` is null or a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_truncate(mr: *mut ibv_mr, length: u64) -> c_int {
    // SAFETY: the caller's.
    let object = unsafe { borrow::<MrObject>(mr) };
    status(object.and_then(|object| changed(object.file()?.truncate(length))))
}

/// `terrace_punch`: gives the blocks of a part of the file of a region back. It reads as zeros afterwards.
///
/// # Safety
/// `mr` is null or a region.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrace_punch(mr: *mut ibv_mr, offset: u64, length: u64) -> c_int {
    // SAFETY: the caller's.
    let object = unsafe { borrow::<MrObject>(mr) };
    status(object.and_then(|object| changed(object.file()?.punch_hole(offset, length))))
}

fn changed(result: std::result::Result<(), LayoutError>) -> Result<()> {
    result.map_err(|error| match error {
        LayoutError::NotWritable => EACCES,
        LayoutError::System(error) if error.kind() == ErrorKind::ResourceBusy => EBUSY,
        LayoutError::System(error) => Errno(error.raw_os_error().unwrap_or(libc::EIO)),
    })
}
