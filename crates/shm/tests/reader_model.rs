//! Reader epochs in every interleaving that loom finds: after a withdrawal and its grace period nothing is copied that
//! was withdrawn, whichever pages, queue pair or slot of the key table a reader's line names, and even if the reader
//! has just come.
//!
//! `src/reader_line.rs`, `reader_list.rs`, `record.rs` and `handshake.rs` are compiled here once more with loom's
//! types.
//!
//! Mutations that this has found: no full fence in `enter`, or in `fence_after_withdrawal`; a relaxed store in `enter`
//! or `leave`; a relaxed load in `odd_epoch` or `has_changed`; the hazard pointer stored after `enter`; `all_now` that
//! reads the count before its fence.

#[path = "../src/handshake.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod handshake;
mod loom_common;
#[path = "../src/reader_line.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod reader_line;
#[path = "../src/reader_list.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod reader_list;
#[path = "../src/record.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod record;
#[path = "loom_common/sync.rs"]
#[allow(dead_code, unused_imports, reason = "the model uses not all of it")]
mod sync;

use loom::sync::Arc;
use loom::thread;
use loom_common::{Watched, model};
use reader_line::{Line, add_line, odd_epochs};
use reader_list::ReaderList;
use record::Version;
use sync::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, RwLock};
use terrace_hostmem::{HostRange, PAGE_BYTES};

/// One process's reader slots.
#[derive(Default)]
struct Slots {
    used: AtomicU32,
    lines: [Line; 1],
}

/// What the owner of the memory and the readers share.
struct World {
    readers: ReaderList<Arc<Slots>>,
    /// What is published of the two pages, or of the two queue pairs: both are published at first.
    records: [[AtomicU64; 2]; 2],
    memory: [Watched; 2],
}

/// The protection domain of the pages.
const DOMAIN: u32 = 3;
/// The version of a record that was written once.
const FIRST: Version = Version(2);

fn page(index: usize) -> HostRange {
    HostRange { addr: (5 + index as u64) * PAGE_BYTES, len: 8 }
}

impl World {
    fn new() -> Arc<World> {
        let world = World {
            readers: ReaderList::of(RwLock::new(Vec::new()), AtomicUsize::new(0), AtomicBool::new(false)),
            records: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
            memory: std::array::from_fn(|_| Watched::new()),
        };
        world.records.iter().for_each(|record| record::write(record, &[1; 7]));
        Arc::new(world)
    }

    /// A process with one slot joins.
    fn join(&self) -> Arc<Slots> {
        let slots = Arc::new(Slots::default());
        self.readers.add(slots.clone()).expect("the list is usable");
        assert_eq!(add_line(&slots.used, 1), Some(0));
        slots
    }

    /// Copies from page `index` if what was seen of it is still published.
    fn copy(&self, slots: &Slots, index: usize) {
        let _guard = slots.lines[0].enter(None, DOMAIN, page(index));
        if record::version(&self.records[index]) == FIRST {
            self.memory[index].get();
        }
    }

    /// Withdraws record `index`, waits for the readers whose lines concern it, and reuses the memory.
    fn withdraw(&self, index: usize, concerns: impl Fn(&Line) -> bool) {
        record::write(&self.records[index], &[0; 7]);
        let mut seen = Vec::new();
        for slots in self.readers.all_now() {
            let odd: Vec<_> = odd_epochs(&slots.used, 1, |line| &slots.lines[line], &concerns).collect();
            seen.extend(odd.into_iter().map(|(line, epoch)| (slots.clone(), line, epoch)));
        }
        for (slots, line, epoch) in seen {
            while !slots.lines[line].has_left(epoch) {
                thread::yield_now();
            }
        }
        self.memory[index].set(7);
    }
}

#[test]
fn nothing_is_copied_after_its_grace_period() {
    model(4, || {
        let world = World::new();
        let slots = world.join();
        let reader = {
            let world = world.clone();
            thread::spawn(move || (0..2).for_each(|_| world.copy(&slots, 0)))
        };
        world.withdraw(0, |line| line.is_for_domain(DOMAIN) && line.is_for_pages(page(0)));
        reader.join().unwrap();
    });
}

#[test]
fn a_reader_of_other_pages_that_comes_to_these_is_waited_for() {
    model(5, || {
        let world = World::new();
        let slots = world.join();
        let reader = {
            let world = world.clone();
            thread::spawn(move || [1, 0].into_iter().for_each(|index| world.copy(&slots, index)))
        };
        world.withdraw(0, |line| line.is_for_pages(page(0)));
        reader.join().unwrap();
    });
}

#[test]
fn a_slot_that_another_queue_pair_gets_is_waited_for() {
    model(5, || {
        let world = World::new();
        let slots = world.join();
        let reader = {
            let world = world.clone();
            thread::spawn(move || {
                for queue_pair in [1, 0] {
                    slots.lines[0].set_queue_pair(queue_pair as u32);
                    world.copy(&slots, queue_pair);
                }
            })
        };
        world.withdraw(0, |line| line.is_for_queue_pair(0));
        reader.join().unwrap();
    });
}

#[test]
fn a_reader_that_joins_meanwhile_is_waited_for() {
    model(5, || {
        let world = World::new();
        let reader = {
            let world = world.clone();
            thread::spawn(move || world.copy(&world.join(), 0))
        };
        world.withdraw(0, |line| line.is_for_pages(page(0)));
        reader.join().unwrap();
    });
}

#[test]
fn two_readers_are_waited_for() {
    model(2, || {
        let world = World::new();
        let readers = [(); 2].map(|()| {
            let (world, slots) = (world.clone(), world.join());
            thread::spawn(move || world.copy(&slots, 0))
        });
        world.withdraw(0, |line| line.is_for_pages(page(0)));
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
}
