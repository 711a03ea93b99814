//! Removed regions, and regions that are added afterwards.

mod common;

use std::sync::Arc;

use common::{Scratch, Served, counting_waker, still, wait};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager};
use terrace_tier::{BackingFile, Tier, TierRegion};

const MIB: u64 = 1 << 20;

/// A region of a new file, and the file, which must outlive it.
fn region_of(tier: &Tier, scratch: &Scratch, len: u64) -> (Arc<TierRegion>, BackingFile) {
    let file = BackingFile::open(&scratch.0, Some(len), true).unwrap();
    (tier.add(file.source().unwrap()).unwrap(), file)
}

#[test]
fn a_removed_region_reaches_nothing_of_the_next_one() {
    let served = Served::new("/tmp", "removed", 4 * MIB, true, still(8 * MIB));
    served.tier.remove(&served.region);
    let scratch = Scratch::new("/tmp", "next");
    let (next, file) = region_of(&served.tier, &scratch, MIB);
    for unit in 0..4 {
        assert!(!served.tier.promote(&served.region, unit).unwrap(), "unit {unit}");
        assert!(!served.tier.demote(&served.region, unit).unwrap(), "unit {unit}");
    }
    assert!(served.tier.pin(&served.region).is_err());
    for offset in [0, 3 * MIB] {
        assert_eq!(served.read(offset, 10), Err(AccessError::Fault));
        assert_eq!(served.write(offset, &[1; 10]), Err(AccessError::Fault));
        assert_eq!(served.atomic(offset, AtomicOp::FetchAdd { add: 1 }), Err(AccessError::Fault));
        assert_eq!(served.flush(offset, 10), Err(AccessError::Fault));
    }
    // Removing it again does not remove the next region either.
    served.tier.remove(&served.region);
    let (waker, _) = counting_waker();
    let range = HostRange { addr: file.map().addr, len: 10 };
    assert_eq!(wait(&served.tier, &next.read(range, &waker).unwrap()), Ok(()));
    assert!(served.tier.promote(&next, 0).unwrap());
    served.tier.remove(&next);
}
