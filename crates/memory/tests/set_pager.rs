//! A registered region gets a pager, or becomes ordinary.

mod common;

use std::sync::Arc;

use common::units::UNIT_BYTES;
use common::*;
use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{
    Access, AccessError, Accessor, NewPaging, NewRange, Pager, RegionChange, RegionPolicy, RegionSpec,
    RegisterError, Registry, Transfer, Translation, Waker, WholeRange,
};

/// A pager of absent memory, which refuses every access.
#[derive(Debug)]
struct Empty(WholeRange);

impl Pager for Empty {
    fn translation(&self) -> &dyn Translation {
        &self.0
    }

    fn read(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::NotReady)
    }

    fn write(&self, _: u64, _: &[u8], _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::NotReady)
    }

    fn atomic(&self, _: u64, _: AtomicOp, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::NotReady)
    }

    fn flush(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::NotReady)
    }
}

fn empty(addr: u64, len: u64) -> Option<Arc<dyn Pager>> {
    Some(Arc::new(Empty(WholeRange::absent(HostRange { addr, len }))))
}

fn paged_by(pager: Option<Arc<dyn Pager>>, policy: RegionPolicy) -> RegionChange {
    RegionChange { paging: Some(NewPaging { pager, pattern: None, policy }), ..RegionChange::default() }
}

fn read(registry: &Registry, key: u32, addr: u64) -> Result<(), AccessError> {
    registry.read(peer(), key, addr, &mut [0; 8])
}

#[test]
fn a_region_changes_between_paged_and_ordinary() {
    let registry = registry();
    let memory = Mapping::anonymous(2 * UNIT_BYTES as usize);
    let key = registry
        .register(&RegionSpec {
            pager: empty(memory.addr, UNIT_BYTES),
            ..RegionSpec::new(PD, memory.addr, UNIT_BYTES, ALL | Access::ON_DEMAND)
        })
        .unwrap()
        .key;
    assert_eq!(read(&registry, key, memory.addr), Err(AccessError::NotReady));
    // The program's own requests bypass the pager.
    assert_eq!(registry.read(Accessor::local(PD, QPN), key, memory.addr, &mut [0; 8]), Ok(()));
    registry.reregister(key, &paged_by(None, RegionPolicy::Wait)).unwrap();
    assert_eq!(read(&registry, key, memory.addr), Ok(()));
    let larger = empty(memory.addr, 2 * UNIT_BYTES);
    registry.reregister(key, &paged_by(larger, RegionPolicy::Fault)).unwrap();
    assert_eq!(read(&registry, key, memory.addr), Err(AccessError::Retry));
}

#[test]
fn what_cannot_be_leaves_the_region_as_it_was() {
    let registry = registry();
    let memory = Mapping::anonymous(PAGE_BYTES as usize);
    let region = memory.register(&registry, ALL);
    let set = |pager| registry.reregister(region.key, &paged_by(pager, RegionPolicy::Wait));
    assert!(matches!(set(empty(memory.addr, PAGE_BYTES - 1)), Err(RegisterError::Invalid(_))));
    assert_eq!(read(&registry, region.key, memory.addr), Ok(()));
    registry.deregister(region.key).unwrap();
    assert_eq!(set(None), Err(RegisterError::UnknownKey));
}

#[test]
fn memory_and_pager_change_together_or_not_at_all() {
    let registry = registry();
    let memory = Mapping::anonymous(2 * UNIT_BYTES as usize);
    let region = memory.register(&registry, ALL | Access::ON_DEMAND);
    let second = memory.addr + UNIT_BYTES;
    let range = Some(NewRange { addr: second, len: UNIT_BYTES, iova: second });
    let to = |pager| RegionChange { range, ..paged_by(pager, RegionPolicy::Wait) };
    let refused = registry.reregister(region.key, &to(empty(memory.addr, UNIT_BYTES)));
    assert!(matches!(refused, Err(RegisterError::Invalid(_))));
    assert_eq!(read(&registry, region.key, memory.addr), Ok(()));
    registry.reregister(region.key, &to(empty(second, UNIT_BYTES))).unwrap();
    assert_eq!(read(&registry, region.key, memory.addr), Err(AccessError::OutOfRange));
    assert_eq!(read(&registry, region.key, second), Err(AccessError::NotReady));
}
