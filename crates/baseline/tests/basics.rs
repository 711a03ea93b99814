//! Single accesses by each method, and the counters that they increment.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::{Scratch, Served, cached_bytes, counting_waker, loop_device, tiering, wait};
use terrace_baseline::device::OnlyThreads;
use terrace_baseline::{BackingFile, Baseline, BaselineConfig, IoMethod, Source, TRANSFER_BYTES_MAX};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager};

const MIB: u64 = 1 << 20;
const DIRS: [&str; 2] = ["/tmp", "/dev/shm"];

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|index| (((seed + index) * 0x9e37_79b9) >> 16) as u8).collect()
}

/// All kinds of accesses.
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
        // The file and the region have the same bytes. From the second round on, the page cache has them, too.
        let whole = std::fs::read(&served.scratch.0).unwrap();
        assert_eq!(served.read(5000, 9000).unwrap(), whole[5000..14000]);
    }
}

const METHODS: [IoMethod; 5] =
    [IoMethod::Tiering, IoMethod::Direct, IoMethod::Buffered, IoMethod::Mapping, IoMethod::Pinned];

#[test]
fn every_access_works_by_every_method() {
    for dir in DIRS {
        for io in METHODS {
            let config = BaselineConfig::new(io, 8 * MIB);
            exercise(&Served::new(dir, "methods", 4 * MIB, true, config.clone()));
            if matches!(io, IoMethod::Mapping | IoMethod::Pinned) {
                exercise(&Served::new(dir, "shared", 4 * MIB, false, config));
            }
        }
        let config = BaselineConfig { device: Arc::new(OnlyThreads), ..tiering(8 * MIB) };
        exercise(&Served::new(dir, "threads", 4 * MIB, true, config));
    }
}

#[test]
fn what_the_page_cache_has_not_is_accessed_past_it() {
    for (io, cached) in [(IoMethod::Tiering, 0), (IoMethod::Direct, 0), (IoMethod::Buffered, 8192)] {
        let served = Served::new("/tmp", "past", 4 * MIB, true, BaselineConfig::new(io, 2 * MIB));
        served.write(0, &[1; 4096]).unwrap();
        served.write(10, &[2; 10]).unwrap();
        served.read(4096, 4096).unwrap();
        assert_eq!(cached_bytes(served.file.map()), cached, "{io:?}");
        let stats = served.region.stats();
        assert_eq!((stats.hits, stats.misses, stats.latency.count), (0, 3, 3));
    }
}

#[test]
fn what_the_page_cache_has_is_accessed_there() {
    let served = Served::new("/tmp", "there", 4 * MIB, true, tiering(2 * MIB));
    served.write(0, &[1; 4096]).unwrap();
    served.flush(0, 4096).unwrap();
    std::fs::read(&served.scratch.0).unwrap();
    served.write(0, &[2; 4096]).unwrap();
    assert_eq!(served.read(0, 4096).unwrap(), [2; 4096]);
    assert!(cached_bytes(served.file.map()) >= 4096, "a direct write drops the page");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let served = Served::new("/tmp", "refused", 2 * MIB, true, tiering(2 * MIB));
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
    served.baseline.remove(&served.region);
    assert_eq!(read(addr, 2), Err(AccessError::Fault));
}

#[test]
fn the_waker_is_called_for_each_transfer_and_for_room() {
    let served = Served::new("/tmp", "wakers", 4 * MIB, true, tiering(2 * MIB));
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
fn a_pinned_region_stays_within_the_budget() {
    let served = Served::new("/tmp", "pinned", 3 * MIB, true, BaselineConfig::new(IoMethod::Pinned, 4 * MIB));
    assert!(served.region.translation().is_present(served.file.map()));
    assert_eq!(cached_bytes(served.file.map()), 3 * MIB);
    served.read(0, 4096).unwrap();
    assert_eq!(served.region.stats().hits, 1);
    assert_eq!(served.baseline.stats().resident_bytes, 3 * MIB);
    let refused = served.baseline.add(Source { exclusive: false, ..served.file.source().unwrap() });
    assert!(refused.unwrap_err().to_string().contains("does not fit"));
    served.baseline.remove(&served.region);
    assert_eq!(served.baseline.stats().resident_bytes, 0);
    assert!(served.read(0, 4096).is_err());
}

#[test]
fn the_thread_that_took_requests_to_the_device_may_end() {
    for io in [IoMethod::Tiering, IoMethod::Buffered] {
        let served = Served::new("/tmp", "ended", 4 * MIB, true, BaselineConfig::new(io, 2 * MIB));
        for round in 0..20u8 {
            let transfers = std::thread::scope(|scope| {
                let ask = || {
                    let write = |index: u64| {
                        served.region.write(served.addr() + index * 50_000, &[round; 9000], &served.waker)
                    };
                    let transfers: Vec<_> = (0..40).filter_map(|index| write(index).ok()).collect();
                    served.baseline.advance();
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
    let baseline = Baseline::open(tiering(2 * MIB)).unwrap();
    let file = BackingFile::open(&path, None).unwrap();
    let region = baseline.add(file.source().unwrap()).unwrap();
    let (waker, _) = counting_waker();
    let range = HostRange { addr: file.map().addr + 5000, len: 9000 };
    wait(&baseline, &region.write(range.addr, &[5; 9000], &waker).unwrap()).unwrap();
    let read = region.read(range, &waker).unwrap();
    wait(&baseline, &read).unwrap();
    let mut out = [0; 9000];
    read.read(0, &mut out).unwrap();
    assert_eq!(out, [5; 9000]);
    assert_eq!(cached_bytes(file.map()), 0);
    baseline.remove(&region);
}
