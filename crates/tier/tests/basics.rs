//! Single accesses in each state of their unit, and the counters that they increment.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Scratch, Served, counting_waker, loop_device, still, wait};
use terrace_hostmem::{AtomicOp, HostRange, UNIT_BYTES};
use terrace_memory::{AccessError, Pager, UnitPager};
use terrace_tier::device::OnlyThreads;
use terrace_tier::{BackingFile, IoMethod, TRANSFER_BYTES_MAX, Tier, TierConfig};

const MIB: u64 = 1 << 20;
const DIRS: [&str; 2] = ["/tmp", "/dev/shm"];

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|index| (((seed + index) * 0x9e37_79b9) >> 16) as u8).collect()
}

/// All kinds of accesses, on units that are absent, resident, and absent again.
fn exercise(served: &Served) {
    for round in 0..3u64 {
        let data = pattern(round, 9000);
        for (offset, len) in
            [(0, 4096), (4096, 8192), (100, 50), (5000, 9000), (MIB - 7, 14), (MIB - 4096, 8192)]
        {
            served.write(offset, &data[..len]).unwrap();
            assert_eq!(served.read(offset, len).unwrap(), data[..len], "round {round} offset {offset}");
        }
        let at = 2 * MIB - 8;
        served.atomic(at, AtomicOp::Write { value: 5 }).unwrap();
        assert_eq!(served.atomic(at, AtomicOp::FetchAdd { add: round }), Ok(5));
        assert_eq!(served.atomic(at, AtomicOp::CompareSwap { compare: 5 + round, swap: 9 }), Ok(5 + round));
        assert_eq!(served.atomic(at, AtomicOp::CompareSwap { compare: 1, swap: 2 }), Ok(9));
        assert_eq!(served.read(at, 8).unwrap(), 9u64.to_ne_bytes());
        served.flush(0, 2 * MIB).unwrap();
        assert_eq!(served.read(3 * MIB, 100).unwrap(), [0; 100], "a hole");
        for unit in 0..3 {
            if round == 0 {
                assert!(served.tier.promote(&served.region, unit).unwrap());
            } else if round == 1 {
                assert!(served.tier.demote(&served.region, unit).unwrap());
            }
            assert_eq!(served.region.presence().is_present(unit), round == 0);
        }
    }
    // The file and the region have the same bytes.
    let whole = std::fs::read(&served.scratch.0).unwrap();
    assert_eq!(served.read(5000, 9000).unwrap(), whole[5000..14000]);
}

#[test]
fn every_access_works_in_every_state_of_its_unit() {
    for dir in DIRS {
        for exclusive in [true, false] {
            for io in [IoMethod::Tiering, IoMethod::Direct, IoMethod::Buffered, IoMethod::Mapping] {
                let config = TierConfig { io, ..still(8 * MIB) };
                exercise(&Served::new(dir, "states", 4 * MIB, exclusive, config));
            }
            let config = TierConfig { device: Arc::new(OnlyThreads), ..still(8 * MIB) };
            exercise(&Served::new(dir, "threads", 4 * MIB, exclusive, config));
        }
    }
}

#[test]
fn misses_go_past_the_page_cache_and_are_counted_so() {
    let served = Served::new("/tmp", "kinds", 4 * MIB, true, still(2 * MIB));
    served.write(0, &[1; 4096]).unwrap();
    served.write(10, &[2; 10]).unwrap();
    served.read(0, 4096).unwrap();
    let stats = served.region.stats();
    assert_eq!((stats.writes.direct, stats.reads.direct), (2, 1));
    assert_eq!(stats.writes.misses() + stats.reads.misses(), 3);
    assert!(served.tier.promote(&served.region, 0).unwrap());
    served.read(0, 4096).unwrap();
    assert_eq!(served.region.stats().reads.late_hits, 1);
    assert_eq!(served.tier.stats().locked_bytes, UNIT_BYTES);
    assert_eq!(served.region.stats().latency.count, 3);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let served = Served::new("/tmp", "refused", 2 * MIB, true, still(2 * MIB));
    let (addr, waker) = (served.addr(), &served.waker);
    let read = |addr, len| served.region.read(HostRange { addr, len }, waker).map(drop);
    assert_eq!(read(addr, TRANSFER_BYTES_MAX + 1), Err(AccessError::OutOfRange));
    assert_eq!(read(addr - 1, 2), Err(AccessError::OutOfRange));
    assert_eq!(read(addr + 2 * MIB - 1, 2), Err(AccessError::OutOfRange));
    assert_eq!(read(u64::MAX, 2), Err(AccessError::OutOfRange));
    let odd = served.region.atomic(addr + 4, AtomicOp::FetchAdd { add: 1 }, waker);
    assert_eq!(odd.map(drop), Err(AccessError::Misaligned));
    assert_eq!(served.read(7, 0), Ok(vec![]));
    let transfer = served.region.read(served.range(0, 10), waker).unwrap();
    assert_eq!(transfer.read(0, &mut [0; 4]), Err(AccessError::NotReady));
    served.wait(&transfer).unwrap();
    assert_eq!(transfer.read(7, &mut [0; 4]), Err(AccessError::OutOfRange));
    assert_eq!(transfer.read(u64::MAX, &mut [0; 4]), Err(AccessError::OutOfRange));
    assert_eq!(transfer.read(6, &mut [1; 4]), Ok(()));
    served.tier.remove(&served.region);
    assert_eq!(read(addr, 2), Err(AccessError::Fault));
}

#[test]
fn the_waker_is_called_for_each_transfer_and_for_room() {
    let served = Served::new("/tmp", "wakers", 4 * MIB, true, still(2 * MIB));
    served.read(0, 64).unwrap();
    assert_eq!(served.woken.load(Ordering::Relaxed), 1);
    // Transfers that are not dropped hold all buffers.
    let mut transfers = Vec::new();
    let refused = loop {
        match served.region.read(served.range(0, 64), &served.waker) {
            Ok(transfer) => transfers.push(transfer),
            Err(error) => break error,
        }
    };
    assert_eq!(refused, AccessError::NotReady);
    transfers.iter().for_each(|transfer| served.wait(transfer).unwrap());
    let woken = served.woken.load(Ordering::Relaxed);
    assert_eq!(woken, 1 + transfers.len());
    transfers.pop();
    assert_eq!(served.woken.load(Ordering::Relaxed), woken + 1);
    assert!(served.read(0, 64).is_ok());
}

#[test]
fn the_budget_bounds_what_is_locked() {
    let served = Served::new("/tmp", "budget", 4 * MIB, true, still(2 * MIB));
    let promote = |unit| served.tier.promote(&served.region, unit).unwrap();
    assert!(promote(0) && promote(1) && !promote(1) && !promote(2));
    assert_eq!(served.tier.stats().locked_bytes, 2 * MIB);
    assert!(served.tier.pin(&served.region).unwrap_err().to_string().contains("does not fit"));
    assert!(served.tier.demote(&served.region, 0).unwrap() && promote(2));
    served.tier.remove(&served.region);
    assert_eq!(served.tier.stats().locked_bytes, 0);
}

#[test]
fn a_pinned_region_stays() {
    let served = Served::new("/tmp", "pinned", 3 * MIB, true, still(3 * MIB));
    served.tier.pin(&served.region).unwrap();
    assert_eq!(served.region.stats().units_resident, 3);
    assert!(!served.tier.demote(&served.region, 1).unwrap());
}

#[test]
fn the_thread_that_took_requests_to_the_device_may_end() {
    for exclusive in [true, false] {
        let served = Served::new("/tmp", "ended", 4 * MIB, exclusive, still(2 * MIB));
        for round in 0..20u8 {
            let transfers = std::thread::scope(|scope| {
                let ask = || {
                    let write = |index: u64| {
                        served.region.write(served.addr() + index * 50_000, &[round; 9000], &served.waker)
                    };
                    let transfers: Vec<_> = (0..40).filter_map(|index| write(index).ok()).collect();
                    served.tier.advance();
                    transfers
                };
                scope.spawn(ask).join().unwrap()
            });
            assert!(transfers.len() > 10);
            transfers.iter().for_each(|write| assert_eq!(served.wait(write), Ok(()), "round {round}"));
        }
        assert_eq!(served.read(50_000, 9000).unwrap(), [19; 9000]);
    }
}

/// The device node is on a memory file system; the device is not.
#[test]
fn a_block_device_is_accessed_past_the_page_cache() {
    let Some((path, _device)) = loop_device(&Scratch::new("/tmp", "image").0, 4 * MIB) else {
        return eprintln!("no right to make loop devices: not tried");
    };
    let tier = Tier::open(still(2 * MIB)).unwrap();
    let file = BackingFile::open(&path, None, true).unwrap();
    let region = tier.add(file.source().unwrap()).unwrap();
    let (waker, _) = counting_waker();
    let range = HostRange { addr: file.map().addr + 5000, len: 9000 };
    wait(&tier, &region.write(range.addr, &[5; 9000], &waker).unwrap()).unwrap();
    let read = region.read(range, &waker).unwrap();
    wait(&tier, &read).unwrap();
    let mut out = [0; 9000];
    read.read(0, &mut out).unwrap();
    assert_eq!(out, [5; 9000]);
    assert_eq!((region.stats().writes.direct, region.stats().reads.direct), (1, 1));
    tier.remove(&region);
}
