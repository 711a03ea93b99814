//! The C library's functions that this library interposes.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The address of a function that does not exist.
const MISSING: *mut c_void = std::ptr::without_provenance_mut(1);

/// A function of the C library.
pub struct Real {
    name: &'static CStr,
    /// Null until [`find_all`]; [`MISSING`] if the system has no such function.
    address: AtomicPtr<c_void>,
}

impl Real {
    const fn new(name: &'static CStr) -> Real {
        Real { name, address: AtomicPtr::new(null_mut()) }
    }

    /// The function's address in the next library that defines it; null if there is none (old entry points on new
    /// systems).
    pub fn address(&self) -> *mut c_void {
        let known = self.address.load(Relaxed);
        // The address is null before `find_all`, if another library's constructor runs before this library's.
        let known = if known.is_null() { self.find() } else { known };
        if known == MISSING { null_mut() } else { known }
    }

    /// Whether the function has been looked up.
    pub fn is_found(&self) -> bool {
        !self.address.load(Relaxed).is_null()
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        // SAFETY: a C string; any thread may look a symbol up.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        let found = if found.is_null() { MISSING } else { found };
        self.address.store(found, Relaxed);
        found
    }
}

/// Defines a function of the C library for each name, and a list of them.
macro_rules! functions {
    ($($name:ident)*) => {
        /// The functions by name.
        #[allow(non_upper_case_globals)]
        pub mod functions {
            use super::{CStr, Real};

            $(
                #[doc = concat!("The C library's `", stringify!($name), "`.")]
                pub static $name: Real = {
                    const NAME: &str = concat!(stringify!($name), "\0");
                    Real::new(match CStr::from_bytes_with_nul(NAME.as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("one terminator, at the end"),
                    })
                };
            )*
        }

        static ALL: &[&Real] = &[$(&functions::$name),*];
    };
}

functions! {
    __fxstat __fxstat64 __fxstatat __fxstatat64 __lxstat __lxstat64 __open64_2 __open_2 __openat64_2 __openat_2
    __readlink_chk __readlinkat_chk __realpath_chk __sysv_signal __xstat __xstat64 access connect eaccess euidaccess faccessat
    fopen fopen64 free fstat fstat64 fstatat fstatat64 getxattr gnu_get_libc_version lgetxattr listxattr llistxattr lstat lstat64 open open64 openat
    openat64 opendir pthread_sigmask readlink readlinkat realloc reallocarray realpath scandir scandir64 send sendmsg sendto sigaction signal sigprocmask socket stat stat64
    statx
}

/// Looks up all functions when the library is loaded. A lookup at the first call could be in a signal handler, or in a
/// thread for which the holder of the dynamic linker's lock waits.
pub fn find_all() {
    for function in ALL {
        function.find();
    }
}

/// The result of a missing function, besides ENOSYS.
pub trait Failure {
    /// -1, null or nothing.
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

impl Failure for () {
    fn failure() {}
}

impl<T> Failure for *mut T {
    fn failure() -> *mut T {
        null_mut()
    }
}

/// Calls the next function of a name and type, or fails with ENOSYS.
macro_rules! call_real {
    ($name:ident: fn($($type:ty),*) -> $return:ty, $($argument:expr),*) => {{
        let address = $crate::shim::real::functions::$name.address();
        if address.is_null() {
            $crate::errno::Errno(libc::ENOSYS).set();
            <$return as $crate::shim::real::Failure>::failure()
        } else {
            // SAFETY: the C library's function of that name has this type.
            let function = unsafe {
                std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($type),*) -> $return>(address)
            };
            // SAFETY: the arguments are those of the program's call to the function of this name.
            unsafe { function($($argument),*) }
        }
    }};
}

pub(super) use call_real;
