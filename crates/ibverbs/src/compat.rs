//! The first version of the verbs, of 2005, whose structures have another layout. Its symbols have the version node
//! IBVERBS_1.0.
//!
//! Such a program gets an empty list of devices, so it never has an object for the other functions. Those exist so that
//! the program starts. See `docs/decisions/0008-ibverbs-1-0-lists-no-devices.md`.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::errno::{ENOMEM, EOPNOTSUPP};

/// `ibv_get_device_list` of version 1.0: a list without devices.
///
/// # Safety
/// `count` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn compat_1_0__ibv_get_device_list(count: *mut c_int) -> *mut *mut c_void {
    if !count.is_null() {
        // SAFETY: the caller's.
        unsafe { *count = 0 };
    }
    // SAFETY: no preconditions. The list is one null pointer, its end.
    let list = unsafe { libc::calloc(1, size_of::<*mut c_void>()) };
    if list.is_null() {
        ENOMEM.set();
    }
    list.cast()
}

/// `ibv_free_device_list` of version 1.0.
///
/// # Safety
/// `list` is null or came from the function above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn compat_1_0__ibv_free_device_list(list: *mut *mut c_void) {
    // SAFETY: from `calloc`; null is allowed.
    unsafe { libc::free(list.cast()) };
}

/// Defines functions that return EOPNOTSUPP for all arguments.
macro_rules! status {
    ($($name:ident)*) => {
        $(
            /// EOPNOTSUPP.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_int {
                EOPNOTSUPP.0
            }
        )*
    };
}

/// Defines functions that return -1 and set EOPNOTSUPP.
macro_rules! failure {
    ($($name:ident)*) => {
        $(
            /// -1, and EOPNOTSUPP in `errno`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> c_int {
                EOPNOTSUPP.set();
                -1
            }
        )*
    };
}

/// Defines functions that return null and set EOPNOTSUPP.
macro_rules! null {
    ($($name:ident)*) => {
        $(
            /// Null, and EOPNOTSUPP in `errno`.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> *mut c_void {
                EOPNOTSUPP.set();
                null_mut()
            }
        )*
    };
}

/// Defines functions that do nothing.
macro_rules! nothing {
    ($($name:ident)*) => {
        $(
            /// Does nothing.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() {}
        )*
    };
}

/// There is no device and thus no GUID.
#[unsafe(no_mangle)]
pub extern "C" fn compat_1_0__ibv_get_device_guid() -> u64 {
    0
}

null! {
    compat_1_0__ibv_get_device_name
    compat_1_0__ibv_open_device
    compat_1_0__ibv_alloc_pd
    compat_1_0__ibv_reg_mr
    compat_1_0__ibv_create_cq
    compat_1_0__ibv_create_srq
    compat_1_0__ibv_create_qp
    compat_1_0__ibv_create_ah
}

nothing! {
    compat_1_0__ibv_ack_async_event
    compat_1_0__ibv_ack_cq_events
}

failure! {
    compat_1_0__ibv_get_async_event
    compat_1_0__ibv_query_gid
    compat_1_0__ibv_query_pkey
    compat_1_0__ibv_get_cq_event
}

status! {
    compat_1_0__ibv_close_device
    compat_1_0__ibv_query_device
    compat_1_0__ibv_query_port
    compat_1_0__ibv_dealloc_pd
    compat_1_0__ibv_dereg_mr
    compat_1_0__ibv_resize_cq
    compat_1_0__ibv_destroy_cq
    compat_1_0__ibv_modify_srq
    compat_1_0__ibv_query_srq
    compat_1_0__ibv_destroy_srq
    compat_1_0__ibv_query_qp
    compat_1_0__ibv_modify_qp
    compat_1_0__ibv_destroy_qp
    compat_1_0__ibv_destroy_ah
    compat_1_0__ibv_attach_mcast
    compat_1_0__ibv_detach_mcast
}
