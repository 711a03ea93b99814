//! A failure returns an error for one access, and has no other effects.

mod common;

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::sync::Arc;
use std::time::Duration;

use common::{Scratch, Served, tiering};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use rustix::fs::FallocateFlags;
use terrace_baseline::device::{Best, Faults, Faulty, OnlyThreads};
use terrace_baseline::{Baseline, BaselineConfig, IoMethod};
use terrace_hostmem::AtomicOp;
use terrace_memory::{AccessError, Pager, Transfer};

const MIB: u64 = 1 << 20;
const REGION_BYTES: u64 = 2 * MIB;

/// An access under way, and the expected bytes: `None` for bytes that are unknown since a write failed.
struct Pending {
    transfer: Arc<dyn Transfer>,
    offset: usize,
    len: usize,
    is_write: bool,
    wanted: Vec<Option<u8>>,
}

/// Random accesses on a device with faults; accesses that succeed must be right.
fn survive(seed: u64, faults: Faults) -> (usize, usize) {
    let faulty =
        Faulty::new(if seed.is_multiple_of(2) { Arc::new(Best) } else { Arc::new(OnlyThreads) }, faults);
    let config = BaselineConfig { device: Arc::new(faulty.clone()), ..tiering(MIB) };
    let served = Served::new("/tmp", "faulty", REGION_BYTES, true, config);
    let mut random = StdRng::seed_from_u64(seed);
    let mut known = vec![Some(0u8); REGION_BYTES as usize];
    let mut pending: VecDeque<Pending> = VecDeque::new();
    let (mut good, mut bad) = (0, 0);
    let mut settle = |known: &mut Vec<Option<u8>>, one: Pending, later: &VecDeque<Pending>| {
        match served.wait(&one.transfer) {
            Ok(()) if one.is_write => good += 1,
            Ok(()) => {
                good += 1;
                let mut out = vec![0; one.len];
                one.transfer.read(0, &mut out).unwrap();
                for (index, (found, wanted)) in out.iter().zip(&one.wanted).enumerate() {
                    assert!(wanted.is_none_or(|wanted| wanted == *found), "byte {index} at {}", one.offset);
                }
            }
            Err(error) => {
                assert!(matches!(error, AccessError::Device | AccessError::NoSpace), "{error}");
                bad += 1;
                if one.is_write {
                    // These bytes and those of later writes under way are unknown now.
                    known[one.offset..one.offset + one.len].fill(None);
                    for write in later.iter().filter(|later| later.is_write) {
                        known[write.offset..write.offset + write.len].fill(None);
                    }
                }
            }
        }
    };
    for _ in 0..600 {
        let longest = if random.random() { 9000 } else { 100 };
        let len = random.random_range(1..=longest);
        let offset = random.random_range(0..200_000usize);
        let is_write = random.random();
        let range = served.range(offset as u64, len as u64);
        let transfer = if is_write {
            let mut data = vec![0; len];
            random.fill_bytes(&mut data);
            let transfer = served.region.write(range.addr, &data, &served.waker).unwrap();
            for (known, byte) in known[offset..offset + len].iter_mut().zip(data) {
                *known = Some(byte);
            }
            transfer
        } else {
            served.region.read(range, &served.waker).unwrap()
        };
        // The result of a read behind a write that may yet fail is unknown.
        let doubtful = |at: usize| {
            pending
                .iter()
                .any(|other| other.is_write && (other.offset..other.offset + other.len).contains(&at))
        };
        let wanted = (offset..offset + len).map(|at| known[at].filter(|_| !doubtful(at))).collect();
        pending.push_back(Pending { transfer, offset, len, is_write, wanted });
        if pending.len() > 8 {
            let one = pending.pop_front().unwrap();
            settle(&mut known, one, &pending);
        }
    }
    while let Some(one) = pending.pop_front() {
        settle(&mut known, one, &pending);
    }
    faulty.heal(true);
    for (offset, known) in (0..200_000).step_by(8000).zip(known.chunks(8000)) {
        let found = served.read(offset, 8000).unwrap();
        assert!(found.iter().zip(known).all(|(found, known)| known.is_none_or(|known| known == *found)));
    }
    assert_eq!(served.region.stats().errors as usize, bad);
    (good, bad)
}

#[test]
fn errors_of_the_device_fail_one_access_each() {
    for seed in 0..4 {
        let faults = Faults {
            seed,
            io_errors_permille: 60,
            disk_full_permille: 30,
            short_permille: 200,
            delay_looks_max: 5,
            ..Faults::default()
        };
        let (good, bad) = survive(seed, faults);
        assert!(good > 300 && bad > 10, "{good} good, {bad} bad");
    }
}

#[test]
fn short_transfers_and_delays_are_no_errors() {
    for seed in 0..2 {
        let faults = Faults {
            seed,
            short_permille: 500,
            canceled_permille: 200,
            delay_looks_max: 9,
            ..Faults::default()
        };
        assert_eq!(survive(seed, faults).1, 0);
    }
}

/// A region on a device with faults until it is healed.
fn on_faulty(name: &str, faults: Faults) -> (Faulty, Served) {
    let faulty = Faulty::new(Arc::new(Best), faults);
    let config = BaselineConfig { device: Arc::new(faulty.clone()), ..tiering(MIB) };
    let served = Served::new("/tmp", name, REGION_BYTES, true, config);
    (faulty, served)
}

#[test]
fn a_device_that_takes_nothing_for_a_while_is_no_error() {
    let faults = Faults { canceled_permille: 1000, ..Faults::default() };
    let (faulty, served) = on_faulty("pause", faults);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            faulty.heal(true);
        });
        assert_eq!(served.write(100, &[5; 5000]), Ok(()));
    });
    assert_eq!(served.read(100, 5000).unwrap(), [5; 5000]);
}

#[test]
fn a_flush_that_fails_says_so() {
    let faults = Faults { io_errors_permille: 1000, ..Faults::default() };
    let (faulty, served) = on_faulty("flush", faults);
    assert_eq!(served.flush(0, MIB), Err(AccessError::Flush));
    assert_eq!(served.atomic(8, AtomicOp::FetchAdd { add: 1 }), Err(AccessError::Device));
    faulty.heal(true);
    assert_eq!(served.flush(0, MIB), Err(AccessError::Flush), "nobody knows what was lost");
    assert_eq!(served.atomic(8, AtomicOp::FetchAdd { add: 1 }), Ok(0));
}

#[test]
fn a_file_truncated_while_it_is_served_fails_what_lies_beyond() {
    for dir in ["/tmp", "/dev/shm"] {
        for io in [IoMethod::Tiering, IoMethod::Mapping, IoMethod::Pinned] {
            let config = BaselineConfig { io, ..tiering(4 * MIB) };
            let served = Served::new(dir, "truncated", 4 * MIB, true, config);
            for offset in [0, 2 * MIB] {
                served.write(offset, &[7; 5000]).unwrap();
            }
            let file = OpenOptions::new().write(true).open(&served.scratch.0).unwrap();
            file.set_len(MIB).unwrap();
            assert_eq!(served.read(0, 5000).unwrap(), [7; 5000]);
            assert_eq!(served.read(2 * MIB, 5000), Err(AccessError::Fault), "{dir} {io:?}");
            assert_eq!(served.read(MIB + 5, 10), Err(AccessError::Fault));
            assert_eq!(served.read(MIB - 5, 10), Err(AccessError::Fault));
            assert_eq!(served.flush(0, 4 * MIB), Ok(()));
            assert!(served.write(10, &[7; 10]).is_ok());
            file.set_len(4 * MIB).unwrap();
            assert_eq!(served.read(3 * MIB, 10), Ok(vec![0; 10]));
        }
    }
}

#[test]
fn a_disk_that_is_full_fails_writes_to_holes() {
    // A small file system: a tmpfs with a size limit. Needs the right to mount.
    let dir = Scratch::new("/tmp", "full");
    std::fs::create_dir(&dir.0).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"])
        .arg(&dir.0)
        .output()
        .is_ok_and(|output| output.status.success());
    if !mounted {
        eprintln!("no right to mount: not tried");
        std::fs::remove_dir(&dir.0).unwrap();
        return;
    }
    let outcome = std::panic::catch_unwind(|| {
        let served = Served::new(dir.0.to_str().unwrap(), "region", 4 * MIB, true, tiering(4 * MIB));
        assert_eq!(served.write(0, &[1; 4096]), Ok(()));
        let refused = (1..100).find_map(|page| served.write(page * 16384, &[1; 16384]).err());
        assert_eq!(refused, Some(AccessError::NoSpace), "more than the disk has");
        assert_eq!(served.read(0, 4096).unwrap(), [1; 4096]);
        assert!(served.write(0, &[2; 4096]).is_ok());
    });
    std::process::Command::new("umount").arg(&dir.0).status().unwrap();
    std::fs::remove_dir(&dir.0).unwrap();
    outcome.unwrap();
}

#[test]
fn sources_that_make_no_sense_are_refused() {
    let served = Served::new("/tmp", "sources", MIB, true, tiering(MIB));
    let refused = |change: fn(&mut terrace_baseline::Source)| {
        let mut source = served.file.source().unwrap();
        change(&mut source);
        served.baseline.add(source).unwrap_err().to_string()
    };
    assert!(refused(|source| source.map.len = 0).contains("no bytes"));
    assert!(refused(|source| source.map.addr += 1).contains("begin at a page"));
    assert!(refused(|source| source.file_offset = 4096).contains("file ends before"));
    assert!(refused(|source| source.file_offset = u64::MAX - 4095).contains("file ends before"));
    assert!(refused(|source| source.map.len = u64::MAX).contains("overflows"));
    assert!(refused(|source| source.exclusive = false).contains("others use its file"));
}

#[test]
fn what_may_not_be_written_is_not() {
    let config = BaselineConfig::new(IoMethod::Mapping, MIB);
    let served = Served::new("/tmp", "readonly", MIB, false, config);
    let source = terrace_baseline::Source { writable: false, ..served.file.source().unwrap() };
    let region = served.baseline.add(source).unwrap();
    let written = region.write(served.addr(), &[1], &served.waker).map(drop);
    assert_eq!(written, Err(AccessError::Permission));
    let changed = region.atomic(served.addr(), AtomicOp::FetchAdd { add: 1 }, &served.waker).map(drop);
    assert_eq!(changed, Err(AccessError::Permission));
    assert!(region.read(served.range(0, 10), &served.waker).is_ok());
    served.baseline.remove(&region);
}

#[test]
fn a_hole_reads_as_zeros_and_so_does_data_that_is_zeros() {
    let served = Served::new("/tmp", "zeros", MIB, true, tiering(MIB));
    served.write(0, &[0; 8192]).unwrap();
    let file = OpenOptions::new().write(true).open(&served.scratch.0).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 16384, 4096).unwrap();
    for offset in [0, 8192, 16384] {
        assert_eq!(served.read(offset, 8192).unwrap(), [0; 8192]);
        assert_eq!(served.read(offset + 3, 5000).unwrap(), [0; 5000]);
    }
    let _: &Baseline = &served.baseline;
}

#[test]
fn many_that_wait_for_the_same_page_can_fail_at_once() {
    let faults = Faults { delay_looks_max: 50, ..Faults::default() };
    let config =
        BaselineConfig { device: Arc::new(Faulty::new(Arc::new(Best), faults)), ..tiering(64 * MIB) };
    let served = Served::new("/tmp", "pile", REGION_BYTES, true, config);
    let beyond = REGION_BYTES - 4096;
    let first = served.region.read(served.range(beyond, 10), &served.waker).unwrap();
    let file = OpenOptions::new().write(true).open(&served.scratch.0).unwrap();
    file.set_len(MIB).unwrap();
    let mut waiting = Vec::new();
    while let Ok(write) = served.region.write(served.addr() + beyond, &[1; 8], &served.waker) {
        waiting.push(write);
    }
    assert!(waiting.len() > 50);
    // Its read may come before or after the truncation.
    let _ = served.wait(&first);
    waiting.iter().for_each(|write| assert_eq!(served.wait(write), Err(AccessError::Fault)));
}
