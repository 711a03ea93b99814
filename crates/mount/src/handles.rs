//! Numbers for open files and directories.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_sync::RwLock;

/// Numbered objects.
pub(crate) struct Handles<T> {
    objects: RwLock<HashMap<u64, Arc<T>>>,
    last: AtomicU64,
}

impl<T> Default for Handles<T> {
    fn default() -> Handles<T> {
        Handles { objects: RwLock::default(), last: AtomicU64::new(0) }
    }
}

impl<T> Handles<T> {
    /// Adds an object and returns its number.
    pub(crate) fn add(&self, object: Arc<T>) -> u64 {
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.objects.write().insert(number, object);
        number
    }

    /// The object of a number.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<T>> {
        self.objects.read().get(&number).cloned()
    }

    /// Removes an object.
    pub(crate) fn remove(&self, number: u64) -> Option<Arc<T>> {
        self.objects.write().remove(&number)
    }

    /// All objects.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.objects.read().values().cloned().collect()
    }
}
