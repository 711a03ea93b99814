//! The shared-memory protocol between same-host peers, in every interleaving that loom finds: a reader that goes to
//! sleep misses no packet, a record is read only once it is whole, and a region is not copied after its withdrawal.
//!
//! `src/handshake.rs` is compiled here once more with loom's atomics.

#[path = "../src/handshake.rs"]
mod handshake;

mod loom_common;
#[path = "loom_common/sync.rs"]
#[allow(dead_code, unused_imports, reason = "the model uses not all of it")]
mod sync;

use handshake::*;
use loom::sync::Arc;
use loom::thread;
use loom_common::{Watched, model};
use sync::{AtomicU32, AtomicU64, Ordering};

#[test]
fn a_reader_that_sleeps_is_rung_for() {
    model(5, || {
        let (tail, sleep) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let writer = {
            let (tail, sleep) = (tail.clone(), sleep.clone());
            thread::spawn(move || publish(&tail, 64, &sleep))
        };
        fall_asleep(&sleep);
        let sees_nothing = tail.load(Ordering::Acquire) == 0;
        let rings = writer.join().unwrap() % 2 == 1;
        assert!(!sees_nothing || rings, "it sleeps, and nobody wakes it");
    });
}

#[test]
fn a_reader_that_has_woken_and_sleeps_again_is_rung_for_again() {
    model(5, || {
        let (tail, sleep) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let writer = {
            let (tail, sleep) = (tail.clone(), sleep.clone());
            // The doorbell is rung once for each of the reader's sleeps.
            thread::spawn(move || [publish(&tail, 64, &sleep), publish(&tail, 128, &sleep)])
        };
        fall_asleep(&sleep);
        wake_up(&sleep);
        fall_asleep(&sleep);
        let seen = tail.load(Ordering::Acquire);
        let rung = writer.join().unwrap();
        assert!(seen == 128 || rung[1] == 3, "{seen} {rung:?}");
    });
}

#[test]
fn records_are_whole_when_they_are_seen_and_read_before_they_are_written_over() {
    model(5, || {
        // A ring of two slots, one of which is always kept free: the word behind each record says that the ring ends.
        let words = [0; 2].map(|_| Arc::new(AtomicU64::new(0)));
        let records = [0; 2].map(|_| Arc::new(Watched::new()));
        let (head, sleep) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let writer = {
            let (words, records, head) = (words.clone(), records.clone(), head.clone());
            thread::spawn(move || {
                for position in 0..3 {
                    if head.load(Ordering::Acquire) != position {
                        break;
                    }
                    let (here, behind) = (position as usize % 2, (position as usize + 1) % 2);
                    records[here].set(position as u32 + 1);
                    words[behind].store(0, Ordering::Relaxed);
                    publish(&words[here], position + 1, &sleep);
                }
            })
        };
        let mut at = 0;
        for _ in 0..4 {
            let place = at as usize % 2;
            let word = words[place].load(Ordering::Acquire);
            if word != 0 {
                at += 1;
                assert_eq!(word, at);
                assert_eq!(u64::from(records[place].get()), at);
                head.store(at, Ordering::Release);
            }
        }
        writer.join().unwrap();
    });
}

#[test]
fn nobody_copies_what_was_taken_away() {
    model(5, || {
        let (epoch, published) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU64::new(1)));
        let memory = Arc::new(Watched::new());
        let copier = {
            let (epoch, published, memory) = (epoch.clone(), published.clone(), memory.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    let even = enter(&epoch);
                    if published.load(Ordering::Relaxed) == 1 {
                        memory.get();
                    }
                    leave(&epoch, even);
                }
            })
        };
        published.store(0, Ordering::Relaxed);
        fence_after_withdrawal();
        if let Some(seen) = odd_epoch(&epoch) {
            while !has_changed(&epoch, seen) {
                thread::yield_now();
            }
        }
        // The owner reuses the memory.
        memory.set(7);
        copier.join().unwrap();
    });
}
