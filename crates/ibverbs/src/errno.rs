//! The form of this library's errors: an errno, returned or left in `errno`.

use std::ffi::c_int;

/// An errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub c_int);

/// A descriptor that is not open.
pub const EBADF: Errno = Errno(libc::EBADF);
/// Not permitted.
pub const EACCES: Errno = Errno(libc::EACCES);
/// Invalid argument.
pub const EINVAL: Errno = Errno(libc::EINVAL);
/// The object is in use.
pub const EBUSY: Errno = Errno(libc::EBUSY);
/// The object does not exist, and the call does not create it.
pub const EAGAIN: Errno = Errno(libc::EAGAIN);
/// Not enough memory, or a limit is reached.
pub const ENOMEM: Errno = Errno(libc::ENOMEM);
/// This device does not support the operation.
pub const EOPNOTSUPP: Errno = Errno(libc::EOPNOTSUPP);

/// The result of a verb.
pub type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// Stores the value in the thread's `errno`.
    pub fn set(self) {
        // SAFETY: the C library's own variable of this thread, always valid.
        unsafe { *libc::__errno_location() = self.0 };
    }

    /// The thread's `errno`, which a system call has set.
    pub fn last() -> Errno {
        // SAFETY: as above.
        Errno(unsafe { *libc::__errno_location() })
    }
}

/// For verbs that return 0 or the errno. The errno is also set, because most programs print it.
pub fn status(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            errno.0
        }
    }
}

/// For verbs that return 0, or -1 and `errno`.
pub fn minus_one(result: Result<()>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// For verbs that return an object, or null and `errno`.
pub fn pointer<T>(result: Result<*mut T>) -> *mut T {
    result.unwrap_or_else(|errno| {
        errno.set();
        std::ptr::null_mut()
    })
}

impl From<terrace_nic::Error> for Errno {
    fn from(error: terrace_nic::Error) -> Errno {
        tracing::debug!("{error}");
        Errno(error.errno())
    }
}

impl From<terrace_cm::Error> for Errno {
    fn from(error: terrace_cm::Error) -> Errno {
        match error {
            terrace_cm::Error::TooMany => ENOMEM,
            terrace_cm::Error::InUse => Errno(libc::EADDRINUSE),
            _ => EINVAL,
        }
    }
}
