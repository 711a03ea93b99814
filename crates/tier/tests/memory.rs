//! Memory use stays within the budget, for all patterns of accesses.

mod common;

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use common::{Served, cached_bytes, sleep_until_readable};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_hostmem::UNIT_BYTES;
use terrace_memory::{AccessError, Pager, Transfer};
use terrace_tier::TierConfig;

const REGION_BYTES: u64 = 64 * UNIT_BYTES;
const BUDGET_BYTES: u64 = 16 * UNIT_BYTES;

/// The resident set size of this process.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Reads and writes at random, many at a time, until enough units have moved. Returns the peaks of memory and page
/// cache.
fn load(served: &Served, done: impl Fn() -> bool) -> (u64, u64) {
    let mut random = StdRng::seed_from_u64(1);
    let (mut resident_max, mut cached_max) = (0, 0);
    let mut under_way: Vec<Arc<dyn Transfer>> = Vec::new();
    let mut count = 0;
    while !done() {
        // The hot set moves, as the units do.
        let hot = count / 20_000 * 16 * UNIT_BYTES;
        let offset = (hot + random.random_range(0..24 * UNIT_BYTES / 4096) * 4096) % REGION_BYTES;
        let range = served.range(offset, 4096);
        let translation = served.region.translation();
        translation.count(range, translation.is_present(range));
        let asked = if random.random() {
            served.region.read(range, &served.waker)
        } else {
            served.region.write(range.addr, &[random.random(); 4096], &served.waker)
        };
        match asked {
            Ok(transfer) => under_way.push(transfer),
            Err(error) => assert_eq!(error, AccessError::NotReady),
        }
        while under_way.len() > 32 {
            served.tier.advance();
            under_way.retain(|transfer| transfer.outcome().is_none());
            sleep_until_readable(&served.tier, Duration::from_millis(1));
        }
        count += 1;
        if count % 1000 == 0 {
            under_way.drain(..).for_each(|transfer| served.wait(&transfer).unwrap());
            move_units(served, (count / 1000) as usize);
            resident_max = resident_max.max(resident_bytes());
            cached_max = cached_max.max(cached_bytes(served.file.map()));
            assert!(served.tier.stats().locked_bytes <= BUDGET_BYTES);
        }
        assert!(count < 5_000_000, "units do not move: {:?}", served.region.stats());
    }
    under_way.iter().for_each(|transfer| served.wait(transfer).unwrap());
    (resident_max, cached_max)
}

/// Promotes the next unit, after the oldest one was demoted.
fn move_units(served: &Served, step: usize) {
    let unit_of = |step: usize| step % (REGION_BYTES / UNIT_BYTES) as usize;
    let budget = (BUDGET_BYTES / UNIT_BYTES) as usize;
    if step >= budget {
        served.tier.demote(&served.region, unit_of(step - budget)).unwrap();
    }
    served.tier.promote(&served.region, unit_of(step)).unwrap();
}

/// Not a test by itself, because other tests would change this process's memory use. The tier's metadata of a region
/// are small beside the region.
fn what_is_known_of_a_region_is_small() {
    let large = 8 << 30;
    let before = resident_bytes();
    let served = Served::new("/tmp", "metadata", large, true, TierConfig::new(BUDGET_BYTES));
    let known = resident_bytes() - before;
    assert!(known * 1000 < large * 3, "{known} bytes for a region of {large}");
    drop(served);
}

#[test]
fn memory_stays_within_the_budget_and_misses_leave_nothing_in_the_page_cache() {
    what_is_known_of_a_region_is_small();
    for exclusive in [true, false] {
        let config = TierConfig { period: Duration::from_millis(20), ..TierConfig::new(BUDGET_BYTES) };
        let served = Served::new("/tmp", "memory", REGION_BYTES, exclusive, config);
        let file = std::fs::File::options().write(true).open(&served.scratch.0).unwrap();
        for offset in (0..REGION_BYTES).step_by(UNIT_BYTES as usize) {
            file.write_all_at(&vec![1; UNIT_BYTES as usize], offset).unwrap();
        }
        file.sync_all().unwrap();
        // The kernel does not drop pages that it has in use.
        while cached_bytes(served.file.map()) > 0 {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
        let before = resident_bytes();
        let (resident, cached) = load(&served, || served.region.stats().demotions > 30);
        let buffers = served.tier.stats().buffer_bytes;
        // The last unit is for the test itself: stacks, the allocator.
        let allowed = BUDGET_BYTES + buffers + UNIT_BYTES;
        assert!(resident - before <= allowed, "{} of {allowed} bytes", resident - before);
        if exclusive {
            // During its demotion, a unit is in the page cache until it is written back.
            assert!(cached <= BUDGET_BYTES + UNIT_BYTES, "{cached} bytes in the page cache");
        }
        // After some periods, only locked pages are left.
        let clean = || cached_bytes(served.file.map()) <= served.tier.stats().locked_bytes + UNIT_BYTES / 16;
        let was_clean = (0..2000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            clean()
        });
        let (left, stats) = (cached_bytes(served.file.map()), served.tier.stats());
        assert!(was_clean, "exclusive {exclusive}: {left} bytes are still in the page cache: {stats:#?}");
    }
}
