//! Access to registered memory as from another process. Here both sides are one process, which the kernel allows, too.

mod common;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use common::Mapping;
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::*;
use terrace_shm::*;

const OWN: [u8; 16] = [7; 16];
const OWN_QPN: u32 = 0x11;
const QPN: u32 = 0x22;
const PD: u32 = 3;
const REMOTE: Access = Access::all().difference(Access::ZERO_BASED).difference(Access::ON_DEMAND);

struct Both {
    registry: Registry,
    peer: Arc<PeerMemory>,
    _readers: PeerReaders,
}

fn sent(fd: std::os::fd::BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().expect("a descriptor")
}

fn published(access: Rights) -> PublishedQueuePair {
    PublishedQueuePair { pd: PD, access, dest_qpn: OWN_QPN, peer: OWN }
}

impl Both {
    fn new() -> Both {
        let registry = Registry::new(Limits { seed: 5, ..Limits::default() }).expect("handlers");
        let slots = ReaderSlots::new().expect("slots");
        let readers = PeerReaders::admit(sent(slots.file()), std::process::id() as i32).expect("mapped");
        let shared_registry = sent(registry.publish().expect("a segment"));
        let peer = PeerMemory::new(shared_registry, slots, std::process::id() as i32).expect("mapped");
        registry.set_queue_pair(QPN, Some(&published(Rights::all())));
        Both { registry, peer, _readers: readers }
    }

    fn direct_access(&self) -> DirectAccess {
        self.peer.direct_access(OWN, OWN_QPN, QPN).expect("a slot")
    }

    fn register(&self, memory: &[u8], access: Access) -> u32 {
        let spec = RegionSpec::new(PD, memory.as_ptr() as u64, memory.len() as u64, access);
        self.registry.register(&spec).expect("registered").key
    }

    /// Sets a region's source, as the code that receives descriptors would.
    fn learn(&self, key: u32, source: Source) {
        self.peer.set_source(key, self.version(key), source);
    }

    fn version(&self, key: u32) -> Version {
        let is_current = |version: &Version| self.registry.memory_of(key, *version).is_some();
        (1..1 << 16).map(|n| Version(n * 2)).find(is_current).expect("published")
    }
}

fn range(bytes: &mut [u8]) -> HostRange {
    HostRange { addr: bytes.as_mut_ptr() as u64, len: bytes.len() as u64 }
}

/// How private memory is accessed: that of another process, and that of the own one.
fn private_sources() -> [Source; 2] {
    let own = Source::process(std::process::id().cast_signed());
    assert!(matches!(own, Source::Own), "the own memory needs no system call");
    [Source::Process, own]
}

#[test]
fn what_one_process_registers_another_reads_and_writes() {
    private_sources().into_iter().for_each(read_and_write);
}

fn read_and_write(source: Source) {
    let both = Both::new();
    let memory: Vec<u8> = (0..100_000u32).map(|n| (n * 7) as u8).collect();
    let base = memory.as_ptr() as u64;
    let key = both.register(&memory, REMOTE);
    let mut direct = both.direct_access();
    let mut byte = [0u8];
    let unknown = Refusal::Unknown(both.version(key));
    assert_eq!(direct.copy(Direction::Read, key, base, &[range(&mut byte)]), Err(unknown));
    both.learn(key, source);
    let (mut first, mut second) = (vec![0u8; 3], vec![0u8; 70_000]);
    direct.copy(Direction::Read, key, base + 5, &[range(&mut first), range(&mut second)]).expect("read");
    assert_eq!([first, second.clone()].concat(), memory[5..70_008]);
    second.fill(0xee);
    direct.copy(Direction::Write, key, base + 9, &[range(&mut second)]).expect("written");
    let read = std::hint::black_box(&memory);
    assert!(read[9..70_009].iter().all(|&byte| byte == 0xee));
    assert_eq!(read[8], 56);
}

#[test]
fn what_a_packet_would_be_refused_is_left_to_packets() {
    private_sources().into_iter().zip(private_sources()).for_each(refuse);
}

fn refuse((source, source_of_read_only): (Source, Source)) {
    let both = Both::new();
    let memory = vec![1u8; 4096];
    let mut direct = both.direct_access();
    let base = memory.as_ptr() as u64;
    let key = both.register(&memory, REMOTE);
    let read_only = both.register(&memory, Access::REMOTE_READ);
    both.learn(key, source);
    both.learn(read_only, source_of_read_only);
    let mut out = vec![0u8; 16];
    let here = [range(&mut out)];
    assert_eq!(direct.copy(Direction::Read, key, base, &here), Ok(()));
    let no = Err(Refusal::NotHere);
    assert_eq!(direct.copy(Direction::Read, key, base + 4081, &here), no, "beyond the end");
    assert_eq!(direct.copy(Direction::Read, key, base - 1, &here), no, "before the start");
    assert_eq!(direct.copy(Direction::Read, key, u64::MAX - 3, &here), no, "around the end of addresses");
    assert_eq!(direct.copy(Direction::Read, key ^ 1, base, &here), no, "another tag");
    assert_eq!(direct.copy(Direction::Read, key ^ 0x100, base, &here), no, "another key");
    assert_eq!(direct.copy(Direction::Write, read_only, base, &here), no, "not writable");
    assert_eq!(
        direct.copy(Direction::Read, key, base, &[HostRange { addr: 8, len: 8 }]),
        no,
        "no memory on this side"
    );
    // The queue pair's rights count as well.
    for (queue_pair, why) in [
        (PublishedQueuePair { access: Rights::WRITE, ..published(Rights::all()) }, "no READs"),
        (PublishedQueuePair { dest_qpn: OWN_QPN + 1, ..published(Rights::all()) }, "another queue pair's"),
        (PublishedQueuePair { peer: [8; 16], ..published(Rights::all()) }, "another address's"),
        (PublishedQueuePair { pd: PD + 1, ..published(Rights::all()) }, "another protection domain"),
    ] {
        both.registry.set_queue_pair(QPN, Some(&queue_pair));
        assert_eq!(direct.copy(Direction::Read, key, base, &here), no, "{why}");
    }
    both.registry.set_queue_pair(QPN, None);
    assert_eq!(direct.copy(Direction::Read, key, base, &here), no, "not connected");
    both.registry.set_queue_pair(QPN, Some(&published(Rights::all())));
    assert_eq!(direct.copy(Direction::Read, key, base, &here), Ok(()));
    both.peer.note_gone();
    assert_eq!(direct.copy(Direction::Read, key, base, &here), no, "gone");
}

/// Local ends of a list, in one region of the key's own registry.
fn locals<'a>(
    both: &'a Both,
    memo: &'a KeyMemo,
    lkey: u32,
    pieces: &'a [(u64, u64, u64)],
) -> impl Iterator<Item = (u64, Local<'a>)> {
    let who = Accessor::local(PD, OWN_QPN);
    pieces.iter().map(move |&(va, addr, len)| {
        (va, Local { registry: &both.registry, who, memo, piece: LocalPiece { lkey, addr, len } })
    })
}

#[test]
fn a_list_is_copied_up_to_what_does_not_belong_to_it() {
    const MIB: usize = 1 << 20;
    let both = Both::new();
    let memory: Vec<u8> = (0..MIB as u32).map(|n| (n * 7 + n / 256) as u8).collect();
    let here = vec![0u8; MIB];
    let (base, own) = (memory.as_ptr() as u64, here.as_ptr() as u64);
    let (key, lkey) = (both.register(&memory, REMOTE), both.register(&here, REMOTE));
    let (mut direct, memo) = (both.direct_access(), KeyMemo::default());
    let list = |direct: &mut DirectAccess, direction, pieces: &[(u64, u64, u64)]| {
        direct.copy_list(direction, key, locals(&both, &memo, lkey, pieces))
    };
    let two = [(base + 5, own, 10), (base + 90_000, own + 10, 9_000)];
    assert_eq!(list(&mut direct, Direction::Read, &two), 0, "the region's source is not known");
    both.learn(key, Source::Process);
    assert!(!direct.copies_by_kernel(key));
    direct.read_into(key, base, &mut [0u8]).expect("read");
    assert!(direct.copies_by_kernel(key) && !direct.copies_by_kernel(key ^ 1));

    assert_eq!(list(&mut direct, Direction::Read, &two), 2);
    let read = std::hint::black_box(&here);
    assert_eq!((&read[..10], &read[10..9_010]), (&memory[5..15], &memory[90_000..99_000]));
    let many: Vec<_> = (0..40u64).map(|n| (base + 40_000 - 1_000 * n, own + 2_000 + n * 7, 7)).collect();
    assert_eq!(list(&mut direct, Direction::Write, &many), DirectAccess::LIST_MAX);
    let written = std::hint::black_box(&memory);
    assert_eq!(written[40_000..40_007], here[2_000..2_007]);
    assert_eq!(written[25_000..25_007], here[2_105..2_112]);

    for (pieces, count, why) in [
        (vec![two[0]], 0, "one is no list"),
        (vec![two[0], two[1], (base + MIB as u64 - 8, own, 9), two[0]], 2, "beyond the end"),
        (vec![two[0], (base, own, 0), two[1]], 0, "nothing to copy"),
        (vec![two[0], two[1], (base, own, (256 << 10) - 9_010)], 3, "as long as a change may wait"),
        (vec![two[0], two[1], (base, own, (256 << 10) - 9_009)], 2, "longer than that"),
        (vec![two[0], two[1], (base, own + MIB as u64 - 4, 8)], 2, "local memory that is not registered"),
    ] {
        assert_eq!(list(&mut direct, Direction::Read, &pieces), count, "{why}");
    }
    let other = both.register(&here[4096..], REMOTE);
    let mixed = locals(&both, &memo, lkey, &two).chain(locals(&both, &memo, other, &two));
    assert_eq!(direct.copy_list(Direction::Read, key, mixed), 2, "another local region");
    both.registry.set_queue_pair(QPN, Some(&published(Rights::WRITE)));
    assert_eq!(list(&mut direct, Direction::Read, &two), 0, "no READs");
    assert_eq!(list(&mut direct, Direction::Write, &two), 2);
    both.registry.deregister(lkey).expect("deregistered");
    assert_eq!(list(&mut direct, Direction::Write, &two), 0, "no local region");
    both.registry.deregister(key).expect("deregistered");
    assert_eq!(list(&mut direct, Direction::Write, &two), 0, "no region");
}

#[test]
fn a_list_is_copied_up_to_memory_that_is_gone() {
    const PAGE: u64 = 4096;
    let both = Both::new();
    let (theirs, ours) = (Mapping::anonymous(8 * PAGE as usize), Mapping::anonymous(8 * PAGE as usize));
    let register = |mapping: &Mapping| {
        both.registry.register(&RegionSpec::new(PD, mapping.addr, 8 * PAGE, REMOTE)).expect("registered").key
    };
    let (key, lkey) = (register(&theirs), register(&ours));
    both.learn(key, Source::Process);
    let (mut direct, memo) = (both.direct_access(), KeyMemo::default());
    direct.read_into(key, theirs.addr, &mut [0u8]).expect("read");
    let pieces: Vec<_> = (0..8).map(|n| (theirs.addr + n * PAGE, ours.addr + n * PAGE, PAGE)).collect();
    for (gone, count) in [(theirs.addr + 6 * PAGE, 6), (ours.addr + 4 * PAGE, 4), (theirs.addr, 0)] {
        // SAFETY: a page of a mapping that only this test uses.
        assert_eq!(unsafe { libc::munmap(gone as *mut libc::c_void, PAGE as usize) }, 0);
        for direction in [Direction::Read, Direction::Write] {
            let list = locals(&both, &memo, lkey, &pieces);
            assert_eq!(direct.copy_list(direction, key, list), count, "{direction:?}");
        }
    }
}

#[test]
fn what_is_mapped_of_a_region_that_was_taken_away_is_given_up() {
    let both = Both::new();
    let memory = vec![1u8; 1 << 16];
    let base = memory.as_ptr() as u64;
    let key = both.register(&memory, REMOTE);
    let learn = || {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 16).expect("room");
        let range = HostRange { addr: base, len: 1 << 16 };
        let backed = BackedBy { file: file.try_clone().expect("a descriptor").into(), offset: 0, range };
        both.learn(key, Source::Mapped(Mapped::new(&backed).expect("mapped")));
        file
    };
    // /proc/self/maps gives a file's inode number at the end of a mapping's line, before its name.
    let is_mapped = |file: &std::fs::File| {
        let inode = format!(" {} ", std::os::unix::fs::MetadataExt::ino(&file.metadata().expect("known")));
        std::fs::read_to_string("/proc/self/maps").expect("a list").lines().any(|line| line.contains(&inode))
    };
    let (mut direct, mut byte) = (both.direct_access(), [0u8]);
    let (first, version) = (learn(), both.version(key));
    direct.read_into(key, base, &mut byte).expect("read");
    both.peer.forget(key, Version(version.0 + 2));
    both.peer.forget(key ^ 1, version);
    assert!(is_mapped(&first), "that was another one");
    // `direct` still holds the record, which was not marked stale: the cost is at most one packet.
    both.peer.forget(key, version);
    assert!(!is_mapped(&first));
    assert_eq!(direct.read_into(key, base, &mut byte), Err(Refusal::NotHere));
    assert_eq!(direct.atomic(key, base, AtomicOp::FetchAdd { add: 1 }), Err(Refusal::NotHere));
    let mut direct = both.direct_access();
    let second = learn();
    direct.read_into(key, base, &mut byte).expect("read");
    // Another queue pair has asked as well, before the answer.
    let third = learn();
    assert!(is_mapped(&second) && !is_mapped(&third), "the first answer counts");
    both.peer.set_source(key, Version(version.0 - 2), Source::Packets);
    assert!(is_mapped(&second), "the answer to a question about the time before");
    direct.read_into(key, base, &mut byte).expect("read");
    both.direct_access().read_into(key, base, &mut byte).expect("read");
    both.peer.note_gone();
    assert!(!is_mapped(&second));
}

#[test]
fn a_prefetch_hint_is_of_the_region_that_was_accessed_last() {
    let both = Both::new();
    let file = tempfile::tempfile().expect("a file");
    file.set_len(1 << 16).expect("room");
    let memory = vec![1u8; 1 << 16];
    let base = memory.as_ptr() as u64;
    let (mapped, other) = (both.register(&memory, REMOTE), both.register(&memory, REMOTE));
    let backed = BackedBy { file: file.into(), offset: 0, range: HostRange { addr: base, len: 1 << 16 } };
    both.learn(mapped, Source::Mapped(Mapped::new(&backed).expect("mapped")));
    both.learn(other, Source::Process);
    let (mut direct, prefetch_hint) = (both.direct_access(), PrefetchHint::default());
    direct.update_prefetch_hint(&prefetch_hint);
    assert_eq!(prefetch_hint.place(mapped, base), None, "nothing was accessed");
    let mut byte = [0u8];
    direct.read_into(mapped, base + 4096, &mut byte).expect("read");
    direct.update_prefetch_hint(&prefetch_hint);
    let first = prefetch_hint.place(mapped, base).expect("known");
    assert!(first != base && first.is_multiple_of(4096), "another mapping, from its start");
    assert_eq!(prefetch_hint.place(mapped, base + 100), Some(first + 100));
    assert_eq!(prefetch_hint.place(other, base), None, "another key");
    direct.read_into(other, base, &mut byte).expect("read");
    direct.update_prefetch_hint(&prefetch_hint);
    assert_eq!(
        (prefetch_hint.place(mapped, base), prefetch_hint.place(other, base)),
        (None, None),
        "it is not mapped"
    );
}

/// Signalled by an ordinary store, as programs and rings do; by each copy path, and in sizes that take different paths.
#[test]
fn a_write_that_has_returned_is_seen_by_those_who_are_told_of_it() {
    const LEN: usize = 300_000;
    const ROUNDS: u8 = 200;
    let both = Both::new();
    let file = tempfile::tempfile().expect("a file");
    file.set_len(LEN as u64).expect("room");
    let memory = Mapping::file(&file, LEN, libc::MAP_SHARED);
    let range_of_all = HostRange { addr: memory.addr, len: LEN as u64 };
    let spec = RegionSpec::new(PD, memory.addr, LEN as u64, REMOTE);
    let [by_process, by_mapping] = [(); 2].map(|()| both.registry.register(&spec).expect("registered").key);
    both.learn(by_process, Source::Process);
    let backed = BackedBy { file: file.into(), offset: 0, range: range_of_all };
    both.learn(by_mapping, Source::Mapped(Mapped::new(&backed).expect("mapped")));
    // SAFETY: the mapping lives until the end; other threads change it meanwhile, and bytes are atomic.
    let cells = unsafe { std::slice::from_raw_parts(memory.addr as *const AtomicU8, LEN) };
    for (key, len) in [by_process, by_mapping]
        .into_iter()
        .flat_map(|key| [1, 8, 64, 4096, 65_536, LEN].map(|len| (key, len)))
    {
        cells.iter().for_each(|cell| cell.store(0, Ordering::SeqCst));
        let told = AtomicU8::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut round = 0;
                while round < ROUNDS {
                    round = told.load(Ordering::Acquire);
                    // From the end: the end is copied last.
                    let oldest =
                        cells[..len].iter().rev().step_by(61).map(|cell| cell.load(Ordering::Relaxed)).min();
                    assert!(oldest >= Some(round), "{len} bytes: told of {round}, saw {oldest:?}");
                }
            });
            let mut direct = both.direct_access();
            for round in 1..=ROUNDS {
                let mut data = vec![round; len];
                direct.copy(Direction::Write, key, memory.addr, &[range(&mut data)]).expect("written");
                told.store(round, Ordering::Release);
            }
        });
    }
}

#[test]
fn a_deregistered_region_is_not_accessed_any_more() {
    let both = Both::new();
    // The owner reuses the memory as soon as it is deregistered.
    let cell = Box::into_raw(Box::new([0u64; 512]));
    let base = cell as u64;
    let stop = AtomicBool::new(false);
    let key_now = AtomicU64::new(0);
    // SAFETY: it lives until the end, and only the address is used.
    let bytes = unsafe { std::slice::from_raw_parts(base as *const u8, 4096) };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let mut direct = both.direct_access();
            let (both, stop, key_now) = (&both, &stop, &key_now);
            scope.spawn(move || {
                let mut data = vec![0xabu8; 4096];
                let (own, memo) = (data.as_ptr() as u64, KeyMemo::default());
                let lkey = both.register(&data, REMOTE);
                let list: Vec<_> = (0..8).map(|n| (base + n * 512, own + n * 512, 512)).collect();
                while !stop.load(Ordering::Relaxed) {
                    let key = key_now.load(Ordering::Relaxed) as u32;
                    let _ = direct.copy(Direction::Write, key, base, &[range(&mut data)]);
                    let _ = direct.copy_list(Direction::Write, key, locals(both, &memo, lkey, &list));
                }
            });
        }
        for round in 0..2_000u64 {
            let key = both.register(bytes, REMOTE);
            both.learn(key, Source::Process);
            key_now.store(key.into(), Ordering::Relaxed);
            (0..200).for_each(|_| std::hint::spin_loop());
            both.registry.deregister(key).expect("deregistered");
            for index in 0..512 {
                // SAFETY: it lives until the end, and is accessed as numbers only.
                unsafe { (base as *mut u64).add(index).write_volatile(round) };
            }
            (0..200).for_each(|_| std::hint::spin_loop());
            for index in 0..512 {
                // SAFETY: as above.
                let value = unsafe { (base as *const u64).add(index).read_volatile() };
                assert_eq!(value, round, "round {round}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    // SAFETY: from the box above; no thread uses it any more.
    drop(unsafe { Box::from_raw(cell) });
}
