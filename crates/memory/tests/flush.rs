//! FLUSH: who may, what it covers, what it does.

mod common;

use std::io::Read;
use std::sync::{Arc, Mutex};

use common::*;
use terrace_memory::{
    Access, AccessError, FlushHook, FlushScope, HostRange, RegionSpec, WindowBind, WindowKind,
};

const GLOBAL: u8 = 1;
const PERSISTENT: u8 = 2;

/// Notes what it was asked for, and fails when told to.
#[derive(Debug, Default)]
struct Recorder {
    ranges: Mutex<Vec<HostRange>>,
    fail: bool,
}

impl FlushHook for Recorder {
    fn flush(&self, range: HostRange) -> std::io::Result<()> {
        self.ranges.lock().unwrap().push(range);
        if self.fail { Err(std::io::Error::other("disk full")) } else { Ok(()) }
    }
}

#[test]
fn the_hook_sees_the_programs_addresses() {
    let registry = registry();
    let memory = Mapping::anonymous(4 * PAGE);
    let hook = Arc::new(Recorder::default());
    let mut spec = RegionSpec::new(PD, memory.addr, memory.len as u64, ALL | Access::ZERO_BASED);
    spec.flush = Some(hook.clone());
    let key = registry.register(&spec).unwrap().key;
    let flush = |va, len, placement, scope| registry.flush(peer(), key, va, len, placement, scope);
    flush(100, 50, PERSISTENT, FlushScope::Range).unwrap();
    flush(100, 50, GLOBAL, FlushScope::Range).unwrap();
    flush(100, 50, GLOBAL | PERSISTENT, FlushScope::Region).unwrap();
    flush(100, 0, PERSISTENT, FlushScope::Range).unwrap();
    let all = HostRange { addr: memory.addr, len: memory.len as u64 };
    assert_eq!(*hook.ranges.lock().unwrap(), [HostRange { addr: memory.addr + 100, len: 50 }, all]);
    assert_eq!(flush(0, memory.len as u64 + 1, PERSISTENT, FlushScope::Range), Err(AccessError::OutOfRange));
    assert_eq!(flush(u64::MAX, u64::MAX, PERSISTENT, FlushScope::Region), Ok(()));
}

#[test]
fn a_failing_hook_fails_the_flush() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    let mut spec = RegionSpec::new(PD, memory.addr, PAGE as u64, ALL);
    spec.flush = Some(Arc::new(Recorder { fail: true, ..Recorder::default() }));
    let key = registry.register(&spec).unwrap().key;
    let flush = |placement| registry.flush(peer(), key, memory.addr, 1, placement, FlushScope::Range);
    assert_eq!(flush(PERSISTENT), Err(AccessError::Flush));
    assert_eq!(flush(GLOBAL), Ok(()));
}

#[test]
fn each_placement_needs_its_permission() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE);
    let writable = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let flush = |access, placement| {
        let key = memory.register(&registry, writable | access).key;
        registry.flush(peer(), key, memory.addr, 8, placement, FlushScope::Range)
    };
    assert_eq!(flush(Access::empty(), GLOBAL), Err(AccessError::Permission));
    assert_eq!(flush(Access::FLUSH_GLOBAL, GLOBAL), Ok(()));
    assert_eq!(flush(Access::FLUSH_GLOBAL, PERSISTENT), Err(AccessError::Permission));
    assert_eq!(flush(Access::FLUSH_GLOBAL, GLOBAL | PERSISTENT), Err(AccessError::Permission));
    assert_eq!(flush(Access::FLUSH_PERSISTENT, PERSISTENT), Ok(()));
    assert_eq!(flush(Access::all(), 0), Err(AccessError::Flush));
    assert_eq!(flush(Access::all(), 4), Err(AccessError::Flush));
}

#[test]
fn selectivity_is_range_or_region() {
    assert_eq!(FlushScope::from_selectivity(0), Some(FlushScope::Range));
    assert_eq!(FlushScope::from_selectivity(1), Some(FlushScope::Region));
    assert_eq!(FlushScope::from_selectivity(2), None);
}

#[test]
fn file_mappings_are_written_and_anonymous_memory_has_nothing_to_write() {
    let registry = registry();
    let mut file = disk_file(2 * PAGE);
    let memory = Mapping::file(&file, 2 * PAGE, libc::MAP_SHARED);
    let key = memory.register(&registry, ALL).key;
    registry.write(peer(), key, memory.addr + 10, b"durable").unwrap();
    registry.flush(peer(), key, memory.addr + 10, 7, PERSISTENT, FlushScope::Range).unwrap();
    let mut content = Vec::new();
    file.read_to_end(&mut content).unwrap();
    assert_eq!(&content[10..17], b"durable");

    let memory = Mapping::anonymous(2 * PAGE);
    let key = memory.register(&registry, ALL).key;
    let flush = || registry.flush(peer(), key, 0, 0, PERSISTENT, FlushScope::Region);
    assert_eq!(flush(), Ok(()));
    memory.unmap(PAGE, PAGE);
    assert_eq!(flush(), Err(AccessError::Fault));
}

#[test]
fn through_a_window_it_covers_the_window() {
    let registry = registry();
    let memory = Mapping::anonymous(4 * PAGE);
    let hook = Arc::new(Recorder::default());
    let mut spec = RegionSpec::new(PD, memory.addr, memory.len as u64, ALL);
    spec.flush = Some(hook.clone());
    let region = registry.register(&spec).unwrap();
    let window = registry.alloc_window(PD, WindowKind::Type2).unwrap();
    let bind = WindowBind {
        window_key: window,
        new_key: window,
        region_key: region.key,
        addr: memory.addr + 64,
        len: 128,
        access: Access::REMOTE_WRITE | Access::FLUSH_PERSISTENT,
        pd: PD,
        qpn: QPN,
    };
    registry.bind_window(&bind).unwrap();
    registry.flush(peer(), window, 0, 0, PERSISTENT, FlushScope::Region).unwrap();
    assert_eq!(*hook.ranges.lock().unwrap(), [HostRange { addr: memory.addr + 64, len: 128 }]);
    assert_eq!(
        registry.flush(peer(), window, bind.addr, 8, GLOBAL, FlushScope::Range),
        Err(AccessError::Permission)
    );
}
