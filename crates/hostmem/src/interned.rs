//! Values that live for ever, in a list that only grows: a signal handler may read it, and add to it.
//! `tests/interned_model.rs` tries it in every interleaving.

use crate::sync::{AtomicPtr, Ordering};

/// A list of values.
pub(crate) struct Interned<T> {
    last: AtomicPtr<Node<T>>,
}

/// A value, immutable and never freed, because a handler may be reading it.
pub(crate) struct Node<T> {
    pub(crate) value: T,
    next: *mut Node<T>,
}

impl<T> Interned<T> {
    /// A list that ends with null. It is an argument because a model's is not made by a constant function.
    pub(crate) const fn of(last: AtomicPtr<Node<T>>) -> Interned<T> {
        Interned { last }
    }

    /// The node whose value `is_same`, or a new one with `value`.
    ///
    /// # Safety
    /// `allocate` returns memory for a node that no other thread knows and nothing frees.
    pub(crate) unsafe fn intern(
        &self,
        value: T,
        is_same: impl Fn(&T, &T) -> bool,
        allocate: impl FnOnce() -> *mut Node<T>,
    ) -> *mut Node<T> {
        // Acquire: the nodes were written before they were in the list.
        let mut last = self.last.load(Ordering::Acquire);
        let mut known = last;
        while !known.is_null() {
            // SAFETY: everything in the list lives for ever and does not change.
            let node = unsafe { &*known };
            if is_same(&node.value, &value) {
                return known;
            }
            known = node.next;
        }
        let new = allocate();
        // SAFETY: memory for a node, as the caller promises.
        unsafe { new.write(Node { value, next: last }) };
        // Losing a race can put a value in the list twice, which does no harm. Release: as above.
        while let Err(newer) = self.last.compare_exchange(last, new, Ordering::AcqRel, Ordering::Acquire) {
            last = newer;
            // SAFETY: no other thread has seen the new node yet.
            unsafe { (*new).next = last };
        }
        new
    }
}
