//! Pages that a program has in the page cache before its file becomes a region.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU8, Ordering};

use common::{Scratch, cached_bytes, counting_waker, still, wait};
use terrace_hostmem::{HostRange, UNIT_BYTES};
use terrace_memory::{Pager, UnitPager};
use terrace_tier::{BackingFile, Tier};

const BUDGET_BYTES: u64 = 16 * UNIT_BYTES;

/// A program may have written its file before, in large pieces. The kernel keeps each in folios that are larger than a
/// unit, and that are locked or dropped as a whole.
#[test]
fn what_was_in_the_page_cache_before_is_let_go() {
    for exclusive in [true, false] {
        let scratch = Scratch::new("/tmp", "written");
        let content: Vec<u8> = (0..4 * UNIT_BYTES).map(|at| (at >> 12) as u8 | 1).collect();
        let written = File::create(&scratch.0).unwrap();
        (0..8).for_each(|piece| written.write_all_at(&content, piece * 4 * UNIT_BYTES).unwrap());
        // The program has used its mapping, too.
        let file = BackingFile::open(&scratch.0, None, exclusive).unwrap();
        let map = file.map();
        (0..map.len / 4096).for_each(|page| {
            // SAFETY: a mapping of the file without other users.
            let byte = unsafe { &*((map.addr + page * 4096) as *const AtomicU8) };
            byte.fetch_or(2, Ordering::Relaxed);
        });
        let before = cached_bytes(map);
        assert!(before > map.len / 2, "{before} bytes: the kernel has dropped them by itself");
        let tier = Tier::open(still(BUDGET_BYTES)).unwrap();
        let region = tier.add(file.source().unwrap()).unwrap();
        let every_second = (0..region.presence().unit_count()).step_by(2);
        assert!(every_second.clone().all(|unit| tier.promote(&region, unit).unwrap()));
        let (cached, locked) = (cached_bytes(map), tier.stats().locked_bytes);
        assert!(
            cached <= locked + UNIT_BYTES / 16,
            "{cached} bytes in memory, of which {locked} were asked for"
        );
        let (waker, _) = counting_waker();
        for unit in [0, 1, 30, 31] {
            let range = HostRange { len: 8192, ..region.presence().unit_range(unit) };
            let read = region.read(range, &waker).unwrap();
            wait(&tier, &read).unwrap();
            let mut out = [0; 8192];
            read.read(0, &mut out).unwrap();
            let at = (unit as u64 * UNIT_BYTES % (4 * UNIT_BYTES)) as usize;
            let mut wanted = content[at..at + 8192].to_vec();
            (wanted[0], wanted[4096]) = (wanted[0] | 2, wanted[4096] | 2);
            assert!(out[..] == wanted[..], "unit {unit}");
        }
        tier.remove(&region);
    }
}
