//! A flag that is set in any case. The tests of other crates share it.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets a flag when it goes out of scope, so that a failed assertion ends the threads that wait for the flag as well.
pub struct Finally<'a>(pub &'a AtomicBool);

impl Drop for Finally<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
