//! What other threads observe while copies run, and while keys change during copies.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::finally::Finally;
use common::slow_page::SlowPage;
use common::*;
use terrace_hostmem::AtomicOp;
use terrace_memory::{
    Access, AccessError, BindError, NewRange, RegionChange, RegisterError, WindowBind, WindowKind,
};

/// Length of each stress run.
const STRESS: Duration = Duration::from_millis(400);

/// The mapping as atomics, which threads access while copies run.
fn words(memory: &Mapping) -> &[AtomicU64] {
    // SAFETY: mapped for as long as the reference lives, aligned, and accessed by atomics and copies only.
    unsafe { std::slice::from_raw_parts(memory.addr as *const AtomicU64, memory.len / 8) }
}

#[test]
fn after_deregistering_nothing_is_written_any_more() {
    let registry = registry();
    let memory = Mapping::anonymous(4 * PAGE);
    let key = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let data = vec![0xff; 4 * PAGE];
                while !done.load(Ordering::Relaxed) {
                    let key = key.load(Ordering::Relaxed) as u32;
                    match registry.write(peer(), key, memory.addr, &data) {
                        Ok(()) | Err(AccessError::UnknownKey) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
        let _finally = Finally(&done);
        let end = Instant::now() + STRESS;
        let mut rounds = 0;
        while rounds <= 10 || Instant::now() < end {
            let region = memory.register(&registry, ALL);
            key.store(region.key.into(), Ordering::Relaxed);
            thread::yield_now();
            registry.deregister(region.key).unwrap();
            // No copy runs now: the stored zeros stay.
            for word in words(&memory) {
                word.store(0, Ordering::Relaxed);
            }
            thread::yield_now();
            assert!(words(&memory).iter().all(|word| word.load(Ordering::Relaxed) == 0), "a late write");
            rounds += 1;
        }
    });
}

#[test]
fn after_invalidating_nothing_is_written_through_the_window() {
    let registry = registry();
    let memory = Mapping::anonymous(4 * PAGE);
    let region = memory.register(&registry, ALL);
    let window = registry.alloc_window(PD, WindowKind::Type2).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let data = vec![0xff; 4 * PAGE];
            while !done.load(Ordering::Relaxed) {
                match registry.write(peer(), window, memory.addr, &data) {
                    Ok(()) | Err(AccessError::UnknownKey) => {}
                    Err(other) => panic!("{other}"),
                }
            }
        });
        let bind = WindowBind {
            window_key: window,
            new_key: window,
            region_key: region.key,
            addr: memory.addr,
            len: memory.len as u64,
            access: Access::REMOTE_WRITE,
            pd: PD,
            qpn: QPN,
        };
        let _finally = Finally(&done);
        let end = Instant::now() + STRESS;
        while Instant::now() < end {
            registry.bind_window(&bind).unwrap();
            thread::yield_now();
            registry.invalidate(local(), window).unwrap();
            for word in words(&memory) {
                word.store(0, Ordering::Relaxed);
            }
            thread::yield_now();
            assert!(words(&memory).iter().all(|word| word.load(Ordering::Relaxed) == 0), "a late write");
        }
    });
}

#[test]
fn rereg_switches_all_at_once() {
    let registry = registry();
    let (first, second) = (Mapping::anonymous(PAGE), Mapping::anonymous(PAGE));
    first.bytes().fill(1);
    second.bytes().fill(2);
    let mut spec = terrace_memory::RegionSpec::new(PD, first.addr, PAGE as u64, ALL);
    spec.iova = 0x1000;
    let key = registry.register(&spec).unwrap().key;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut out = vec![0; PAGE];
            while !done.load(Ordering::Relaxed) {
                registry.read(peer(), key, 0x1000, &mut out).expect("the region exists throughout");
                assert!(out.iter().all(|&byte| byte == out[0]), "half of each");
            }
        });
        let _finally = Finally(&done);
        let end = Instant::now() + STRESS;
        while Instant::now() < end {
            for memory in [&second, &first] {
                let range = Some(NewRange { addr: memory.addr, len: PAGE as u64, iova: 0x1000 });
                registry.reregister(key, &RegionChange { range, ..RegionChange::default() }).unwrap();
            }
        }
    });
}

#[test]
fn binding_races_with_deregistering() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::sync_channel::<u32>(0);
        let (registry, memory) = (&registry, &memory);
        scope.spawn(move || {
            let window = registry.alloc_window(PD, WindowKind::Type1).unwrap();
            for region_key in receiver {
                let bind = WindowBind {
                    window_key: window,
                    new_key: window,
                    region_key,
                    addr: memory.addr,
                    len: 8,
                    access: Access::REMOTE_READ,
                    pd: PD,
                    qpn: QPN,
                };
                if registry.bind_window(&bind).is_ok() {
                    // A region with a window bound to it stays registered.
                    registry.read(peer(), window, memory.addr, &mut [0; 8]).unwrap();
                    registry.bind_window(&WindowBind { len: 0, ..bind }).unwrap();
                }
            }
        });
        for _ in 0..3_000 {
            let key = memory.register(registry, ALL).key;
            sender.send(key).unwrap();
            while let Err(error) = registry.deregister(key) {
                assert_eq!(error, RegisterError::Busy);
                thread::yield_now();
            }
        }
    });
    assert_eq!(registry.counts(), (0, 1));
}

#[test]
fn registrations_of_many_threads_do_not_mix() {
    let registry = registry();
    thread::scope(|scope| {
        for n in 0..4u8 {
            let registry = &registry;
            scope.spawn(move || {
                let memory = Mapping::anonymous(PAGE);
                memory.bytes().fill(n);
                for _ in 0..2_000 {
                    let keys: Vec<u32> = (0..5).map(|_| memory.register(registry, ALL).key).collect();
                    for &key in &keys {
                        let mut out = [0xff; 16];
                        registry.read(peer(), key, memory.addr, &mut out).unwrap();
                        assert_eq!(out, [n; 16]);
                        registry.deregister(key).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(registry.counts(), (0, 0));
}

#[test]
fn atomics_lose_no_update() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    let key = memory.register(&registry, ALL).key;
    let word = &words(&memory)[0];
    const EACH: u64 = 50_000;
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..EACH {
                registry.atomic(peer(), key, memory.addr, AtomicOp::FetchAdd { add: 1 }).unwrap();
            }
        });
        scope.spawn(|| {
            for _ in 0..EACH {
                let mut compare = word.load(Ordering::Relaxed);
                loop {
                    let swap = compare + 1;
                    let op = AtomicOp::CompareSwap { compare, swap };
                    let old = registry.atomic(peer(), key, memory.addr, op).unwrap();
                    if old == compare {
                        break;
                    }
                    compare = old;
                }
            }
        });
        for _ in 0..EACH {
            word.fetch_add(1, Ordering::Relaxed);
        }
    });
    assert_eq!(word.load(Ordering::Relaxed), 3 * EACH);
}

/// Writes messages of one repeated byte while another thread polls the last byte; when that byte has arrived, the
/// whole message has.
#[test]
fn the_last_byte_arrives_last() {
    let registry = registry();
    let memory = Mapping::anonymous(4 * PAGE);
    let key = memory.register(&registry, ALL).key;
    for (offset, len) in [(0, 8), (3, 13), (0, 64), (1, 130), (40, 200), (0, 1024), (5, 4096), (0, 4096)] {
        let start = memory.addr + offset;
        // SAFETY: mapped, and accessed by atomics and copies only.
        let byte = |n: usize| unsafe { AtomicU8::from_ptr((start as usize + n) as *mut u8) };
        let received = AtomicU64::new(0);
        const ROUNDS: u8 = 200;
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    let mut looks = 0;
                    while byte(len - 1).load(Ordering::Acquire) != round {
                        looks += 1;
                        if looks % 1_000 == 0 {
                            thread::yield_now();
                        }
                    }
                    for n in 0..len {
                        assert_eq!(byte(n).load(Ordering::Relaxed), round, "byte {n} of {len} at {offset}");
                    }
                    received.store(round.into(), Ordering::Release);
                }
            });
            for round in 1..=ROUNDS {
                registry.write(peer(), key, start, &vec![round; len]).unwrap();
                while received.load(Ordering::Acquire) != u64::from(round) {
                    thread::yield_now();
                }
            }
        });
    }
}

/// A thread that reads aligned words sees only values that were written, in both directions and at any length.
#[test]
fn aligned_words_are_never_torn() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    let key = memory.register(&registry, ALL).key;
    let whole = |value: u64| value.to_ne_bytes().iter().all(|&byte| byte == value as u8);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (words, done, registry) = (words(&memory), &done, &registry);
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                assert!(words.iter().all(|word| whole(word.load(Ordering::Relaxed))), "a torn store");
            }
        });
        let _finally = Finally(done);
        let end = Instant::now() + STRESS;
        let mut round = 0u8;
        while Instant::now() < end {
            round = round.wrapping_add(1);
            // Whole words only: a partly written word has no single value.
            let len = 8 * (1 + usize::from(round) % 200);
            let start = 8 * (usize::from(round) % 50);
            // The private side lies at any alignment.
            let mut data = vec![0u8; len + 8];
            let shift = usize::from(round) % 8;
            data[shift..shift + len].fill(round);
            let addr = memory.addr + start as u64;
            registry.write(peer(), key, addr, &data[shift..shift + len]).unwrap();
        }
    });
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let (words, done) = (words(&memory), &done);
        scope.spawn(move || {
            let mut value = 0u8;
            while !done.load(Ordering::Relaxed) {
                value = value.wrapping_add(1);
                for word in words {
                    word.store(u64::from_ne_bytes([value; 8]), Ordering::Relaxed);
                }
            }
        });
        let _finally = Finally(done);
        let end = Instant::now() + STRESS;
        let mut out = vec![0u8; PAGE + 8];
        let mut shift = 0;
        while Instant::now() < end {
            shift = (shift + 1) % 8;
            let out = &mut out[shift..shift + PAGE];
            registry.read(peer(), key, memory.addr, out).unwrap();
            for word in out.chunks_exact(8) {
                assert!(word.iter().all(|&byte| byte == word[0]), "a torn load: {word:x?}");
            }
        }
    });
}

#[test]
fn deregistering_waits_for_a_copy_that_waits_for_its_page() {
    // A slow copy: its page arrives when the test serves it. Skipped where userfaultfd is not permitted.
    let Some(slow) = SlowPage::new() else { return };
    let registry = registry();
    let key = slow.memory.register(&registry, ALL).key;
    let copied = AtomicBool::new(false);
    thread::scope(|scope| {
        let (registry, slow, copied) = (&registry, &slow, &copied);
        scope.spawn(move || {
            registry.read(peer(), key, slow.memory.addr, &mut [0; 8]).unwrap();
            copied.store(true, Ordering::SeqCst);
        });
        slow.wait_for_fault();
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(50));
            slow.serve();
        });
        registry.deregister(key).unwrap();
        // The copier's next instruction after unpinning may not have run yet, so the order is checked in the copier.
        let end = Instant::now() + Duration::from_secs(5);
        while !copied.load(Ordering::SeqCst) && Instant::now() < end {
            thread::yield_now();
        }
        assert!(slow.served.load(Ordering::SeqCst), "deregistered while a copy was running");
    });
    assert_eq!(registry.read(peer(), key, slow.memory.addr, &mut [0; 8]), Err(AccessError::UnknownKey));
}

#[test]
fn windows_that_are_bound_to_each_other_by_forged_keys_are_both_refused() {
    let registry = registry();
    let windows = [(); 2].map(|()| registry.alloc_window(PD, WindowKind::Type1).unwrap());
    thread::scope(|scope| {
        for (mine, other) in [(windows[0], windows[1]), (windows[1], windows[0])] {
            let registry = &registry;
            scope.spawn(move || {
                let bind = WindowBind {
                    window_key: mine,
                    new_key: mine,
                    region_key: other,
                    addr: 0,
                    len: 1,
                    access: Access::REMOTE_READ,
                    pd: PD,
                    qpn: QPN,
                };
                let end = Instant::now() + STRESS;
                while Instant::now() < end {
                    assert_eq!(registry.bind_window(&bind), Err(BindError::UnknownRegion));
                }
            });
        }
    });
}
