//! Callbacks: one thread at a time calls them, and what was requested before a thread found another one at it is done.
//!
//! Mutations that this has found: `take` that does not check for requests again, or calls although another thread does;
//! a request that is cleared by a store, or after the calls; a relaxed store of `is_taken`; a relaxed load of
//! `is_requested`.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::callback_turn::CallbackTurn;
use crate::sync::{AtomicBool, Ordering, model};

/// A callback with work to do, and what only the thread that calls it may touch.
struct Callback {
    turn: CallbackTurn,
    has_work: [AtomicBool; 2],
    done: UnsafeCell<[bool; 2]>,
}

// SAFETY: that calls do not overlap is what the model checks.
unsafe impl Sync for Callback {}
// SAFETY: flags in a cell.
unsafe impl Send for Callback {}

impl Callback {
    fn new() -> Arc<Callback> {
        let has_work = [(); 2].map(|()| AtomicBool::new(false));
        Arc::new(Callback { turn: CallbackTurn::default(), has_work, done: UnsafeCell::new([false; 2]) })
    }

    fn call(&self) -> bool {
        // SAFETY: loom panics when two threads are here.
        self.done.with_mut(|done| unsafe {
            for (index, has_work) in self.has_work.iter().enumerate() {
                // As agents and pagers do: a load first.
                (*done)[index] |= has_work.load(Ordering::Acquire) && has_work.swap(false, Ordering::AcqRel);
            }
        });
        true
    }

    /// A thread gives the callback something to do, and sees to it that it is called.
    fn request(&self, index: usize) {
        // A swap: loom does not know that a store comes behind a swap that has not seen it.
        self.has_work[index].swap(true, Ordering::AcqRel);
        self.turn.request();
        self.turn.take(|| self.call());
    }
}

#[test]
fn what_was_requested_is_done_by_one_thread_or_the_other() {
    model(4, || {
        let callback = Callback::new();
        let other = {
            let callback = callback.clone();
            thread::spawn(move || callback.request(1))
        };
        callback.request(0);
        other.join().unwrap();
        // SAFETY: the other thread has ended.
        let done = callback.done.with(|done| unsafe { *done });
        assert_eq!(done, [true; 2], "a request was lost");
    });
}
