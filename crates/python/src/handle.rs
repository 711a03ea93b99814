//! An object that only the process that has made it may use.

use terrace_sync::Mutex;

use crate::failure::Failure;

/// A client's object, until it is closed. A process that is forked has none of the threads that it needs.
pub struct Handle<T: Clone> {
    /// `None` when it is closed.
    object: Mutex<Option<T>>,
    pid: u32,
}

impl<T: Clone> Handle<T> {
    /// A handle of this process.
    pub fn new(object: T) -> Handle<T> {
        Handle { object: Mutex::new(Some(object)), pid: std::process::id() }
    }

    /// Whether this process has made it, not the one that forked it.
    fn is_of_this_process(&self) -> bool {
        self.pid == std::process::id()
    }

    /// The object, unless it is closed or belongs to another process.
    pub fn get(&self) -> Result<T, Failure> {
        // A fork may have copied the lock while another thread held it.
        if !self.is_of_this_process() {
            return Err(Failure::forked());
        }
        self.object.lock().clone().ok_or_else(Failure::closed)
    }

    /// Takes the object, which the caller closes; `None` if it is closed or belongs to another process.
    pub fn take(&self) -> Option<T> {
        if self.is_of_this_process() { self.object.lock().take() } else { None }
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.is_of_this_process() && self.object.lock().is_none()
    }
}

impl<T: Clone> Drop for Handle<T> {
    fn drop(&mut self) {
        if !self.is_of_this_process() {
            // Closing would wait for threads that this process does not have.
            std::mem::forget(self.object.get_mut().take());
        }
    }
}
