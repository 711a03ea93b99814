//! Functions of the C library that take a path.
//!
//! `open` and `openat` are variadic in C. Here the mode is a parameter: in every Linux calling convention a variadic
//! argument of that type is passed like a named one, and if a caller passes none, it is not used.

use std::ffi::{CStr, c_char, c_int, c_void};

use libc::mode_t;

use super::real::call_real;
use super::redirect::{redirected, without_root};
use crate::errno::Errno;
use crate::rdma_cm;

/// Defines functions with a path among their arguments.
macro_rules! pass_on {
    ($(fn $name:ident($($before:ident: $before_type:ty),*; path $(, $after:ident: $after_type:ty)*) -> $return:ty;)*) => {
        $(
            /// The function of that name, with the path redirected.
            ///
            /// # Safety
            /// As for the C library's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                $($before: $before_type,)* path: *const c_char $(, $after: $after_type)*
            ) -> $return {
                // SAFETY: the program's path, which it keeps during the call.
                let path = unsafe { redirected(path) };
                call_real!(
                    $name: fn($($before_type,)* *const c_char $(, $after_type)*) -> $return,
                    $($before,)* path.as_ptr() $(, $after)*
                )
            }
        )*
    };
}

/// `DIR *`, `FILE *`, `struct stat *` and similar pointers, which are never dereferenced.
type Opaque = *mut c_void;

/// Defines functions that open a path. This library opens the connection manager's device itself.
macro_rules! opens {
    ($(fn $name:ident($($before:ident: $before_type:ty),*; path, flags $(, $after:ident: $after_type:ty)*);)*) => {
        $(
            /// The function of that name, with the path redirected.
            ///
            /// # Safety
            /// As for the C library's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                $($before: $before_type,)* path: *const c_char, flags: c_int $(, $after: $after_type)*
            ) -> c_int {
                // SAFETY: the program's path, which it keeps during the call.
                if unsafe { names_rdma_cm(path) } {
                    return rdma_cm::open(flags);
                }
                // SAFETY: as above.
                let path = unsafe { redirected(path) };
                call_real!(
                    $name: fn($($before_type,)* *const c_char, c_int $(, $after_type)*) -> c_int,
                    $($before,)* path.as_ptr(), flags $(, $after)*
                )
            }
        )*
    };
}

/// Whether a path is that of the connection manager's device.
///
/// # Safety
/// `path` is null or a C string.
unsafe fn names_rdma_cm(path: *const c_char) -> bool {
    // SAFETY: the caller's.
    !path.is_null() && rdma_cm::is_device(unsafe { CStr::from_ptr(path) }.to_bytes())
}

opens! {
    fn open(; path, flags, mode: mode_t);
    fn open64(; path, flags, mode: mode_t);
    fn __open_2(; path, flags);
    fn __open64_2(; path, flags);
    fn openat(directory: c_int; path, flags, mode: mode_t);
    fn openat64(directory: c_int; path, flags, mode: mode_t);
    fn __openat_2(directory: c_int; path, flags);
    fn __openat64_2(directory: c_int; path, flags);
}

pass_on! {
    fn fopen(; path, mode: *const c_char) -> Opaque;
    fn fopen64(; path, mode: *const c_char) -> Opaque;
    fn opendir(; path) -> Opaque;
    fn scandir(; path, list: Opaque, filter: Opaque, compare: Opaque) -> c_int;
    fn scandir64(; path, list: Opaque, filter: Opaque, compare: Opaque) -> c_int;
    fn stat(; path, answer: Opaque) -> c_int;
    fn stat64(; path, answer: Opaque) -> c_int;
    fn lstat(; path, answer: Opaque) -> c_int;
    fn lstat64(; path, answer: Opaque) -> c_int;
    fn fstatat(directory: c_int; path, answer: Opaque, flags: c_int) -> c_int;
    fn fstatat64(directory: c_int; path, answer: Opaque, flags: c_int) -> c_int;
    fn statx(directory: c_int; path, flags: c_int, mask: u32, answer: Opaque) -> c_int;
    fn __xstat(version: c_int; path, answer: Opaque) -> c_int;
    fn __xstat64(version: c_int; path, answer: Opaque) -> c_int;
    fn __lxstat(version: c_int; path, answer: Opaque) -> c_int;
    fn __lxstat64(version: c_int; path, answer: Opaque) -> c_int;
    fn __fxstatat(version: c_int, directory: c_int; path, answer: Opaque, flags: c_int) -> c_int;
    fn __fxstatat64(version: c_int, directory: c_int; path, answer: Opaque, flags: c_int) -> c_int;
    fn access(; path, mode: c_int) -> c_int;
    fn eaccess(; path, mode: c_int) -> c_int;
    fn euidaccess(; path, mode: c_int) -> c_int;
    fn faccessat(directory: c_int; path, mode: c_int, flags: c_int) -> c_int;
    fn readlink(; path, target: *mut c_char, size: usize) -> isize;
    fn readlinkat(directory: c_int; path, target: *mut c_char, size: usize) -> isize;
    fn getxattr(; path, name: *const c_char, value: Opaque, size: usize) -> isize;
    fn lgetxattr(; path, name: *const c_char, value: Opaque, size: usize) -> isize;
    fn listxattr(; path, list: *mut c_char, size: usize) -> isize;
    fn llistxattr(; path, list: *mut c_char, size: usize) -> isize;
    fn __readlink_chk(; path, target: *mut c_char, size: usize, room: usize) -> isize;
    fn __readlinkat_chk(directory: c_int; path, target: *mut c_char, size: usize, room: usize) -> isize;
}

/// Removes the tree's root from a path that `realpath` or a similar function wrote; the path never becomes longer.
///
/// # Safety
/// `found` is null or a C string that may be written.
unsafe fn remove_root(found: *mut c_char) -> *mut c_char {
    if found.is_null() {
        return found;
    }
    // SAFETY: the caller's.
    if let Some(shown) = without_root(unsafe { CStr::from_ptr(found) }) {
        // SAFETY: `shown` is the end of `found`, terminator included; the two may overlap.
        unsafe { std::ptr::copy(shown.as_ptr(), found, shown.to_bytes_with_nul().len()) };
    }
    found
}

/// `realpath(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realpath(path: *const c_char, answer: *mut c_char) -> *mut c_char {
    // SAFETY: the program's path, which it keeps during the call.
    let path = unsafe { redirected(path) };
    let found = call_real!(realpath: fn(*const c_char, *mut c_char) -> *mut c_char, path.as_ptr(), answer);
    // SAFETY: null or the answer.
    unsafe { remove_root(found) }
}

/// `realpath(3)` of programs compiled with `_FORTIFY_SOURCE`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __realpath_chk(
    path: *const c_char,
    answer: *mut c_char,
    room: usize,
) -> *mut c_char {
    if !answer.is_null() && room < libc::PATH_MAX as usize {
        // The C library aborts the program here.
        return call_real!(
            __realpath_chk: fn(*const c_char, *mut c_char, usize) -> *mut c_char, path, answer, room
        );
    }
    // SAFETY: the caller's.
    unsafe { realpath(path, answer) }
}

/// `canonicalize_file_name(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    if path.is_null() {
        Errno(libc::EINVAL).set();
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's.
    unsafe { realpath(path, std::ptr::null_mut()) }
}
