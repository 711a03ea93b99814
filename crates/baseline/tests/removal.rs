//! Removed regions, and regions that are added afterwards.

mod common;

use std::sync::Arc;

use common::{Scratch, Served, counting_waker, tiering, wait};
use terrace_baseline::{BackingFile, Baseline, BaselineRegion};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager};

const MIB: u64 = 1 << 20;

/// A region of a new file, and the file, which must outlive it.
fn region_of(baseline: &Baseline, scratch: &Scratch, len: u64) -> (Arc<BaselineRegion>, BackingFile) {
    let file = BackingFile::open(&scratch.0, Some(len)).unwrap();
    (baseline.add(file.source().unwrap()).unwrap(), file)
}

#[test]
fn a_removed_region_reaches_nothing_of_the_next_one() {
    let served = Served::new("/tmp", "removed", 4 * MIB, true, tiering(8 * MIB));
    served.baseline.remove(&served.region);
    let scratch = Scratch::new("/tmp", "next");
    let (next, file) = region_of(&served.baseline, &scratch, MIB);
    for offset in [0, 3 * MIB] {
        assert_eq!(served.read(offset, 10), Err(AccessError::Fault));
        assert_eq!(served.write(offset, &[1; 10]), Err(AccessError::Fault));
        assert_eq!(served.atomic(offset, AtomicOp::FetchAdd { add: 1 }), Err(AccessError::Fault));
        assert_eq!(served.flush(offset, 10), Err(AccessError::Fault));
    }
    // Removing it again does not remove the next region either.
    served.baseline.remove(&served.region);
    let (waker, _) = counting_waker();
    let range = HostRange { addr: file.map().addr, len: 10 };
    assert_eq!(wait(&served.baseline, &next.read(range, &waker).unwrap()), Ok(()));
    served.baseline.remove(&next);
}
