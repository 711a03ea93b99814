//! The objects that WAIT and ENABLE may name.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
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

    /// Adds an object under a number that `draw` gives and no other object has. The objects' quota leaves numbers free.
    pub fn insert(&self, mut draw: impl FnMut() -> u32, object: Weak<T>) -> u32 {
        let mut objects = self.0.write();
        loop {
            let number = draw();
            if let Entry::Vacant(place) = objects.entry(number) {
                place.insert(object);
                return number;
            }
        }
    }

    pub fn remove(&self, number: u32) {
        self.0.write().remove(&number);
    }

    pub fn get(&self, number: u32) -> Option<Arc<T>> {
        self.0.read().get(&number)?.upgrade()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_come_again_are_given_to_one_object_at_a_time() {
        let (numbers, objects) = (Numbers::default(), [1, 2, 3].map(Arc::new));
        let mut drawn = [7, 7, 8, 7].into_iter();
        let mut insert = |index: usize| {
            numbers.insert(|| drawn.next().expect("a number"), Arc::downgrade(&objects[index]))
        };
        assert_eq!((insert(0), insert(1)), (7, 8));
        assert_eq!((numbers.get(7).as_deref(), numbers.get(8).as_deref()), (Some(&1), Some(&2)));
        numbers.remove(7);
        assert_eq!((insert(2), numbers.get(7).as_deref()), (7, Some(&3)));
    }
}
