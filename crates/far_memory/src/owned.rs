//! Objects of the device that end with their owner. The device counts them, and a protection domain or a completion queue
//! ends only after what uses it: fields and variables are in that order.

use std::ops::Deref;
use std::sync::Arc;

use terrace_nic::{Cq, Error, Mr, Pd, QueuePair};

/// What can be ended.
pub(crate) trait End {
    fn end(self: &Arc<Self>) -> Result<(), Error>;
}

impl End for Pd {
    fn end(self: &Arc<Self>) -> Result<(), Error> {
        self.dealloc()
    }
}

impl End for Cq {
    fn end(self: &Arc<Self>) -> Result<(), Error> {
        self.destroy()
    }
}

impl End for Mr {
    fn end(self: &Arc<Self>) -> Result<(), Error> {
        self.dereg()
    }
}

impl End for QueuePair {
    fn end(self: &Arc<Self>) -> Result<(), Error> {
        self.destroy()
    }
}

/// An object that ends when this is dropped.
pub(crate) struct Owned<T: End>(pub Arc<T>);

impl<T: End> Deref for Owned<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.0
    }
}

impl<T: End> Drop for Owned<T> {
    fn drop(&mut self) {
        // It fails if the object has ended before, with the device or by its owner. The owner ends regions that clients of this
        // host access, because that waits for a client that is stopped in an access.
        let _ = self.0.end();
    }
}
