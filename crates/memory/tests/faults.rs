//! Memory that changes under its registration: the request fails, the process survives.

mod common;

use common::*;
use terrace_hostmem::AtomicOp;
use terrace_memory::{Access, AccessError, RegionSpec, Registry};

const ADD: AtomicOp = AtomicOp::FetchAdd { add: 1 };

/// Every kind of access to 16 bytes at `addr` faults.
fn assert_gone(registry: &Registry, key: u32, addr: u64) {
    for who in [local(), peer()] {
        assert_eq!(registry.read(who, key, addr, &mut [0; 16]), Err(AccessError::Fault));
        assert_eq!(registry.write(who, key, addr, &[1; 16]), Err(AccessError::Fault));
        assert_eq!(registry.atomic(who, key, addr, ADD), Err(AccessError::Fault));
    }
}

/// Every kind of access to 16 bytes at `addr` works.
fn assert_there(registry: &Registry, key: u32, addr: u64) {
    for who in [local(), peer()] {
        registry.write(who, key, addr, &[7; 16]).unwrap();
        let mut out = [0; 16];
        registry.read(who, key, addr, &mut out).unwrap();
        assert_eq!(out, [7; 16]);
        assert_eq!(registry.atomic(who, key, addr, ADD), Ok(u64::from_ne_bytes([7; 8])));
    }
}

#[test]
fn unmapped_memory() {
    let registry = registry();
    let memory = Mapping::anonymous(4 * PAGE);
    let key = memory.register(&registry, ALL).key;
    assert_there(&registry, key, memory.addr + PAGE as u64);
    memory.unmap(PAGE, PAGE);
    assert_gone(&registry, key, memory.addr + PAGE as u64);
    assert_there(&registry, key, memory.addr);
    assert_there(&registry, key, memory.addr + 2 * PAGE as u64);
    registry.deregister(key).unwrap();
}

#[test]
fn memory_without_permissions_works_again_when_it_has_them() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    let key = memory.register(&registry, ALL).key;
    memory.protect(0, PAGE, libc::PROT_NONE);
    assert_gone(&registry, key, memory.addr);
    memory.protect(0, PAGE, libc::PROT_READ | libc::PROT_WRITE);
    assert_there(&registry, key, memory.addr);
}

#[test]
fn read_only_memory_can_be_read() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    memory.bytes().fill(5);
    let key = memory.register(&registry, ALL).key;
    memory.protect(0, PAGE, libc::PROT_READ);
    let mut out = [0; 16];
    registry.read(peer(), key, memory.addr, &mut out).unwrap();
    assert_eq!(out, [5; 16]);
    assert_eq!(registry.write(peer(), key, memory.addr, &[1]), Err(AccessError::Fault));
    assert_eq!(registry.atomic(peer(), key, memory.addr, ADD), Err(AccessError::Fault));
}

#[test]
fn a_truncated_file() {
    for file in [disk_file(4 * PAGE), memfd(4 * PAGE, 0).unwrap()] {
        let registry = registry();
        let memory = Mapping::file(&file, 4 * PAGE, libc::MAP_SHARED);
        let key = memory.register(&registry, ALL).key;
        let tail = memory.addr + 2 * PAGE as u64;
        assert_there(&registry, key, tail);
        file.set_len(2 * PAGE as u64).unwrap();
        assert_gone(&registry, key, tail);
        assert_there(&registry, key, memory.addr);
        file.set_len(4 * PAGE as u64).unwrap();
        assert_there(&registry, key, tail);
    }
}

#[test]
fn a_fault_in_the_middle_leaves_what_lies_before_it_written() {
    let registry = registry();
    let memory = Mapping::anonymous(2 * PAGE);
    let key = memory.register(&registry, ALL).key;
    memory.unmap(PAGE, PAGE);
    for before in [1, 7, 8, 9, 33, 100, 129, 1000, PAGE] {
        memory.bytes()[..PAGE].fill(0);
        let addr = memory.addr + (PAGE - before) as u64;
        let data = vec![0xee; before + 200];
        assert_eq!(registry.write(peer(), key, addr, &data), Err(AccessError::Fault));
        let page = &memory.bytes()[..PAGE];
        assert!(page[..PAGE - before].iter().all(|&byte| byte == 0));
        // Copies by vectors or by 8 bytes stop short of the page's end by less than their own size.
        let written = before.saturating_sub(128);
        assert!(page[PAGE - before..][..written].iter().all(|&byte| byte == 0xee), "{before}");
        assert_eq!(registry.read(peer(), key, addr, &mut vec![0; before + 200]), Err(AccessError::Fault));
    }
}

#[test]
fn implicit_on_demand_memory_covers_what_is_mapped_when_it_is_used() {
    let registry = registry();
    let access = ALL | Access::ON_DEMAND;
    let key = registry.register(&RegionSpec::new(PD, 0, u64::MAX, access)).unwrap().key;
    let memory = Mapping::anonymous(PAGE);
    assert_there(&registry, key, memory.addr);
    let addr = memory.addr;
    drop(memory);
    assert_gone(&registry, key, addr);
    // Address 0, the last bytes, and addresses that are not canonical or belong to the kernel.
    for addr in [0, 8, u64::MAX - 23, 1 << 63, 0xffff_8000_0000_0000, 0x0000_8000_0000_0000] {
        assert_gone(&registry, key, addr);
    }
    assert_eq!(registry.read(peer(), key, u64::MAX - 15, &mut [0; 17]), Err(AccessError::OutOfRange));
}

#[test]
fn huge_pages() {
    const HUGE: usize = 2 << 20;
    let Ok(memory) = Mapping::huge(2 * HUGE) else {
        // The machine has no explicit huge pages free; transparent huge pages follow the same rules.
        let memory = Mapping::anonymous(4 * HUGE);
        // SAFETY: advice on a mapping of our own.
        unsafe { libc::madvise(memory.addr as *mut _, memory.len, libc::MADV_HUGEPAGE) };
        let registry = registry();
        let key = memory.register(&registry, ALL | Access::HUGETLB).key;
        return assert_there(&registry, key, memory.addr.next_multiple_of(HUGE as u64) + HUGE as u64 - 16);
    };
    let registry = registry();
    let key = memory.register(&registry, ALL | Access::HUGETLB).key;
    assert_there(&registry, key, memory.addr + HUGE as u64 - 16);
    memory.unmap(HUGE, HUGE);
    assert_gone(&registry, key, memory.addr + HUGE as u64);
}

#[test]
fn huge_pages_that_run_out() {
    // Unreserved huge pages of a memory file: touching them raises SIGBUS when the pool is empty.
    let Ok(file) = memfd(2 << 20, libc::MFD_HUGETLB) else { return };
    let memory = Mapping::file(&file, 2 << 20, libc::MAP_SHARED | libc::MAP_NORESERVE);
    let registry = registry();
    let key = memory.register(&registry, ALL).key;
    // Whether a page is free depends on the machine; the process must survive either way.
    match registry.write(peer(), key, memory.addr, &[1; 16]) {
        Ok(()) | Err(AccessError::Fault) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn shared_memory_is_seen_through_every_mapping_of_it() {
    let file = memfd(PAGE, 0).unwrap();
    let ours = Mapping::file(&file, PAGE, libc::MAP_SHARED);
    let theirs = Mapping::file(&file, PAGE, libc::MAP_SHARED);
    let registry = registry();
    let key = ours.register(&registry, ALL).key;
    registry.write(peer(), key, ours.addr + 100, b"through the other one").unwrap();
    assert_eq!(&theirs.bytes()[100..121], b"through the other one");
}

#[test]
fn private_file_memory_keeps_its_changes_to_itself() {
    let file = memfd(PAGE, 0).unwrap();
    let private = Mapping::file(&file, PAGE, libc::MAP_PRIVATE);
    let shared = Mapping::file(&file, PAGE, libc::MAP_SHARED);
    let registry = registry();
    let key = private.register(&registry, ALL).key;
    assert_there(&registry, key, private.addr);
    assert_eq!(shared.bytes()[..16], [0; 16]);
}

#[test]
fn many_threads_fault_at_once() {
    let registry = registry();
    let key = registry.register(&RegionSpec::new(PD, 0, u64::MAX, ALL | Access::ON_DEMAND)).unwrap().key;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..2_000).for_each(|n| assert_gone(&registry, key, n * 4096 % 65536)));
        }
    });
}
