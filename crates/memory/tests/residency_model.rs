//! A unit of a paged region that comes and goes, in every interleaving that loom finds: a copy of this process or of
//! another one touches the unit's memory only while the unit is present, sees what was brought, and a page whose version
//! is the same odd number before and after an access was present all the time.
//!
//! `src/residency.rs` and `pin.rs`, and `reader_line.rs` and `handshake.rs` of `terrace-shm`, are compiled here once
//! more with loom's types. What a peer's access does (`ResidencyView::are_resident` under an epoch) is repeated here in
//! `copy_as_peer`, because those files map segments.
//!
//! Mutations that this has found: the pin after the check in `hold`; no `close` in `expel`, or before the bit is
//! cleared; a relaxed load in `is_present`; a relaxed `fetch_or` in `admit`; versions stepped before the bit in `admit`,
//! or after it in `expel`.

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
#[path = "../src/residency.rs"]
mod residency;
#[path = "loom_common/sync.rs"]
#[allow(dead_code, unused_imports, reason = "the model uses not all of it")]
mod sync;

use loom::sync::Arc;
use loom::thread;
use loom_common::{Watched, model};
use pin::PinLock;
use reader_line::Line;
use sync::{AtomicU32, AtomicU64, Ordering};
use terrace_hostmem::HostRange;

/// A region of one unit, and the line of a peer that reads it.
struct Region {
    bitmap: [AtomicU64; 1],
    versions: [AtomicU32; 1],
    copies: PinLock<()>,
    memory: Watched,
    line: Line,
}

const PAGES: HostRange = HostRange { addr: 0, len: 1 };

fn region() -> Arc<Region> {
    Arc::new(Region {
        bitmap: [AtomicU64::new(0)],
        versions: [AtomicU32::new(0)],
        copies: PinLock::new(()),
        memory: Watched::new(),
        line: Line::default(),
    })
}

impl Region {
    fn bring(&self) {
        self.memory.add(1);
        residency::admit(&self.bitmap, &self.versions, 0);
    }

    fn take_away(&self) {
        residency::expel(&self.bitmap, &self.versions, &self.copies, 0);
        handshake::fence_after_withdrawal();
        let used = AtomicU32::new(1);
        for (_, seen) in reader_line::odd_epochs(&used, 1, |_| &self.line, |line| line.is_for_pages(PAGES)) {
            while !self.line.has_left(seen) {
                thread::yield_now();
            }
        }
        self.memory.add(1);
    }

    fn copy(&self) {
        if let Some(_held) = residency::hold(&self.bitmap, &self.copies, 0..1) {
            assert!(self.memory.get() % 2 == 1, "what was brought is not seen");
        }
    }

    fn copy_as_peer(&self) {
        let _guard = self.line.enter(None, PAGES);
        if residency::is_present(&self.bitmap, 0) {
            assert!(self.memory.get() % 2 == 1, "what was brought is not seen");
        }
    }
}

/// Brings the unit, takes it away and brings it again, while another thread acts twice.
fn while_it_comes_and_goes(act: fn(&Region)) {
    model(4, move || {
        let region = region();
        let copier = {
            let region = region.clone();
            thread::spawn(move || (0..2).for_each(|_| act(&region)))
        };
        region.bring();
        region.take_away();
        region.bring();
        copier.join().unwrap();
    });
}

#[test]
fn this_process_copies_present_units_alone() {
    while_it_comes_and_goes(Region::copy);
}

#[test]
fn peers_copy_present_units_alone() {
    while_it_comes_and_goes(Region::copy_as_peer);
}

#[test]
fn units_are_present_while_their_versions_are_odd() {
    while_it_comes_and_goes(|region| {
        let version = || region.versions[0].load(Ordering::Acquire);
        let before = version();
        let is_present = residency::is_present(&region.bitmap, 0);
        let after = version();
        assert!(is_present || before != after || before % 2 == 0, "absent with version {before}");
    });
}
