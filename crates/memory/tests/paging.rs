//! Regions with absent memory: present bytes are copied; absent ones are refused, answered with the signature page or
//! left to the pager. Nothing is torn while units come and go.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use common::finally::Finally;
use common::pager::{Cells, TestPager};
use common::units::UNIT_BYTES;
use common::*;
use proptest::prelude::*;
use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES, fault};
use terrace_memory::{
    Absence, Access, AccessError, AccessNeed, Accessor, FlushScope, Pattern, RegionPolicy, RegionSpec,
    RegisterError, Registry, Waker, WindowBind, WindowKind,
};

/// Bytes of the memory: the end of one unit, a whole one, and the beginning of a third.
const LEN: usize = 2 * FRINGE + UNIT_BYTES as usize;
const FRINGE: usize = 4 * PAGE;

struct Raw(u64);

impl Cells for Raw {
    fn get(&self, offset: usize, out: &mut [u8]) {
        // SAFETY: the mapping outlives the pager in these tests.
        unsafe { fault::copy_from(self.0 + offset as u64, out) }.expect("mapped");
    }

    fn set(&self, offset: usize, data: &[u8]) {
        // SAFETY: as above.
        unsafe { fault::copy_to(self.0 + offset as u64, data) }.expect("mapped");
    }

    fn exchange(&self, offset: usize, expected: u64, new: u64) -> bool {
        // SAFETY: as above.
        let before = unsafe { fault::compare_swap(self.0 + offset as u64, expected, new) };
        before.expect("mapped") == expected
    }
}

struct Paged {
    registry: Registry,
    memory: Mapping,
    pager: Arc<TestPager>,
    key: u32,
}

fn magic() -> Pattern {
    Arc::new(std::array::from_fn(|at| (at as u8).wrapping_mul(7) ^ (at >> 8) as u8 ^ 0x5a))
}

/// The first content of the memory.
fn byte(offset: usize) -> u8 {
    (offset ^ offset >> 9) as u8
}

fn paged(policy: RegionPolicy) -> Paged {
    let (registry, memory) = (registry(), Mapping::anonymous(LEN));
    memory.bytes().iter_mut().enumerate().for_each(|(at, cell)| *cell = byte(at));
    let range = HostRange { addr: memory.addr, len: LEN as u64 };
    let pager = TestPager::new(range, UNIT_BYTES - FRINGE as u64, Box::new(Raw(memory.addr)));
    let spec = RegionSpec {
        pager: Some(pager.clone()),
        pattern: Some(magic()),
        policy,
        ..RegionSpec::new(PD, memory.addr, LEN as u64, ALL)
    };
    let key = registry.register(&spec).expect("registration").key;
    Paged { registry, memory, pager, key }
}

/// A waker that counts.
fn counting() -> (Waker, Arc<AtomicU32>) {
    let count = Arc::new(AtomicU32::new(0));
    let counted = count.clone();
    let waker = move || {
        counted.fetch_add(1, Ordering::SeqCst);
    };
    (Arc::new(waker), count)
}

impl Paged {
    fn read(&self, who: Accessor, offset: usize, len: usize) -> Result<Vec<u8>, AccessError> {
        let mut out = vec![0; len];
        self.registry.read(who, self.key, self.memory.addr + offset as u64, &mut out).map(|()| out)
    }

    fn write(&self, offset: usize, data: &[u8]) -> Result<(), AccessError> {
        self.registry.write(peer(), self.key, self.memory.addr + offset as u64, data)
    }

    fn add(&self, offset: usize) -> Result<u64, AccessError> {
        let op = AtomicOp::FetchAdd { add: 1 };
        self.registry.atomic(peer(), self.key, self.memory.addr + offset as u64, op)
    }
}

/// What the peer has written before it sends the invalidation takes effect before the receive completes, unless the program ends
/// or binds the window earlier.
#[test]
fn changes_through_a_window_go_on_behind_a_peers_invalidation_until_its_owner_ends_or_binds_it() {
    let cancelled = Some(Err(AccessError::Fault));
    for ends in [true, false] {
        let paged = paged(RegionPolicy::Wait);
        let window = paged.registry.alloc_window(PD, WindowKind::Type2).expect("room");
        let bind = WindowBind {
            window_key: window,
            new_key: window,
            region_key: paged.key,
            addr: paged.memory.addr,
            len: LEN as u64,
            access: Access::REMOTE_WRITE,
            pd: PD,
            qpn: QPN,
        };
        paged.registry.bind_window(&bind).expect("bound");
        let put = || {
            let va = paged.memory.addr + FRINGE as u64;
            paged.registry.put(peer(), window, va, &[7; 8], &counting().0).expect("absent memory")
        };
        let first = put();
        paged.registry.invalidate(peer(), window).expect("bound");
        assert_eq!(first.outcome(), None);
        match ends {
            true => paged.registry.free_window(window).expect("a window"),
            false => paged.registry.bind_window(&bind).expect("free"),
        }
        assert_eq!(first.outcome(), cancelled);
        if !ends {
            let second = put();
            paged.registry.invalidate(Accessor::local(PD, QPN), window).expect("bound");
            assert_eq!(second.outcome(), cancelled, "a work request of the owner");
        }
    }
}

#[test]
fn what_is_present_is_copied_and_what_is_absent_is_refused() {
    let paged = paged(RegionPolicy::Wait);
    assert_eq!(paged.read(peer(), 0, 8), Err(AccessError::NotReady));
    assert_eq!(paged.write(FRINGE, &[1; 8]), Err(AccessError::NotReady));
    assert_eq!(paged.add(FRINGE), Err(AccessError::NotReady));
    assert!(paged.pager.admit(1));
    assert_eq!(
        paged.read(peer(), FRINGE, 100).unwrap(),
        (FRINGE..FRINGE + 100).map(byte).collect::<Vec<_>>()
    );
    paged.write(FRINGE, &[1; 8]).unwrap();
    assert_eq!(paged.add(FRINGE), Ok(0x0101_0101_0101_0101));
    // A write across the border writes nothing.
    assert_eq!(paged.write(FRINGE - 4, &[9; 8]), Err(AccessError::NotReady));
    assert_eq!(paged.read(peer(), FRINGE, 4).unwrap(), [2, 1, 1, 1]);
    // Local accesses bypass the pager.
    assert!(paged.read(local(), 0, 8).is_ok());
    assert_eq!(paged.read(peer(), LEN - 4, 8), Err(AccessError::OutOfRange), "checks come first");
    assert_eq!(paged.pager.counts().1, 0);
}

#[test]
fn magic_fills_absent_bytes_with_the_pattern_of_their_place_in_the_page() {
    let paged = paged(RegionPolicy::Wait);
    let who = peer().with_absence(Absence::Magic);
    assert!(paged.pager.admit(1));
    let pattern = magic();
    let start = FRINGE - PAGE - 100;
    let seen = paged.read(who, start, PAGE + 200).unwrap();
    for (at, seen) in (start..).zip(&seen[..PAGE + 100]) {
        assert_eq!(*seen, pattern[at % PAGE], "at {at}");
    }
    assert_eq!(seen[PAGE + 100..], (FRINGE..FRINGE + 100).map(byte).collect::<Vec<_>>());
    assert_eq!(paged.registry.announce(who, paged.key, paged.memory.addr, 64, AccessNeed::Read), Ok(()));
    // A write or an atomic is never answered with the signature page.
    let va = paged.memory.addr;
    let announced = paged.registry.announce(who, paged.key, va, 64, AccessNeed::Write);
    assert_eq!(announced, Err(AccessError::NotReady));
    assert_eq!(paged.registry.write(who, paged.key, va, &[0]), Err(AccessError::NotReady));
}

#[test]
fn a_faulting_region_asks_for_what_is_missing_and_sends_peers_away() {
    let paged = paged(RegionPolicy::Fault);
    assert!(paged.pager.admit(0));
    for who in [peer(), peer().with_absence(Absence::Magic)] {
        assert_eq!(paged.read(who, FRINGE - 8, 16), Err(AccessError::Retry));
    }
    let (va, len) = (paged.memory.addr, LEN as u64);
    let announced = paged.registry.announce(peer(), paged.key, va, len, AccessNeed::Read);
    assert_eq!(announced, Err(AccessError::Retry));
    // `TestPager::read` asserts that no fetch exceeds 64 KiB.
    assert_eq!(paged.pager.counts(), (3, 3));
    assert_eq!(paged.add(FRINGE), Err(AccessError::Retry));
    assert!(paged.pager.complete_one(Ok(())));
}

#[test]
fn a_commodity_region_neither_waits_nor_refuses() {
    let paged = paged(RegionPolicy::Commodity);
    assert!(paged.pager.admit(1));
    let (va, pattern) = (paged.memory.addr, magic());
    for need in [AccessNeed::Read, AccessNeed::Write, AccessNeed::Atomic] {
        assert_eq!(paged.registry.announce(peer(), paged.key, va, LEN as u64, need), Ok(()));
    }
    let expected: Vec<u8> =
        (0..8).map(|at| pattern[PAGE - 8 + at]).chain((FRINGE..FRINGE + 8).map(byte)).collect();
    assert_eq!(paged.read(peer(), FRINGE - 8, 16).unwrap(), expected);
    // What is for the absent page falls into the black hole; the present one has its part.
    paged.write(FRINGE - 8, &[9; 16]).unwrap();
    assert_eq!(paged.read(peer(), FRINGE, 8).unwrap(), [9; 8]);
    let signature = u64::from_ne_bytes(*pattern.first_chunk().unwrap());
    assert_eq!(paged.add(0), Ok(signature));
    assert_eq!(paged.add(FRINGE), Ok(0x0909_0909_0909_0909));
    // An accessor that has had the memory brought finds other memory in its place.
    let (refuse, not_ready) = (peer().with_absence(Absence::Refuse), Err(AccessError::NotReady));
    let add = AtomicOp::FetchAdd { add: 1 };
    assert_eq!(paged.read(refuse, FRINGE - 8, 16).map(drop), not_ready);
    assert_eq!(paged.registry.write(refuse, paged.key, va + FRINGE as u64 - 8, &[7; 16]), not_ready);
    assert_eq!(paged.registry.atomic(refuse, paged.key, va, add).map(drop), not_ready);
    assert_eq!(paged.registry.atomic(refuse, paged.key, va + FRINGE as u64, add), Ok(0x0909_0909_0909_090a));
    assert_eq!(paged.pager.counts(), (0, 0), "the pager is not asked");
    assert!(paged.pager.admit(0));
    let before: Vec<u8> = (FRINGE - 8..FRINGE).map(byte).collect();
    assert_eq!(paged.read(peer(), FRINGE - 8, 8).unwrap(), before);
    assert_eq!(paged.read(peer(), 0, 8).unwrap(), (0..8).map(byte).collect::<Vec<_>>());
    assert_eq!(paged.read(peer(), LEN - 4, 8), Err(AccessError::OutOfRange), "checks are as ever");
}

#[test]
fn a_commodity_region_needs_a_signature_page() {
    let paged = paged(RegionPolicy::Commodity);
    let spec = RegionSpec {
        pager: Some(paged.pager.clone()),
        policy: RegionPolicy::Commodity,
        ..RegionSpec::new(PD, paged.memory.addr, LEN as u64, ALL)
    };
    assert!(matches!(paged.registry.register(&spec), Err(RegisterError::Invalid(_))));
}

#[test]
fn accesses_are_counted_hit_or_miss() {
    let paged = paged(RegionPolicy::Wait);
    assert!(paged.pager.admit(1));
    let va = paged.memory.addr;
    let _ = paged.registry.announce(peer(), paged.key, va, LEN as u64, AccessNeed::Read);
    let _ = paged.registry.announce(peer(), paged.key, va, 8, AccessNeed::Write);
    let _ = paged.add(FRINGE);
    assert_eq!([0, 1, 2].map(|unit| paged.pager.units().counts(unit)), [(0, 2), (1, 1), (0, 1)]);
}

#[test]
fn who_gets_the_pattern_is_counted_when_it_asks_again() {
    let paged = paged(RegionPolicy::Wait);
    assert!(paged.pager.admit(1));
    let who = Accessor { absence: Absence::Magic, ..peer() };
    let va = paged.memory.addr;
    for offset in [0, FRINGE as u64] {
        paged.registry.announce(who, paged.key, va + offset, 8, AccessNeed::Read).unwrap();
    }
    let _ = paged.registry.announce(who, paged.key, va, 8, AccessNeed::Write);
    assert_eq!([0, 1].map(|unit| paged.pager.units().counts(unit)), [(0, 1), (1, 0)]);
}

#[test]
fn the_pager_carries_out_what_is_absent() {
    let paged = paged(RegionPolicy::Wait);
    let (waker, woken) = counting();
    let (registry, key, va) = (&paged.registry, paged.key, paged.memory.addr);
    let put = registry.put(peer(), key, va + 10, b"absent", &waker).unwrap();
    let read = registry.fetch(peer(), key, va + 8, 12, &waker).unwrap();
    let add = registry.put_atomic(peer(), key, va + 64, AtomicOp::FetchAdd { add: 1 }, &waker).unwrap();
    let flush = registry.flush(peer(), key, va, 64, 2, FlushScope::Range);
    assert_eq!(flush, Err(AccessError::NotReady));
    let flush = registry.flush_paged(peer(), key, va, 64, 2, FlushScope::Region, &waker).unwrap();
    // Global visibility needs no pager.
    assert_eq!(registry.flush(peer(), key, va, 64, 1, FlushScope::Range), Ok(()));
    assert!([&put, &read, &add, &flush].iter().all(|transfer| transfer.outcome().is_none()));
    while paged.pager.complete_one(Ok(())) {}
    assert_eq!(woken.load(Ordering::SeqCst), 4);
    assert!([&put, &read, &add, &flush].iter().all(|transfer| transfer.outcome() == Some(Ok(()))));
    let mut out = [0; 10];
    read.read(2, &mut out).unwrap();
    assert_eq!(out[..6], *b"absent");
    assert_eq!(out[6..], (16..20).map(byte).collect::<Vec<_>>());
    assert_eq!(paged.pager.peek(va + 64, 1), [byte(64) + 1]);
    // The checks are those of any access.
    let refused = registry.fetch(Accessor::remote(PD + 1, QPN), key, va, 8, &waker).map(drop);
    assert_eq!(refused, Err(AccessError::WrongPd));
    let refused = registry.put_atomic(peer(), key, va + 4, AtomicOp::Write { value: 0 }, &waker).map(drop);
    assert_eq!(refused, Err(AccessError::Misaligned));
    assert_eq!(
        registry.put(peer(), key, va + LEN as u64, b"x", &waker).map(drop),
        Err(AccessError::OutOfRange)
    );
}

#[test]
fn a_put_writes_present_ends_at_once_and_hands_the_middle_to_the_pager() {
    let paged = paged(RegionPolicy::Wait);
    assert!(paged.pager.admit(0) && paged.pager.admit(2));
    let (waker, _) = counting();
    let (start, len) = (FRINGE - 100, UNIT_BYTES as usize + 200);
    let data: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x33).collect();
    let put = paged.registry.put(peer(), paged.key, paged.memory.addr + start as u64, &data, &waker).unwrap();
    assert_eq!(paged.read(peer(), start, 100).unwrap(), data[..100]);
    assert_eq!(paged.read(peer(), LEN - FRINGE, 100).unwrap(), data[len - 100..]);
    // A later write is not undone when the pager ends the access.
    paged.write(start, &[7; 100]).unwrap();
    assert!(paged.pager.complete_one(Ok(())));
    assert_eq!(put.outcome(), Some(Ok(())));
    assert_eq!(paged.read(peer(), start, 100).unwrap(), [7; 100]);
    assert_eq!(paged.pager.peek(paged.memory.addr + FRINGE as u64, len - 200), data[100..len - 100]);
}

#[test]
fn without_room_the_waker_is_called_when_there_is_some() {
    let paged = paged(RegionPolicy::Wait);
    paged.pager.set_habits(1, Box::new(|| 0));
    let (first, first_woken) = counting();
    let (second, second_woken) = counting();
    let fetch = |waker| paged.registry.fetch(peer(), paged.key, paged.memory.addr, 8, waker).map(drop);
    assert_eq!(fetch(&first), Ok(()));
    assert_eq!(fetch(&second), Err(AccessError::NotReady));
    assert!(paged.pager.complete_one(Ok(())));
    assert_eq!((first_woken.load(Ordering::SeqCst), second_woken.load(Ordering::SeqCst)), (1, 1));
    assert_eq!(fetch(&second), Ok(()));
}

#[test]
fn records_go_to_the_end_by_the_regions_key_only() {
    let paged = paged(RegionPolicy::Wait);
    let (registry, waker) = (&paged.registry, counting().0);
    let append = |key, record: &[u8]| registry.append(peer(), key, record, false, &waker);
    let transfers = [append(paged.key, b"first").unwrap(), append(paged.key, b"second").unwrap()];
    assert!(paged.pager.complete_latest());
    assert_eq!(transfers[0].outcome(), None);
    assert!(paged.pager.complete_latest());
    let offsets = transfers.map(|transfer| {
        let mut offset = [0; 8];
        transfer.read(0, &mut offset).unwrap();
        u64::from_ne_bytes(offset)
    });
    assert_eq!((offsets, paged.pager.records()), ([0, 5], b"firstsecond".to_vec()));

    let refused = |who, key| {
        let checked = registry.check_append(who, key);
        assert_eq!(registry.append(who, key, b"third", false, &waker).map(drop), checked);
        checked
    };
    assert_eq!(refused(local(), paged.key), Err(AccessError::Permission));
    assert_eq!(refused(peer(), paged.key ^ 1), Err(AccessError::UnknownKey));
    assert_eq!(refused(Accessor { pd: PD + 1, ..peer() }, paged.key), Err(AccessError::WrongPd));
    let window = registry.alloc_window(PD, WindowKind::Type2).unwrap();
    let (addr, len, access) = (paged.memory.addr, 64, Access::REMOTE_WRITE);
    let (region_key, window_key, new_key) = (paged.key, window, window);
    let bind = WindowBind { window_key, new_key, region_key, addr, len, access, pd: PD, qpn: QPN };
    registry.bind_window(&bind).unwrap();
    assert_eq!(refused(peer(), window), Err(AccessError::Permission));
    registry.invalidate(peer(), window).unwrap();
    let ordinary = registry.register(&RegionSpec::new(PD, paged.memory.addr, 64, ALL)).unwrap().key;
    assert_eq!(refused(peer(), ordinary), Err(AccessError::Permission));
    let change = terrace_memory::RegionChange { access: Some(Access::REMOTE_READ), ..Default::default() };
    registry.reregister(paged.key, &change).unwrap();
    assert_eq!(refused(peer(), paged.key), Err(AccessError::Permission));
    assert_eq!(paged.pager.records().len(), 11);
}

#[test]
fn windows_share_the_pager_and_a_moved_region_has_none() {
    let paged = paged(RegionPolicy::Wait);
    let registry = &paged.registry;
    let window = registry.alloc_window(PD, WindowKind::Type2).unwrap();
    let (addr, len, access) = (paged.memory.addr + FRINGE as u64, 64, Access::REMOTE_READ);
    let (region_key, window_key, new_key) = (paged.key, window, window);
    let bind = WindowBind { window_key, new_key, region_key, addr, len, access, pd: PD, qpn: QPN };
    registry.bind_window(&bind).unwrap();
    let mut out = [0; 8];
    assert_eq!(registry.read(peer(), window, addr, &mut out), Err(AccessError::NotReady));
    let who = peer().with_absence(Absence::Magic);
    assert_eq!(registry.read(who, window, addr, &mut out), Ok(()));
    assert_eq!(out, magic()[..8]);
    assert!(paged.pager.admit(1));
    assert_eq!(registry.read(peer(), window, addr, &mut out), Ok(()));
    assert_eq!(out.to_vec(), (FRINGE..FRINGE + 8).map(byte).collect::<Vec<_>>());
    registry.invalidate(peer(), window).unwrap();
    assert!(paged.pager.expel(1));
    let range = terrace_memory::NewRange { addr: paged.memory.addr, len: 64, iova: paged.memory.addr };
    let change = terrace_memory::RegionChange { range: Some(range), ..Default::default() };
    registry.reregister(paged.key, &change).unwrap();
    assert!(paged.read(peer(), 0, 8).is_ok());
    let fetch = registry.fetch(peer(), paged.key, paged.memory.addr, 8, &counting().0).map(drop);
    assert_eq!(fetch, Err(AccessError::Retry), "there is no pager to ask any more");
}

#[test]
fn a_forked_child_has_the_memory_and_no_pager() {
    let paged = paged(RegionPolicy::Wait);
    paged.registry.before_fork();
    // SAFETY: the child calls only what this test is about, and leaves without unwinding.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        paged.registry.after_fork_child();
        let good = paged.read(peer(), 0, 8).is_ok() && paged.write(FRINGE - 4, &[1; 8]).is_ok();
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    paged.registry.after_fork_parent();
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert_eq!(paged.read(peer(), 0, 8), Err(AccessError::NotReady));
}

/// Threads write whole words, through memory or through the pager, while units come and go. Every word that a reader
/// sees was written whole: it is neither corrupt nor half of another.
#[test]
fn nothing_is_torn_while_units_come_and_go() {
    const WORDS: usize = 64;
    const MARK: u64 = 0x5a5a_3c3c_ffff_0000;
    let paged = paged(RegionPolicy::Wait);
    let (paged, done) = (&paged, &AtomicBool::new(false));
    let (hits, misses) = (&AtomicU32::new(0), &AtomicU32::new(0));
    // A line of equal words on either side of a border.
    let start = FRINGE - WORDS * 4;
    let line = |number: u64| [number ^ MARK; WORDS].map(u64::to_ne_bytes).concat();
    let put = |data: &[u8]| match paged.write(start, data) {
        Ok(()) => {
            hits.fetch_add(1, Ordering::Relaxed);
        }
        Err(AccessError::NotReady) => {
            misses.fetch_add(1, Ordering::Relaxed);
            let va = paged.memory.addr + start as u64;
            let put = paged.registry.put(peer(), paged.key, va, data, &counting().0).unwrap();
            while put.outcome().is_none() && !done.load(Ordering::Relaxed) {
                thread::yield_now();
            }
        }
        Err(error) => panic!("{error}"),
    };
    put_all(paged, start, &line(0));
    thread::scope(|scope| {
        let _finally = Finally(done);
        scope.spawn(|| {
            for round in 0.. {
                if done.load(Ordering::Relaxed) {
                    return;
                }
                paged.pager.complete_one(Ok(()));
                paged.pager.admit(0);
                paged.pager.admit(1);
                thread::yield_now();
                paged.pager.expel(round % 2);
                thread::yield_now();
            }
        });
        scope.spawn(|| {
            (0u64..).take_while(|_| !done.load(Ordering::Relaxed)).for_each(|round| put(&line(round)))
        });
        let mut seen = 0;
        let enough =
            |seen| seen >= 5000 && [hits, misses].iter().all(|count| count.load(Ordering::Relaxed) >= 50);
        while !enough(seen) {
            let Ok(read) = paged.read(peer(), start, WORDS * 8) else {
                thread::yield_now();
                continue;
            };
            seen += 1;
            for word in read.chunks_exact(8) {
                let number = u64::from_ne_bytes(word.try_into().unwrap()) ^ MARK;
                assert!(number <= u64::from(u32::MAX), "{word:x?}");
            }
        }
    });
}

fn put_all(paged: &Paged, start: usize, data: &[u8]) {
    paged.pager.poke(paged.memory.addr + start as u64, data);
}

/// Atomics from several threads, to present or absent units, each happen once.
#[test]
fn additions_are_not_lost_while_a_unit_comes_and_goes() {
    const THREADS: u64 = 3;
    const ADDITIONS: u64 = 2000;
    let paged = paged(RegionPolicy::Wait);
    let done = AtomicBool::new(false);
    put_all(&paged, FRINGE, &0u64.to_ne_bytes());
    thread::scope(|scope| {
        let _finally = Finally(&done);
        let adders: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..ADDITIONS {
                        match paged.add(FRINGE) {
                            Ok(_) => {}
                            Err(AccessError::NotReady) => add_by_pager(&paged),
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                paged.pager.complete_one(Ok(()));
                paged.pager.admit(1);
                thread::yield_now();
                paged.pager.expel(1);
            }
        });
        adders.into_iter().for_each(|adder| adder.join().unwrap());
    });
    let sum = u64::from_ne_bytes(paged.pager.peek(paged.memory.addr + FRINGE as u64, 8).try_into().unwrap());
    assert_eq!(sum, THREADS * ADDITIONS);
}

fn add_by_pager(paged: &Paged) {
    let (op, va) = (AtomicOp::FetchAdd { add: 1 }, paged.memory.addr + FRINGE as u64);
    let add = paged.registry.put_atomic(peer(), paged.key, va, op, &counting().0).unwrap();
    while add.outcome().is_none() {
        thread::yield_now();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Read { start: usize, len: usize },
    Write { start: usize, data: Vec<u8> },
    Add { word: usize },
    Admit { unit: usize },
    Expel { unit: usize },
    Complete,
}

fn step() -> impl Strategy<Value = Step> {
    // Around either border of the unit in the middle.
    let start = || prop_oneof![FRINGE - 64..FRINGE + 64, LEN - FRINGE - 64..LEN - FRINGE + 64];
    prop_oneof![
        3 => (start(), 1usize..96).prop_map(|(start, len)| Step::Read { start, len }),
        3 => (start(), prop::collection::vec(any::<u8>(), 1..96))
            .prop_map(|(start, data)| Step::Write { start, data }),
        1 => start().prop_map(|start| Step::Add { word: start / 8 }),
        2 => (0usize..3).prop_map(|unit| Step::Admit { unit }),
        2 => (0usize..3).prop_map(|unit| Step::Expel { unit }),
        3 => Just(Step::Complete),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Whichever units are present, accesses return what plain memory would return, in the order in which they started.
    #[test]
    fn paged_memory_agrees_with_plain_memory(steps in prop::collection::vec(step(), 1..60)) {
        let paged = paged(RegionPolicy::Wait);
        let mut model: Vec<u8> = (0..LEN).map(byte).collect();
        let mut reads = Vec::new();
        let (waker, _) = counting();
        let (registry, key, base) = (&paged.registry, paged.key, paged.memory.addr);
        for step in steps {
            match step {
                Step::Read { start, len } => match paged.read(peer(), start, len) {
                    Ok(seen) => prop_assert_eq!(&seen, &model[start..start + len]),
                    Err(error) => {
                        prop_assert_eq!(error, AccessError::NotReady);
                        let read = registry.fetch(peer(), key, base + start as u64, len as u64, &waker).unwrap();
                        reads.push((read, model[start..start + len].to_vec(), start));
                    }
                },
                Step::Write { start, data } => {
                    if paged.write(start, &data).is_err() {
                        registry.put(peer(), key, base + start as u64, &data, &waker).unwrap();
                    }
                    // A read under way may return this write; reads that overlap it are not compared.
                    reads.retain(|(_, expected, at)| start >= at + expected.len() || *at >= start + data.len());
                    model[start..start + data.len()].copy_from_slice(&data);
                }
                Step::Add { word } => {
                    let (op, start) = (AtomicOp::FetchAdd { add: 3 }, word * 8);
                    if paged.registry.atomic(peer(), key, base + start as u64, op).is_err() {
                        registry.put_atomic(peer(), key, base + start as u64, op, &waker).unwrap();
                    }
                    reads.retain(|(_, expected, at)| start >= at + expected.len() || *at >= start + 8);
                    let value = u64::from_ne_bytes(model[start..start + 8].try_into().unwrap());
                    model[start..start + 8].copy_from_slice(&value.wrapping_add(3).to_ne_bytes());
                }
                Step::Admit { unit } => _ = paged.pager.admit(unit),
                Step::Expel { unit } => _ = paged.pager.expel(unit),
                Step::Complete => _ = paged.pager.complete_one(Ok(())),
            }
        }
        while paged.pager.complete_one(Ok(())) {}
        for (read, expected, _) in reads {
            let mut seen = vec![0; expected.len()];
            read.read(0, &mut seen).unwrap();
            prop_assert_eq!(seen, expected);
        }
        prop_assert_eq!(paged.pager.peek(base, LEN), model);
    }
}

#[test]
fn the_pattern_and_the_page_are_of_one_size() {
    assert_eq!(magic().len() as u64, PAGE_BYTES);
}
