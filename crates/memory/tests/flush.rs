//! FLUSH: required rights, coverage, effects.

mod common;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use common::*;
use terrace_hostmem::HostRange;
use terrace_memory::{Access, AccessError, FlushHook, FlushScope, RegionSpec, WindowBind, WindowKind};

const GLOBAL: u8 = 1;
const PERSISTENT: u8 = 2;

/// Records each flush, and fails when told to.
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

fn run(program: &str, arguments: &[&str], path: &Path) -> Option<String> {
    let output = Command::new(program).args(arguments).arg(path).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A small file system in memory; unmounted at the end.
struct Disk(tempfile::TempDir);

impl Drop for Disk {
    fn drop(&mut self) {
        run("umount", &["--lazy"], self.0.path());
    }
}

/// The kernel reports a failed write once, and treats the pages as written from then on.
#[test]
fn what_could_not_be_written_is_not_said_to_be_durable_until_it_was() {
    let disk = Disk(tempfile::tempdir().unwrap());
    let path = disk.0.path();
    if run("mount", &["-t", "tmpfs", "-o", "size=1m", "tmpfs"], path).is_none() {
        return eprintln!("no right to mount: not tried");
    }
    let (image, filler) = (path.join("image"), path.join("filler"));
    File::create(&image).unwrap().set_len(64 * PAGE as u64).unwrap();
    let Some(device) = run("losetup", &["--find", "--show"], &image) else {
        return eprintln!("no right to make loop devices: not tried");
    };
    let file = File::options().read(true).write(true).open(&device).unwrap();
    // The kernel detaches the device when its last descriptor closes.
    run("losetup", &["--detach"], device.as_ref()).unwrap();
    let full = File::create(&filler).unwrap();
    assert!((0..).any(|page| full.write_all_at(&[1; PAGE], page * PAGE as u64).is_err()));
    let memory = Mapping::file(&file, 64 * PAGE, libc::MAP_SHARED);
    let registry = registry();
    let mut keys = Vec::new();
    for start in [0, 32] {
        let addr = memory.addr + start * PAGE as u64;
        let spec = RegionSpec::new(PD, addr, 32 * PAGE as u64, ALL);
        keys.push((registry.register(&spec).unwrap().key, addr));
    }
    let flush = |(key, addr): (u32, u64)| {
        registry.flush(peer(), key, addr, 32 * PAGE as u64, PERSISTENT, FlushScope::Range)
    };
    memory.bytes().fill(7);
    for round in 0..3 {
        for &key in &keys {
            assert_eq!(flush(key), Err(AccessError::Flush), "round {round}");
        }
    }
    drop(full);
    std::fs::remove_file(&filler).unwrap();
    for &key in &keys {
        assert_eq!(flush(key), Ok(()), "there is room now");
    }
    let mut stored = Vec::new();
    File::open(&image).unwrap().read_to_end(&mut stored).unwrap();
    assert!(stored.iter().all(|byte| *byte == 7), "durable, and not on the disk");
    // That failure concerns neither other files nor what was written since: nothing is stored to memory again, which
    // could not be stored to now.
    let other_file = disk_file(2 * PAGE);
    let other = Mapping::file(&other_file, 2 * PAGE, libc::MAP_SHARED);
    other.bytes().fill(7);
    let key = other.register(&registry, ALL).key;
    other.protect(0, 2 * PAGE, libc::PROT_READ);
    assert_eq!(
        registry.flush(peer(), key, other.addr, 2 * PAGE as u64, PERSISTENT, FlushScope::Range),
        Ok(())
    );
    memory.protect(0, 64 * PAGE, libc::PROT_READ);
    for &key in &keys {
        assert_eq!(flush(key), Ok(()), "written before");
    }
}
