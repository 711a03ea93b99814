//! The fault pager: faults map pages, at most as many as the budget allows.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::Served;
use terrace_baseline::{BaselineConfig, FaultModel, FaultPager, IoMethod};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{Access, AccessError, Accessor, Limits, Pager, RegionPolicy, RegionSpec, Registry};

const MIB: u64 = 1 << 20;
const PAGES: u64 = 4;

fn faulting(served: &Served) -> FaultPager {
    let model = FaultModel { fault: Duration::from_micros(50) };
    FaultPager::new(served.region.clone(), model, PAGES * 4096).unwrap()
}

/// Retries until the pages are mapped; also returns the number of refusals.
fn until_mapped<T>(mut ask: impl FnMut() -> Result<T, AccessError>) -> (T, usize) {
    for refused in 0..100_000 {
        match ask() {
            Ok(done) => return (done, refused),
            Err(error) => assert_eq!(error, AccessError::NotReady),
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    panic!("the pages do not come");
}

#[test]
fn pages_come_by_faults_and_the_oldest_goes() {
    let served = Served::new("/tmp", "faulting", MIB, true, BaselineConfig::new(IoMethod::Mapping, MIB));
    let pager = faulting(&served);
    let read = |page: u64| {
        let range = HostRange { addr: served.addr() + page * 4096, len: 4096 };
        let (transfer, refused) = until_mapped(|| pager.read(range, &served.waker));
        assert_eq!(transfer.outcome(), Some(Ok(())));
        let mut out = vec![1; 4096];
        transfer.read(0, &mut out).unwrap();
        (out[0], refused > 0)
    };
    for page in 0..PAGES {
        assert_eq!((read(page), read(page)), ((0, true), (0, false)), "page {page}");
    }
    assert!(served.woken.load(Ordering::Relaxed) > PAGES as usize);
    let (written, _) = until_mapped(|| pager.write(served.addr() + 5, &[7; 10], &served.waker));
    assert_eq!(written.outcome(), Some(Ok(())));
    let op = AtomicOp::FetchAdd { add: 1 };
    let (added, _) = until_mapped(|| pager.atomic(served.addr() + 8, op, &served.waker));
    let mut before = [0; 8];
    added.read(0, &mut before).unwrap();
    assert_eq!(before, [7, 7, 7, 7, 7, 7, 7, 0]);
    // One more page exceeds the budget: the oldest must be faulted in again, with the bytes written to it.
    assert!(read(PAGES).1);
    assert_eq!(read(0), (0, true));
    assert_eq!(std::fs::read(&served.scratch.0).unwrap()[5..17], [7, 7, 7, 8, 7, 7, 7, 7, 7, 7, 0, 0]);
    served.wait(&pager.flush(served.range(0, MIB), &served.waker).unwrap()).unwrap();
    assert_eq!(pager.read(served.range(MIB, 1), &served.waker).map(drop), Err(AccessError::OutOfRange));
}

#[test]
fn what_is_in_memory_at_the_first_fault_needs_none() {
    let served = Served::new("/tmp", "cached", MIB, true, BaselineConfig::new(IoMethod::Mapping, MIB));
    let pager = faulting(&served);
    std::fs::read(&served.scratch.0).unwrap();
    let read = |page: u64| pager.read(served.range(page * 4096, 8), &served.waker);
    until_mapped(|| read(0));
    assert!((1..PAGES).all(|page| read(page).is_ok()), "pages within the budget");
    assert!(read(PAGES).is_err(), "a page above the budget");
    until_mapped(|| read(PAGES));
    assert_eq!(served.region.stats().misses, 2);
}

#[test]
fn a_peer_is_told_to_come_back_until_the_page_is_there() {
    let served = Served::new("/tmp", "retry", MIB, true, BaselineConfig::new(IoMethod::Mapping, MIB));
    let pager: Arc<dyn Pager> = Arc::new(faulting(&served));
    let registry = Registry::new(Limits::default()).unwrap();
    let spec = RegionSpec {
        pager: Some(pager),
        policy: RegionPolicy::Fault,
        ..RegionSpec::new(1, served.addr(), MIB, Access::LOCAL_WRITE | Access::REMOTE_READ)
    };
    let key = registry.register(&spec).unwrap().key;
    let who = Accessor::remote(1, 7);
    let mut retries = 0;
    while registry.read(who, key, served.addr(), &mut [0; 16]) == Err(AccessError::Retry) {
        retries += 1;
        std::thread::sleep(Duration::from_micros(50));
    }
    assert!(retries > 0);
    assert_eq!(registry.read(who, key, served.addr(), &mut [0; 16]), Err(AccessError::NotReady));
    let fetched = registry.fetch(who, key, served.addr(), 16, &served.waker).unwrap();
    assert_eq!(fetched.outcome(), Some(Ok(())));
    registry.deregister(key).unwrap();
}
