//! Regions whose addresses are offsets in a file: peers and local work requests go by the pager, and nothing else does.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{
    Access, AccessError, AccessNeed, Accessor, Advice, LocalCopies, LocalPiece, NewRange, Pager, PeerTables,
    RegionChange, RegionSpec, RegisterError, Registry, Transfer, Translation, Waker, WindowBind, WindowKind,
};
use terrace_shm::KeyMemo;
use terrace_sync::Mutex;

const PD: u32 = 7;
const LOCAL: fn() -> Accessor = || Accessor::local(PD, 1);
const REMOTE: fn() -> Accessor = || Accessor::remote(PD, 1);
const EVERYTHING: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND)
    .union(Access::ON_DEMAND);

/// A file in memory. Its first half is present, and local work requests reach all of it.
#[derive(Debug)]
struct Bytes(Mutex<Vec<u8>>);

impl Bytes {
    fn part(&self, part: HostRange) -> Option<std::ops::Range<usize>> {
        let end = part.addr.checked_add(part.len)?;
        (end <= self.0.lock().len() as u64).then_some(part.addr as usize..end as usize)
    }

    fn present(&self, part: HostRange) -> Option<std::ops::Range<usize>> {
        let half = self.0.lock().len() as u64 / 2;
        self.part(part).filter(|range| range.end as u64 <= half)
    }
}

impl Translation for Bytes {
    fn range(&self) -> HostRange {
        HostRange { addr: 0, len: i64::MAX as u64 }
    }

    fn unit_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn is_present(&self, part: HostRange) -> bool {
        self.present(part).is_some()
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        self.present(part).map(|_| self.read_now(part, out))
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        self.present(HostRange { addr, len: data.len() as u64 }).map(|_| self.write_now(addr, data))
    }

    fn atomic(&self, addr: u64, _: AtomicOp) -> Option<Result<u64, AccessError>> {
        self.present(HostRange { addr, len: 8 }).map(|_| Ok(addr))
    }

    fn count(&self, _: HostRange, _: bool) {}

    fn bitmap(&self) -> &[AtomicU64] {
        &[]
    }

    fn versions(&self) -> HostRange {
        HostRange { addr: 0, len: 0 }
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        None
    }

    fn local_copies(&self) -> Option<&dyn LocalCopies> {
        Some(self)
    }

    fn check(&self, part: HostRange) -> Result<(), AccessError> {
        self.part(part).map(drop).ok_or(AccessError::OutOfRange)
    }

    fn forget_copies(&self) {}
}

impl LocalCopies for Bytes {
    fn read_now(&self, part: HostRange, out: &mut [u8]) -> Result<(), AccessError> {
        let range = self.part(part).ok_or(AccessError::OutOfRange)?;
        out.copy_from_slice(&self.0.lock()[range]);
        Ok(())
    }

    fn write_now(&self, addr: u64, data: &[u8]) -> Result<(), AccessError> {
        let range = self.part(HostRange { addr, len: data.len() as u64 }).ok_or(AccessError::OutOfRange)?;
        self.0.lock()[range].copy_from_slice(data);
        Ok(())
    }
}

impl Pager for Bytes {
    fn translation(&self) -> &dyn Translation {
        self
    }

    fn read(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::NotReady)
    }

    fn write(&self, _: u64, _: &[u8], _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::NotReady)
    }

    fn atomic(&self, _: u64, _: AtomicOp, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::NotReady)
    }

    fn flush(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::NotReady)
    }
}

/// A forked child forgets its pagers. Here they stay in reach, or the leak detector would complain.
static PAGERS: Mutex<Vec<Arc<dyn Pager>>> = Mutex::new(Vec::new());

/// A registry with a region of a file of 16 KiB, named from `iova` on.
fn with_file(iova: u64) -> (Registry, u32) {
    let registry = Registry::new(Default::default()).expect("made");
    let pager: Arc<dyn Pager> = Arc::new(Bytes(Mutex::new((0..16_384_u32).map(|byte| byte as u8).collect())));
    PAGERS.lock().push(pager.clone());
    let spec = RegionSpec { iova, pager: Some(pager), ..RegionSpec::new(PD, 0, 1 << 40, EVERYTHING) };
    let key = registry.register(&spec).expect("registered, although nothing is mapped there").key;
    (registry, key)
}

#[test]
fn peers_and_local_work_requests_reach_the_file() {
    let (registry, key) = with_file(0);
    let mut out = [0; 4];
    for who in [LOCAL(), REMOTE()] {
        registry.write(who, key, 100, b"abcd").expect("written");
        registry.read(who, key, 99, &mut out).expect("read");
        assert_eq!(out, [99, b'a', b'b', b'c']);
    }
    assert_eq!(registry.atomic(REMOTE(), key, 16, AtomicOp::FetchAdd { add: 1 }), Ok(16));
    // What is absent: a peer's request is deferred, a local one is made.
    assert_eq!(registry.read(REMOTE(), key, 10_000, &mut out), Err(AccessError::NotReady));
    assert_eq!(registry.read(LOCAL(), key, 10_000, &mut out), Ok(()));
    assert_eq!(registry.write(LOCAL(), key, 16_380, &out), Ok(()));
    // The file ends, the region does not.
    for who in [LOCAL(), REMOTE()] {
        assert_eq!(registry.read(who, key, 16_381, &mut out), Err(AccessError::OutOfRange));
        assert_eq!(registry.write(who, key, 16_381, &out), Err(AccessError::OutOfRange));
    }
    let announced = registry.announce(REMOTE(), key, 8000, 10_000, AccessNeed::Write);
    assert_eq!(announced, Err(AccessError::OutOfRange), "known before anything is written");
    assert_eq!(registry.announce(REMOTE(), key, 8000, 8000, AccessNeed::Write), Err(AccessError::NotReady));
}

#[test]
fn another_first_address_is_translated() {
    let (registry, key) = with_file(1 << 50);
    let mut out = [0; 4];
    registry.read(REMOTE(), key, (1 << 50) + 50, &mut out).expect("read");
    assert_eq!(out, [50, 51, 52, 53]);
    assert_eq!(registry.read(REMOTE(), key, 50, &mut out), Err(AccessError::OutOfRange));
}

#[test]
fn offsets_are_never_taken_for_addresses() {
    let (registry, key) = with_file(0);
    let piece = LocalPiece { lkey: key, addr: 0, len: 8 };
    let taken = registry.with_piece(LOCAL(), AccessNeed::Read, &KeyMemo::default(), piece, |range| range);
    assert_eq!(taken, Err(AccessError::NotReady));
    for advice in [Advice::Prefetch, Advice::PrefetchWrite, Advice::PrefetchNoFault] {
        assert_eq!(registry.advise(PD, key, 0, 4096, advice), Ok(()));
    }
    registry.before_fork();
    registry.after_fork_child();
    let mut out = [0; 4];
    for who in [LOCAL(), REMOTE()] {
        assert_eq!(registry.read(who, key, 0, &mut out), Err(AccessError::UnknownKey), "in a forked child");
    }
    assert_eq!(registry.deregister(key), Ok(()));
}

#[test]
fn windows_and_new_rights_are_as_for_other_regions() {
    let (registry, key) = with_file(0);
    let window = registry.alloc_window(PD, WindowKind::Type1).expect("room");
    let bind = WindowBind {
        window_key: window,
        new_key: window + 1,
        region_key: key,
        addr: 4096,
        len: 100,
        access: Access::REMOTE_READ,
        pd: PD,
        qpn: 1,
    };
    assert!(registry.bind_window(&bind).is_ok());
    let mut out = [0; 4];
    registry.read(REMOTE(), window + 1, 4097, &mut out).expect("read");
    assert_eq!(out, [1, 2, 3, 4]);
    assert_eq!(registry.read(REMOTE(), window + 1, 4196, &mut out), Err(AccessError::OutOfRange));
    registry.free_window(window + 1).expect("freed");

    let read_only = RegionChange { access: Some(Access::REMOTE_READ), ..RegionChange::default() };
    registry.reregister(key, &read_only).expect("changed");
    assert_eq!(registry.write(REMOTE(), key, 0, b"x"), Err(AccessError::Permission));
    assert_eq!(registry.read(REMOTE(), key, 4, &mut out), Ok(()));
    // A new range is memory, and has to be mapped.
    let range = NewRange { addr: 8192, len: 4096, iova: 0 };
    let moved = RegionChange { range: Some(range), ..RegionChange::default() };
    assert_eq!(registry.reregister(key, &moved), Err(RegisterError::NotMapped));
}
