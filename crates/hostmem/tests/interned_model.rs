//! Interned values in every interleaving that loom finds: a value that is found was written before, and a value that
//! was added stays in the list.
//!
//! `src/interned.rs` is compiled here once more with loom's types.
//!
//! Mutations that this has found: a relaxed load in `intern`; a relaxed exchange; `next` not moved on after a lost
//! race.

#[path = "../src/interned.rs"]
mod interned;

/// Stands in for `src/sync.rs`.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicPtr, Ordering};
}

use std::mem::MaybeUninit;
use std::sync::Mutex;

use interned::{Interned, Node};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use sync::AtomicPtr;

type Number = Node<UnsafeCell<u32>>;

/// A list of numbers, and the memory of its nodes.
struct World {
    list: Interned<UnsafeCell<u32>>,
    #[expect(clippy::vec_box, reason = "a node stays where it is")]
    nodes: Mutex<Vec<Box<MaybeUninit<Number>>>>,
}

// SAFETY: that accesses do not conflict is what the model checks.
unsafe impl Sync for World {}
// SAFETY: numbers in cells.
unsafe impl Send for World {}

fn number(of: &UnsafeCell<u32>) -> u32 {
    // SAFETY: loom panics when it is written at the same time.
    of.with(|number| unsafe { *number })
}

/// Interns a number, and returns whether it was in the list.
fn intern(world: &World, wanted: u32) -> bool {
    let mut is_new = false;
    let is_same = |known: &UnsafeCell<u32>, wanted: &UnsafeCell<u32>| number(known) == number(wanted);
    let allocate = || {
        is_new = true;
        let mut nodes = world.nodes.lock().unwrap();
        nodes.push(Box::new_uninit());
        nodes.last_mut().unwrap().as_mut_ptr()
    };
    // SAFETY: new memory, which lives as long as the list.
    let node = unsafe { world.list.intern(UnsafeCell::new(wanted), is_same, allocate) };
    // SAFETY: nodes live as long as the list.
    assert_eq!(number(unsafe { &(*node).value }), wanted);
    !is_new
}

#[test]
fn what_is_interned_is_found_by_all_from_then_on() {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(|| {
        let list = Interned::of(AtomicPtr::new(std::ptr::null_mut()));
        let world = Arc::new(World { list, nodes: Mutex::default() });
        let others = [1, 2].map(|wanted| {
            let world = world.clone();
            thread::spawn(move || {
                intern(&world, wanted);
                assert!(intern(&world, wanted), "{wanted} is lost");
            })
        });
        intern(&world, 2);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(intern(&world, 1) && intern(&world, 2));
    });
}
