//! The data path allocates nothing.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::pager::{Cells, TestPager};
use common::*;
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{Absence, AccessNeed, FlushScope, RegionSpec, WindowBind, WindowKind};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counted per thread.
struct Counting;

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn accesses_binds_and_invalidations_allocate_nothing() {
    let registry = registry();
    let memory = Mapping::anonymous(2 * PAGE);
    let region = memory.register(&registry, ALL);
    let window = registry.alloc_window(PD, WindowKind::Type2).unwrap();
    let bind = WindowBind {
        window_key: window,
        new_key: window,
        region_key: region.key,
        addr: memory.addr,
        len: 64,
        access: terrace_memory::Access::REMOTE_WRITE,
        pd: PD,
        qpn: QPN,
    };
    let (addr, key) = (memory.addr, region.key);
    let mut buffer = [0; PAGE];
    memory.unmap(PAGE, PAGE);
    let before = ALLOCATIONS.get();
    registry.check(peer(), key, addr, 64, AccessNeed::Write).unwrap();
    registry.write(peer(), key, addr, &buffer).unwrap();
    registry.read(local(), key, addr, &mut buffer).unwrap();
    registry.read(local(), key, addr + 64, &mut buffer).unwrap_err();
    registry.atomic(peer(), key, addr, AtomicOp::FetchAdd { add: 1 }).unwrap();
    registry.flush(peer(), key, addr, 64, 3, FlushScope::Range).unwrap();
    registry.bind_window(&bind).unwrap();
    registry.write(peer(), window, addr, &buffer[..64]).unwrap();
    registry.invalidate(peer(), window).unwrap();
    registry.write(peer(), window, addr, &buffer[..64]).unwrap_err();
    assert_eq!(ALLOCATIONS.get(), before);
}

/// A page that the pager does not bring.
struct Untouched;

impl Cells for Untouched {
    fn get(&self, _: usize, _: &mut [u8]) {}
    fn set(&self, _: usize, _: &[u8]) {}
}

#[test]
fn accesses_to_present_memory_and_patterns_allocate_nothing() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    let range = HostRange { addr: memory.addr, len: PAGE as u64 };
    let pager = TestPager::new(range, 0, Box::new(Untouched));
    let spec = RegionSpec {
        pager: Some(pager.clone()),
        pattern: Some(std::sync::Arc::new([7; PAGE])),
        ..RegionSpec::new(PD, memory.addr, PAGE as u64, ALL)
    };
    let (addr, key) = (memory.addr, registry.register(&spec).unwrap().key);
    let mut buffer = [0; PAGE];
    pager.admit(0);
    let before = ALLOCATIONS.get();
    registry.announce(peer(), key, addr, PAGE as u64, AccessNeed::Read).unwrap();
    registry.read(peer(), key, addr, &mut buffer).unwrap();
    registry.write(peer(), key, addr, &buffer).unwrap();
    registry.atomic(peer(), key, addr, AtomicOp::FetchAdd { add: 1 }).unwrap();
    assert_eq!(ALLOCATIONS.get(), before);
    pager.expel(0);
    let before = ALLOCATIONS.get();
    registry.read(peer().with_absence(Absence::Magic), key, addr, &mut buffer).unwrap();
    registry.read(peer(), key, addr, &mut buffer).unwrap_err();
    registry.write(peer(), key, addr, &buffer).unwrap_err();
    assert_eq!(ALLOCATIONS.get(), before);
    assert_eq!(buffer, [7; PAGE]);
}
