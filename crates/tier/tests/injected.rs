//! Storage faults of a fault plan, for all kinds of regions, and for as long as the plan says.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Served, still};
use terrace_faults::{FaultPlan, Faults, Injected};
use terrace_hostmem::AtomicOp;
use terrace_memory::{AccessError, Pager, UnitPager};
use terrace_tier::TierConfig;

const MIB: u64 = 1 << 20;

fn served(dir: &str, exclusive: bool, plan: &str) -> (Served, Arc<Faults>) {
    let faults = Arc::new(Faults::new(FaultPlan::parse(plan).expect("a plan"), "test"));
    let config = TierConfig { faults: Some(faults.clone()), ..still(MIB) };
    (Served::new(dir, "injected", 2 * MIB, exclusive, config), faults)
}

/// On a disk and in memory; exclusive, and shared with a program through the page cache.
const PLACES: [(&str, bool); 4] = [("/tmp", true), ("/tmp", false), ("/dev/shm", true), ("/dev/shm", false)];

#[test]
fn failing_reads_fail_wherever_the_bytes_are_and_writes_go_on() {
    for (dir, exclusive) in PLACES {
        let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"read\"\nfor_operations = 2";
        let (served, faults) = served(dir, exclusive, plan);
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
    for (dir, exclusive) in PLACES {
        let plan = "[[fault]]\nkind = \"failing-storage\"\nerror = \"no-space\"\nafter_operations = 1";
        let (served, _) = served(dir, exclusive, plan);
        served.write(4096, &[1; 4096]).expect("the first one passes");
        assert_eq!(served.write(4096, &[2; 4096]), Err(AccessError::NoSpace), "{dir}");
        assert_eq!(served.read(4096, 4096), Ok(vec![1; 4096]), "{dir}");
    }
}

#[test]
fn a_failing_sync_fails_the_flush() {
    let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"sync\"\nfor_operations = 1";
    let (served, _) = served("/tmp", true, plan);
    served.write(0, &[3; 4096]).expect("written");
    assert_eq!(served.flush(0, 4096), Err(AccessError::Flush));
    // The kernel does not report which part of the file was lost.
    assert_eq!(served.flush(4096, 4096), Err(AccessError::Flush));
    served.flush_when_repaired(0, 4096);
    assert_eq!(served.read(0, 4096), Ok(vec![3; 4096]));
}

#[test]
fn a_unit_that_cannot_be_written_back_stays_and_no_flush_succeeds_until_it_is() {
    for (dir, exclusive) in PLACES {
        let plan = "[[fault]]\nkind = \"failing-storage\"\noperation = \"write-back\"\nafter_operations = 1\nfor_operations = 4";
        let (served, faults) = served(dir, exclusive, plan);
        // With an exclusive file on disk, the first write-back is for pages left in the page cache before.
        if !exclusive || dir == "/dev/shm" {
            let _ = faults.storage(terrace_faults::StorageOperation::WriteBack);
        }
        assert!(served.tier.promote(&served.region, 0).expect("brought"));
        served.write(0, &[5; 4096]).expect("written");
        let error = served.tier.demote(&served.region, 0).expect_err("it cannot be written back");
        assert_eq!(error.raw_os_error(), Some(5), "{dir}");
        assert!(served.region.presence().is_present(0), "{dir}");
        assert_eq!(served.flush(0, 4096), Err(AccessError::Flush), "{dir}");
        assert_eq!(served.read(0, 4096), Ok(vec![5; 4096]), "{dir}");
        served.flush_when_repaired(0, 4096);
        assert_eq!(faults.counts().get(Injected::StorageFailed), 4, "{dir}");
        assert!(served.tier.demote(&served.region, 0).expect("written"), "{dir}");
        assert_eq!(served.read(0, 4096), Ok(vec![5; 4096]), "{dir}");
    }
}

#[test]
fn failing_atomics_leave_the_value_as_it_was() {
    for (dir, exclusive) in PLACES {
        let plan = "[[fault]]\nkind = \"failing-storage\"\nafter_operations = 1\nfor_operations = 1";
        let (served, _) = served(dir, exclusive, plan);
        served.write(0, &[0; 4096]).expect("the first one passes");
        assert_eq!(served.atomic(8, AtomicOp::FetchAdd { add: 1 }), Err(AccessError::Device), "{dir}");
        assert_eq!(served.atomic(8, AtomicOp::FetchAdd { add: 1 }), Ok(0), "{dir}");
    }
}

#[test]
fn slow_storage_takes_its_time_and_does_not_hold_up_what_comes_after() {
    for (dir, exclusive) in PLACES {
        let plan = "[[fault]]\nkind = \"slow-storage\"\ndelay_us_min = 30000\nfor_operations = 1";
        let (served, faults) = served(dir, exclusive, plan);
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
fn a_unit_that_cannot_be_read_is_not_promoted() {
    let plan = "[[fault]]\nkind = \"failing-storage\"\nfor_operations = 1";
    let (served, _) = served("/tmp", true, plan);
    let error = served.tier.promote(&served.region, 0).expect_err("it fails once");
    assert_eq!(error.raw_os_error(), Some(5));
    assert!(served.tier.promote(&served.region, 0).expect("and then it does not"));
    assert_eq!(served.tier.stats().regions[0].moves_failed, 1);
}
