//! `pthread_cancel`, which programs may use on threads that are in the middle of a verb.

use std::ffi::c_int;
use std::marker::PhantomData;

/// As in `pthread.h` of glibc and musl.
const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// While it exists, the thread that has made it is not cancelled. Many functions of the C library are cancellation points: a
/// thread that ended there would keep the locks that it holds for ever. Waits for the program's events are such points, and
/// hold nothing.
///
/// A thread drops such values in the reverse order in which it has made them, because each restores the state from before. Those that
/// exist within the life of another one may be dropped in any order.
#[derive(Debug)]
pub struct Uncancelled {
    before: c_int,
    of_this_thread: PhantomData<*const ()>,
}

impl Uncancelled {
    /// Disables cancellation of the calling thread until the value is dropped.
    #[inline]
    #[expect(clippy::new_without_default, reason = "a default value would have effects")]
    pub fn new() -> Uncancelled {
        let mut before = PTHREAD_CANCEL_DISABLE;
        // SAFETY: a state that exists, and an integer to be written to.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
        Uncancelled { before, of_this_thread: PhantomData }
    }
}

impl Drop for Uncancelled {
    #[inline]
    fn drop(&mut self) {
        let mut ours = 0;
        // SAFETY: the state from before, of the same thread; an integer to be written to.
        unsafe { pthread_setcancelstate(self.before, &raw mut ours) };
    }
}
