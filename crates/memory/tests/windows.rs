//! Memory windows: which binds are allowed, which accesses a bound window permits, how windows end.

mod common;

use common::*;
use terrace_hostmem::AtomicOp;
use terrace_memory::{
    Access, AccessError, AccessNeed, Accessor, BindError, NewRange, Region, RegionChange, RegisterError,
    Registry, WindowBind, WindowKind,
};

/// A region of four pages that windows can be bound to, and a window.
struct Setup {
    registry: Registry,
    memory: Mapping,
    region: Region,
    window: u32,
}

impl Setup {
    fn new(kind: WindowKind) -> Setup {
        Setup::with_access(kind, ALL)
    }

    fn with_access(kind: WindowKind, access: Access) -> Setup {
        let registry = registry();
        let memory = Mapping::anonymous(4 * PAGE);
        let region = memory.register(&registry, access);
        let window = registry.alloc_window(PD, kind).unwrap();
        Setup { registry, memory, region, window }
    }

    /// A bind of the second page, for reads and writes, that changes the key.
    fn bind(&self) -> WindowBind {
        WindowBind {
            window_key: self.window,
            new_key: next_key(self.window),
            region_key: self.region.key,
            addr: self.memory.addr + PAGE as u64,
            len: PAGE as u64,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE,
            pd: PD,
            qpn: QPN,
        }
    }

    fn bound(kind: WindowKind) -> (Setup, WindowBind) {
        let setup = Setup::new(kind);
        let bind = setup.bind();
        setup.registry.bind_window(&bind).unwrap();
        (setup, bind)
    }

    fn read(&self, who: Accessor, key: u32) -> Result<(), AccessError> {
        self.registry.read(who, key, self.memory.addr + PAGE as u64, &mut [0; 8])
    }
}

/// Does as `ibv_inc_rkey`.
fn next_key(key: u32) -> u32 {
    key & !0xff | u32::from((key as u8).wrapping_add(1))
}

#[test]
fn an_unbound_window_opens_nothing() {
    for kind in [WindowKind::Type1, WindowKind::Type2] {
        let setup = Setup::new(kind);
        assert_eq!(setup.read(peer(), setup.window), Err(AccessError::UnknownKey));
        assert_eq!(setup.registry.free_window(setup.window), Ok(()));
        assert_eq!(setup.registry.free_window(setup.window), Err(RegisterError::UnknownKey));
    }
}

#[test]
fn a_window_opens_its_part_of_the_region_under_its_new_key() {
    for kind in [WindowKind::Type1, WindowKind::Type2] {
        let (setup, bind) = Setup::bound(kind);
        let (start, key) = (bind.addr, bind.new_key);
        setup.registry.write(peer(), key, start + 100, b"window").unwrap();
        assert_eq!(&setup.memory.bytes()[PAGE + 100..][..6], b"window");
        assert_eq!(setup.read(peer(), setup.window), Err(AccessError::UnknownKey), "the old key");
        assert_eq!(setup.registry.read(peer(), key, start - 1, &mut [0]), Err(AccessError::OutOfRange));
        assert_eq!(
            setup.registry.read(peer(), key, start + bind.len - 1, &mut [0; 2]),
            Err(AccessError::OutOfRange)
        );
        let add = AtomicOp::FetchAdd { add: 1 };
        assert_eq!(setup.registry.atomic(peer(), key, start, add), Err(AccessError::Permission));
    }
}

#[test]
fn a_windows_key_is_no_lkey() {
    let (setup, bind) = Setup::bound(WindowKind::Type1);
    assert_eq!(setup.read(local(), bind.new_key), Err(AccessError::UnknownKey));
}

#[test]
fn a_window_gives_peers_what_the_region_does_not() {
    // IBTA 10.6.7.1.1: remote rights come from the window alone; the region needs LOCAL_WRITE for writing.
    let setup = Setup::with_access(WindowKind::Type2, Access::LOCAL_WRITE | Access::MW_BIND);
    let bind = WindowBind { access: Access::REMOTE_WRITE | Access::REMOTE_ATOMIC, ..setup.bind() };
    setup.registry.bind_window(&bind).unwrap();
    setup.registry.write(peer(), bind.new_key, bind.addr, &[1; 8]).unwrap();
    setup.registry.atomic(peer(), bind.new_key, bind.addr, AtomicOp::FetchAdd { add: 1 }).unwrap();
    assert_eq!(setup.read(peer(), bind.new_key), Err(AccessError::Permission));
    assert_eq!(setup.read(peer(), setup.region.key), Err(AccessError::Permission));
}

#[test]
fn type_1_serves_its_protection_domain_and_type_2_its_queue_pair() {
    let (other_qp, other_pd) = (Accessor::remote(PD, QPN + 1), Accessor::remote(PD + 1, QPN));
    let (setup, bind) = Setup::bound(WindowKind::Type1);
    assert_eq!(setup.read(other_qp, bind.new_key), Ok(()));
    assert_eq!(setup.read(other_pd, bind.new_key), Err(AccessError::WrongPd));
    let (setup, bind) = Setup::bound(WindowKind::Type2);
    assert_eq!(setup.read(other_qp, bind.new_key), Err(AccessError::WrongQp));
    assert_eq!(setup.read(other_pd, bind.new_key), Err(AccessError::WrongPd));
}

#[test]
fn binds_that_break_a_rule_are_refused_and_change_nothing() {
    for kind in [WindowKind::Type1, WindowKind::Type2] {
        let setup = Setup::new(kind);
        let refused = |change: &dyn Fn(&mut WindowBind)| {
            let mut bind = setup.bind();
            change(&mut bind);
            setup.registry.bind_window(&bind).unwrap_err()
        };
        assert_eq!(refused(&|b| b.new_key ^= 0x100), BindError::BadKey);
        assert_eq!(
            refused(&|b| (b.window_key, b.new_key) = (b.region_key, b.region_key)),
            BindError::UnknownWindow
        );
        assert_eq!(refused(&|b| b.region_key ^= 1), BindError::UnknownRegion);
        assert_eq!(refused(&|b| b.region_key = b.window_key), BindError::UnknownRegion);
        assert_eq!(refused(&|b| b.pd += 1), BindError::WrongPd);
        assert_eq!(refused(&|b| b.addr -= PAGE as u64 + 1), BindError::OutOfRange);
        assert_eq!(refused(&|b| b.len = 3 * PAGE as u64 + 1), BindError::OutOfRange);
        assert_eq!(refused(&|b| b.len = u64::MAX), BindError::OutOfRange);
        assert_eq!(refused(&|b| b.access |= Access::MW_BIND), BindError::BadAccess);
        assert_eq!(setup.read(peer(), setup.bind().new_key), Err(AccessError::UnknownKey));
        // pyverbs binds with LOCAL_WRITE among the flags.
        let bind = WindowBind { access: Access::LOCAL_WRITE | Access::REMOTE_READ, ..setup.bind() };
        assert_eq!(setup.registry.bind_window(&bind), Ok(()));
    }
}

#[test]
fn the_region_must_permit_windows_and_what_they_grant() {
    let setup = Setup::with_access(WindowKind::Type1, Access::LOCAL_WRITE | Access::REMOTE_READ);
    assert_eq!(setup.registry.bind_window(&setup.bind()), Err(BindError::RegionForbids));
    let setup = Setup::with_access(WindowKind::Type1, Access::MW_BIND | Access::REMOTE_READ);
    assert_eq!(setup.registry.bind_window(&setup.bind()), Err(BindError::RegionForbids), "no LOCAL_WRITE");
    let bind = WindowBind { access: Access::REMOTE_ATOMIC, ..setup.bind() };
    assert_eq!(setup.registry.bind_window(&bind), Err(BindError::RegionForbids));
    let bind = WindowBind { access: Access::REMOTE_READ, ..setup.bind() };
    assert_eq!(setup.registry.bind_window(&bind), Ok(()));
}

#[test]
fn type_1_is_bound_again_at_will_and_unbound_by_no_bytes() {
    let (setup, first) = Setup::bound(WindowKind::Type1);
    let second = WindowBind {
        window_key: first.new_key,
        new_key: next_key(first.new_key),
        addr: first.addr + PAGE as u64,
        ..first
    };
    setup.registry.bind_window(&second).unwrap();
    assert_eq!(setup.read(peer(), first.new_key), Err(AccessError::UnknownKey));
    assert_eq!(setup.registry.read(peer(), second.new_key, second.addr, &mut [0]), Ok(()));
    let unbind =
        WindowBind { window_key: second.new_key, new_key: next_key(second.new_key), len: 0, ..second };
    setup.registry.bind_window(&unbind).unwrap();
    for key in [second.new_key, unbind.new_key] {
        assert_eq!(setup.registry.read(peer(), key, second.addr, &mut [0]), Err(AccessError::UnknownKey));
    }
    setup.registry.deregister(setup.region.key).unwrap();
}

#[test]
fn a_refused_second_bind_leaves_the_first() {
    let (setup, first) = Setup::bound(WindowKind::Type1);
    let bad =
        WindowBind { window_key: first.new_key, new_key: next_key(first.new_key), len: 1 << 40, ..first };
    assert_eq!(setup.registry.bind_window(&bad), Err(BindError::OutOfRange));
    assert_eq!(setup.read(peer(), first.new_key), Ok(()));
    assert_eq!(setup.registry.deregister(setup.region.key), Err(RegisterError::Busy));
    // The owner has incremented the key all the same; the next bind compares the window, not the tag.
    let good = WindowBind { window_key: bad.new_key, new_key: next_key(bad.new_key), ..first };
    assert_eq!(setup.registry.bind_window(&good), Ok(()));
    assert_eq!(setup.read(peer(), first.new_key), Err(AccessError::UnknownKey));
    assert_eq!(setup.read(peer(), good.new_key), Ok(()));
}

#[test]
fn type_2_must_be_invalidated_before_it_is_bound_again() {
    let (setup, first) = Setup::bound(WindowKind::Type2);
    let again = WindowBind { window_key: first.new_key, new_key: next_key(first.new_key), ..first };
    assert_eq!(setup.registry.bind_window(&again), Err(BindError::AlreadyBound));
    assert_eq!(setup.registry.bind_window(&WindowBind { len: 0, ..again }), Err(BindError::AlreadyBound));
    setup.registry.invalidate(local(), first.new_key).unwrap();
    assert_eq!(setup.read(peer(), first.new_key), Err(AccessError::UnknownKey));
    assert_eq!(setup.registry.bind_window(&WindowBind { len: 0, ..again }), Err(BindError::Empty));
    setup.registry.bind_window(&again).unwrap();
    assert_eq!(setup.read(peer(), again.new_key), Ok(()));
}

#[test]
fn type_2_is_bound_by_its_handle_whatever_its_key_was_last() {
    let (setup, first) = Setup::bound(WindowKind::Type2);
    setup.registry.invalidate(local(), first.new_key).unwrap();
    let again = WindowBind { window_key: setup.window, new_key: next_key(first.new_key), ..first };
    assert_eq!(setup.registry.bind_window(&again), Ok(()));
    assert_eq!(setup.read(peer(), first.new_key), Err(AccessError::UnknownKey));
    assert_eq!(setup.read(peer(), again.new_key), Ok(()));
}

#[test]
fn only_type_2_windows_can_be_invalidated() {
    let (setup, bind) = Setup::bound(WindowKind::Type1);
    assert_eq!(setup.registry.invalidate(peer(), bind.new_key), Err(AccessError::Permission));
    assert_eq!(setup.registry.invalidate(peer(), setup.region.key), Err(AccessError::Permission));
    assert_eq!(setup.registry.invalidate(local(), setup.region.key ^ 0x100), Err(AccessError::UnknownKey));
    assert_eq!(setup.read(peer(), bind.new_key), Ok(()));
}

#[test]
fn windows_are_invalidated_only_through_their_queue_pair() {
    let (setup, bind) = Setup::bound(WindowKind::Type2);
    let invalidate = |who| setup.registry.invalidate(who, bind.new_key);
    assert_eq!(invalidate(Accessor::remote(PD, QPN + 1)), Err(AccessError::WrongQp));
    assert_eq!(invalidate(Accessor::local(PD, QPN + 1)), Err(AccessError::WrongQp));
    assert_eq!(invalidate(Accessor::remote(PD + 1, QPN)), Err(AccessError::WrongPd));
    assert_eq!(setup.registry.invalidate(peer(), setup.window), Err(AccessError::UnknownKey), "the old key");
    assert_eq!(setup.read(peer(), bind.new_key), Ok(()));
    assert_eq!(invalidate(peer()), Ok(()));
    assert_eq!(setup.read(peer(), bind.new_key), Err(AccessError::UnknownKey));
    assert_eq!(invalidate(peer()), Ok(()), "unbound already");
}

#[test]
fn the_end_of_a_queue_pair_takes_its_windows() {
    let (setup, bind) = Setup::bound(WindowKind::Type2);
    assert_eq!(setup.registry.invalidate_windows_of(QPN + 1), 0);
    assert_eq!(setup.registry.invalidate_windows_of(QPN), 1);
    assert_eq!(setup.read(peer(), bind.new_key), Err(AccessError::UnknownKey));
    setup.registry.deregister(setup.region.key).unwrap();
}

#[test]
fn a_region_with_windows_stays_as_it_is() {
    for kind in [WindowKind::Type1, WindowKind::Type2] {
        let (setup, bind) = Setup::bound(kind);
        let range = Some(NewRange { addr: setup.memory.addr, len: PAGE as u64, iova: setup.memory.addr });
        let change = RegionChange { range, ..RegionChange::default() };
        assert_eq!(setup.registry.deregister(setup.region.key), Err(RegisterError::Busy));
        assert_eq!(setup.registry.reregister(setup.region.key, &change), Err(RegisterError::Busy));
        assert_eq!(setup.read(peer(), bind.new_key), Ok(()));
        setup.registry.free_window(bind.new_key).unwrap();
        assert_eq!(setup.read(peer(), bind.new_key), Err(AccessError::UnknownKey));
        setup.registry.reregister(setup.region.key, &change).unwrap();
        setup.registry.deregister(setup.region.key).unwrap();
        assert_eq!(setup.registry.counts(), (0, 0));
    }
}

#[test]
fn a_freed_window_may_be_named_by_a_key_from_before_its_last_bind() {
    // The caller of ibv_bind_mw keeps the old rkey when the bind fails later.
    let (setup, _) = Setup::bound(WindowKind::Type1);
    assert_eq!(setup.registry.free_window(setup.window), Ok(()));
}

#[test]
fn zero_based_type_2_windows_count_from_their_start() {
    let setup = Setup::new(WindowKind::Type2);
    setup.memory.bytes()[PAGE + 7] = 9;
    let bind = WindowBind { access: Access::REMOTE_READ | Access::ZERO_BASED, ..setup.bind() };
    setup.registry.bind_window(&bind).unwrap();
    let mut out = [0];
    setup.registry.read(peer(), bind.new_key, 7, &mut out).unwrap();
    assert_eq!(out, [9]);
    assert_eq!(
        setup.registry.read(peer(), bind.new_key, PAGE as u64, &mut out),
        Err(AccessError::OutOfRange)
    );
    let setup = Setup::new(WindowKind::Type1);
    let bind = WindowBind { access: Access::REMOTE_READ | Access::ZERO_BASED, ..setup.bind() };
    assert_eq!(setup.registry.bind_window(&bind), Err(BindError::BadAccess));
}

#[test]
fn windows_on_regions_with_an_iova() {
    let setup = Setup::new(WindowKind::Type2);
    let iova = 0x7_0000;
    let range = Some(NewRange { addr: setup.memory.addr, len: 4 * PAGE as u64, iova });
    setup.registry.reregister(setup.region.key, &RegionChange { range, ..RegionChange::default() }).unwrap();
    setup.memory.bytes()[PAGE] = 11;
    let bind = WindowBind { addr: iova + PAGE as u64, ..setup.bind() };
    setup.registry.bind_window(&bind).unwrap();
    let mut out = [0];
    setup.registry.read(peer(), bind.new_key, iova + PAGE as u64, &mut out).unwrap();
    assert_eq!(out, [11]);
    let need = AccessNeed::Read;
    assert_eq!(setup.registry.check(peer(), bind.new_key, iova, 1, need), Err(AccessError::OutOfRange));
}
