//! The shortest way through the API.
use terrace_memory::*;

#[test]
fn registers_reads_writes_and_deregisters() {
    let registry = Registry::new(Limits::default()).unwrap();
    let memory = vec![7u8; 4096];
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let region = registry.register(&RegionSpec::new(1, memory.as_ptr() as u64, 4096, all)).unwrap();
    let peer = Accessor::remote(1, 17);
    registry.write(peer, region.key, region.start + 1, b"hello").unwrap();
    let mut out = [0; 7];
    registry.read(peer, region.key, region.start, &mut out).unwrap();
    assert_eq!(&out, b"\x07hello\x07");
    registry.deregister(region.key).unwrap();
    assert_eq!(registry.read(peer, region.key, region.start, &mut out), Err(AccessError::UnknownKey));
}

#[test]
fn unmapped_memory_is_a_fault() {
    let registry = Registry::new(Limits::default()).unwrap();
    let spec = RegionSpec::new(1, 0, u64::MAX, Access::LOCAL_WRITE | Access::ON_DEMAND);
    let region = registry.register(&spec).unwrap();
    for addr in [8, 0xffff_8000_0000_0000, 1 << 63] {
        let mut out = [0; 16];
        assert_eq!(registry.read(Accessor::local(1, 0), region.key, addr, &mut out), Err(AccessError::Fault));
        assert_eq!(registry.write(Accessor::local(1, 0), region.key, addr, &out), Err(AccessError::Fault));
        let add = AtomicOp::FetchAdd { add: 1 };
        assert_eq!(registry.atomic(Accessor::local(1, 0), region.key, addr, add), Err(AccessError::Fault));
    }
}
