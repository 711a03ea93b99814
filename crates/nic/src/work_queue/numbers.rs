//! The objects that WAIT and ENABLE may name.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use terrace_sync::RwLock;

/// Objects by number. Its lock is taken last, under those of queue pairs; the device's table of queue pairs is not, because
/// passes hold that while they lock queue pairs.
pub(crate) struct Numbers<T>(RwLock<HashMap<u32, Weak<T>>>);

impl<T> Default for Numbers<T> {
    fn default() -> Numbers<T> {
        Numbers(RwLock::default())
    }
}

impl<T> Numbers<T> {
    pub fn add(&self, number: u32, object: Weak<T>) {
        self.0.write().insert(number, object);
    }

    pub fn remove(&self, number: u32) {
        self.0.write().remove(&number);
    }

    pub fn get(&self, number: u32) -> Option<Arc<T>> {
        self.0.read().get(&number)?.upgrade()
    }
}
