//! The data path allocates nothing.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::*;
use terrace_memory::{AccessNeed, AtomicOp, FlushScope, WindowBind, WindowKind};

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
