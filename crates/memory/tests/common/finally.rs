//! A flag that is set on every exit path. The tests of other crates share this file.

use std::sync::atomic::{AtomicBool, Ordering};

/// Sets a flag when it goes out of scope, so that a failed assertion also ends the threads that wait for the flag.
pub struct Finally<'a>(pub &'a AtomicBool);

impl Drop for Finally<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
