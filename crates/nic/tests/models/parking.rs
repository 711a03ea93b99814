//! A fork finds the engine parked: until it ends the engine takes no lock, also when another fork has just ended.
//!
//! Mutations that this has found: `park` that does not check again behind its last store; a relaxed store of
//! `is_parked` there; a relaxed load in `is_wanted` or in `is_parked`, or a relaxed addition in `begin`.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::pause::Pause;
use crate::sync::{AtomicBool, Ordering, model};

struct Shared {
    pause: Pause,
    /// The engine has ended.
    is_over: AtomicBool,
    /// What the engine's locks protect, and the forking thread must not find half changed.
    locked: UnsafeCell<()>,
}

// SAFETY: that accesses do not conflict is what the model checks.
unsafe impl Sync for Shared {}
// SAFETY: nothing, in a cell.
unsafe impl Send for Shared {}

impl Shared {
    fn fork(&self) {
        self.pause.begin();
        while !self.pause.is_parked() && !self.is_over.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        self.locked.with_mut(|_| ());
        self.pause.end();
    }
}

#[test]
fn a_parked_engine_takes_no_lock_until_the_fork_ends() {
    model(3, || {
        let shared = Arc::new(Shared {
            pause: Pause::default(),
            is_over: AtomicBool::new(false),
            locked: UnsafeCell::new(()),
        });
        let engine = {
            let shared = shared.clone();
            thread::spawn(move || {
                for _ in 0..3 {
                    shared.pause.park(thread::yield_now);
                    shared.locked.with_mut(|_| ());
                }
                shared.is_over.store(true, Ordering::SeqCst);
            })
        };
        shared.fork();
        shared.fork();
        engine.join().unwrap();
    });
}
