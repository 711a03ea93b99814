//! The functions that ours stand in front of.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// A function of the C library, looked up when it is first needed.
pub struct Real {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Real {
    /// The function of that name.
    pub const fn new(name: &'static CStr) -> Real {
        Real { name, address: AtomicPtr::new(null_mut()) }
    }

    /// Its address in the next library that has it; null if there is none (old entry points on new systems).
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a C string; any thread may look a symbol up.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Relaxed);
        found
    }
}

/// What a function that does not exist here answers with, besides ENOSYS.
pub trait Failure {
    /// -1 or null.
    fn failure() -> Self;
}

impl Failure for i32 {
    fn failure() -> i32 {
        -1
    }
}

impl Failure for isize {
    fn failure() -> isize {
        -1
    }
}

impl<T> Failure for *mut T {
    fn failure() -> *mut T {
        null_mut()
    }
}

/// Calls the next function of a name and type, or fails with ENOSYS.
macro_rules! call_real {
    ($name:ident: fn($($type:ty),*) -> $return:ty, $($argument:expr),*) => {{
        static REAL: $crate::shim::real::Real = {
            const NAME: &str = concat!(stringify!($name), "\0");
            $crate::shim::real::Real::new(match std::ffi::CStr::from_bytes_with_nul(NAME.as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("one terminator, at the end"),
            })
        };
        let address = REAL.address();
        if address.is_null() {
            $crate::errno::Errno(libc::ENOSYS).set();
            <$return as $crate::shim::real::Failure>::failure()
        } else {
            // SAFETY: the C library's function of that name has this type.
            let function = unsafe {
                std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> $return>(address)
            };
            // SAFETY: the arguments are the program's own, who called the function of this name.
            unsafe { function($($argument),*) }
        }
    }};
}

pub(super) use call_real;
