//! A slot of the key table that is read under a reader's epoch instead of a pin, in every interleaving that loom finds:
//! the entry does not change while a reader uses it, and a reader sees what the last writer did.
//!
//! `src/pin.rs`, and `reader_line.rs` and `handshake.rs` of `terrace-shm`, are compiled here once more with loom's
//! types. What `Slot::close` does (`src/table.rs`: close the lock, then wait for the process's own readers) is repeated
//! here in `change`, because that file needs the rest of both crates.
//!
//! Mutations that this has found: a relaxed load in `peek`; `change` without its wait, or with the wait before the lock
//! is closed; the key table slot stored after the epoch in `Line::enter`; no full fence in `handshake::enter`.

#[path = "../../shm/src/handshake.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod handshake;
#[path = "../../shm/tests/loom_common/mod.rs"]
mod loom_common;
#[path = "../src/pin.rs"]
#[allow(dead_code, clippy::reversed_empty_ranges, reason = "the model uses not all of it, and does not spin")]
mod pin;
#[path = "../../shm/src/reader_line.rs"]
#[allow(dead_code, reason = "the model uses not all of it")]
mod reader_line;
#[path = "loom_common/sync.rs"]
#[allow(dead_code, unused_imports, reason = "the model uses not all of it")]
mod sync;

use loom::sync::Arc;
use loom::thread;
use loom_common::{Watched, model};
use pin::PinLock;
use reader_line::Line;
use terrace_hostmem::HostRange;

/// Two slots, and the line of a reader.
struct Table {
    slots: [PinLock<Watched>; 2],
    line: Line,
}

fn table() -> Arc<Table> {
    Arc::new(Table { slots: [(); 2].map(|()| PinLock::new(Watched::new())), line: Line::default() })
}

impl Table {
    fn read(&self, slot: usize) {
        let guard = self.line.enter(Some(slot as u32), 0, HostRange { addr: 0, len: 1 });
        // SAFETY: `change` waits for epochs that protect this slot.
        if let Some(entry) = unsafe { self.slots[slot].peek() } {
            assert_eq!(entry.get(), entry.get());
        }
        drop(guard);
    }

    fn change(&self, slot: usize) {
        let entry = self.slots[slot].close();
        handshake::fence_after_withdrawal();
        let is_for_slot = |line: &Line| line.is_for_slot(slot as u32);
        let used = sync::AtomicU32::new(1);
        for (_, seen) in reader_line::odd_epochs(&used, 1, |_| &self.line, is_for_slot) {
            while !self.line.has_left(seen) {
                thread::yield_now();
            }
        }
        entry.add(1);
    }
}

#[test]
fn an_entry_does_not_change_while_a_reader_epoch_protects_it() {
    model(4, || {
        let table = table();
        let reader = {
            let table = table.clone();
            thread::spawn(move || (0..2).for_each(|_| table.read(0)))
        };
        table.change(0);
        reader.join().unwrap();
    });
}

#[test]
fn a_reader_of_another_slot_that_comes_to_this_one_is_waited_for() {
    model(4, || {
        let table = table();
        let reader = {
            let table = table.clone();
            thread::spawn(move || [1, 0].into_iter().for_each(|slot| table.read(slot)))
        };
        table.change(0);
        reader.join().unwrap();
    });
}

#[test]
fn readers_with_epochs_and_with_pins_see_what_writers_did() {
    model(2, || {
        let table = table();
        let reader = {
            let table = table.clone();
            thread::spawn(move || table.read(0))
        };
        let writer = {
            let table = table.clone();
            thread::spawn(move || table.change(0))
        };
        table.change(0);
        reader.join().unwrap();
        writer.join().unwrap();
        assert_eq!(table.slots[0].pin().get(), 2);
    });
}
