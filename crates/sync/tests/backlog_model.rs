//! A backlog in every interleaving that loom finds: what is added is taken once, and a thread that was told of an
//! addition finds it.
//!
//! `src/backlog.rs` is compiled here once more with loom's types.
//!
//! Mutations that this has found: `any` set before the lock in `add_below`, or not at all; `any` cleared behind the
//! lock in `take`.

#[path = "../src/backlog.rs"]
mod backlog;

#[path = "loom_common/platform.rs"]
mod platform;

use backlog::Backlog;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU32;
use loom::thread;
use platform::Ordering;

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(body);
}

#[test]
fn what_is_added_is_taken_once() {
    model(|| {
        let backlog = Arc::new(Backlog::default());
        let others = [1, 2].map(|one| {
            let backlog = backlog.clone();
            thread::spawn(move || backlog.add(one))
        });
        let mut taken = backlog.take();
        others.into_iter().for_each(|other| other.join().unwrap());
        taken.extend(backlog.take());
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
        assert!(backlog.is_empty());
    });
}

#[test]
fn who_was_told_of_an_addition_finds_it() {
    model(|| {
        let (backlog, told) = (Arc::new(Backlog::default()), Arc::new(AtomicU32::new(0)));
        backlog.add(0);
        let other = {
            let (backlog, told) = (backlog.clone(), told.clone());
            thread::spawn(move || {
                backlog.add_below(2, 1);
                told.store(1, Ordering::Release);
            })
        };
        let first = backlog.take().len();
        if told.load(Ordering::Acquire) == 1 {
            assert_eq!(first + backlog.take().len(), 2);
        }
        other.join().unwrap();
    });
}
