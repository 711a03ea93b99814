//! The functions of the next library of the same names: the C library's, or those of an allocator that is preloaded, too.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// A function of the next library.
pub(crate) struct Next {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Next {
        Next { name, address: AtomicPtr::new(null_mut()) }
    }

    /// Its address. The C library has all of them.
    pub(crate) fn address(&self) -> *mut c_void {
        let known = self.address.load(Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: a C string; any thread may look a symbol up. The C library allocates for that only after an error.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.address.store(found, Relaxed);
        found
    }
}

/// Calls the next function of a name and type.
macro_rules! call_next {
    ($name:ident: fn($($type:ty),*) -> $return:ty, $($argument:expr),*) => {{
        static NEXT: $crate::next::Next = $crate::next::Next::new({
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("one terminator, at the end"),
            }
        });
        // SAFETY: the C library's function of that name has this type.
        let function = unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> $return>(NEXT.address())
        };
        // SAFETY: the arguments are those of the program's call to the function of this name.
        unsafe { function($($argument),*) }
    }};
}

pub(crate) use call_next;
