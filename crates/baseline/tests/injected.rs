//! Storage faults of a fault plan, for all kinds of regions, and for as long as the plan says.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Scratch, Served, tiering};
use terrace_baseline::{BackingFile, Baseline, BaselineConfig, IoMethod};
use terrace_faults::{FaultPlan, Faults, Injected};
use terrace_hostmem::AtomicOp;
use terrace_memory::{AccessError, Pager};

const MIB: u64 = 1 << 20;

fn served(dir: &str, plan: &str) -> (Served, Arc<Faults>) {
    let faults = Arc::new(Faults::new(FaultPlan::parse(plan).expect("a plan"), "test"));
    let config = BaselineConfig { faults: Some(faults.clone()), ..tiering(MIB) };
    (Served::new(dir, "injected", 2 * MIB, true, config), faults)
}

/// On a disk and in memory.
const PLACES: [&str; 2] = ["/tmp", "/dev/shm"];

#[test]
fn failing_reads_fail_wherever_the_bytes_are_and_writes_go_on() {
    for dir in PLACES {
        let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"read\"\nfor_operations = 2";
        let (served, faults) = served(dir, plan);
        served.write(0, &[7; 4096]).expect("whole pages need not be read");
        for _ in 0..2 {
            assert_eq!(served.read(0, 4096), Err(AccessError::Device), "{dir}");
        }
        assert_eq!(served.read(0, 4096), Ok(vec![7; 4096]), "{dir}: it has ended");
        assert_eq!(faults.counts().get(Injected::StorageFailed), 2);
    }
}

#[test]
fn a_full_disk_refuses_writes_only() {
    for dir in PLACES {
        let plan = "[[fault]]\nkind = \"failing-storage\"\nerror = \"no-space\"\nafter_operations = 1";
        let (served, _) = served(dir, plan);
        served.write(4096, &[1; 4096]).expect("the first one passes");
        assert_eq!(served.write(4096, &[2; 4096]), Err(AccessError::NoSpace), "{dir}");
        assert_eq!(served.read(4096, 4096), Ok(vec![1; 4096]), "{dir}");
    }
}

#[test]
fn after_a_failing_sync_no_flush_succeeds() {
    let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"sync\"\nfor_operations = 1";
    let (served, _) = served("/tmp", plan);
    served.write(0, &[3; 4096]).expect("written");
    // The kernel does not report which part of the file was lost, and may have dropped it.
    for offset in [0, 4096, 0] {
        assert_eq!(served.flush(offset, 4096), Err(AccessError::Flush));
    }
    assert_eq!(served.region.stats().write_backs_failed, 1);
    assert_eq!(served.read(0, 4096), Ok(vec![3; 4096]));
}

#[test]
fn failing_atomics_leave_the_value_as_it_was() {
    for dir in PLACES {
        let plan = "[[fault]]\nkind = \"failing-storage\"\nafter_operations = 1\nfor_operations = 1";
        let (served, _) = served(dir, plan);
        served.write(0, &[0; 4096]).expect("the first one passes");
        assert_eq!(served.atomic(8, AtomicOp::FetchAdd { add: 1 }), Err(AccessError::Device), "{dir}");
        assert_eq!(served.atomic(8, AtomicOp::FetchAdd { add: 1 }), Ok(0), "{dir}");
    }
}

#[test]
fn slow_storage_takes_its_time_and_does_not_hold_up_what_comes_after() {
    for dir in PLACES {
        let plan = "[[fault]]\nkind = \"slow-storage\"\ndelay_us_min = 30000\nfor_operations = 1";
        let (served, faults) = served(dir, plan);
        let start = Instant::now();
        let slow = served.region.read(served.range(0, 4096), &served.waker).expect("begun");
        let other = served.region.read(served.range(MIB, 4096), &served.waker).expect("begun");
        served.wait(&other).expect("read");
        assert!(slow.outcome().is_none() || start.elapsed() >= Duration::from_millis(30), "{dir}");
        served.wait(&slow).expect("read");
        assert!(start.elapsed() >= Duration::from_millis(30), "{dir}");
        assert_eq!(faults.counts().get(Injected::StorageSlowed), 1);
    }
}

#[test]
fn what_cannot_be_read_is_not_pinned() {
    let plan = "[[fault]]\nkind = \"failing-storage\"\nfor_operations = 1";
    let faults = Arc::new(Faults::new(FaultPlan::parse(plan).expect("a plan"), "test"));
    let config = BaselineConfig { faults: Some(faults), ..BaselineConfig::new(IoMethod::Pinned, MIB) };
    let baseline = Baseline::open(config).expect("opened");
    let scratch = Scratch::new("/tmp", "unread");
    let file = BackingFile::open(&scratch.0, Some(MIB)).expect("a file");
    let error = baseline.add(file.source().expect("a source")).expect_err("it fails once");
    assert!(error.to_string().contains("lock a region"), "{error}");
    assert_eq!(baseline.stats().resident_bytes, 0);
    let region = baseline.add(file.source().expect("a source")).expect("and then it does not");
    assert_eq!(baseline.stats().resident_bytes, MIB);
    baseline.remove(&region);
}
