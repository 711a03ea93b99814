//! What fault safety and key checks cost, beside a plain `memcpy`.
//!
//! `cargo bench -p terrace-memory --bench copies`

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use terrace_memory::{Access, AccessNeed, Accessor, AtomicOp, Limits, RegionSpec, Registry, fault};

const SIZES: [usize; 6] = [8, 64, 256, 1024, 4096, 65536];

/// Memory that starts `offset` bytes into a page.
fn buffer(offset: usize) -> &'static mut [u8] {
    let block: &'static mut [u8] = Box::leak(vec![1u8; 65536 + 8192].into_boxed_slice());
    let start = block.as_ptr().align_offset(4096) + offset;
    &mut block[start..start + 65536]
}

/// Copies by the C library, by our routines, and through a key.
fn copies(c: &mut Criterion) {
    let registry = Registry::new(Limits::default()).expect("handlers");
    let who = Accessor::remote(1, 1);
    // A packet's payload lies 12 bytes behind the start of its headers, or more; memory is aligned as programs align it.
    for (name, region_offset, packet_offset) in
        [("aligned", 0, 16), ("payload after 12 bytes", 0, 12), ("unaligned", 5, 12)]
    {
        let region = buffer(region_offset);
        let packet = buffer(packet_offset);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let spec = RegionSpec::new(1, region.as_ptr() as u64, region.len() as u64, access);
        let key = registry.register(&spec).expect("registration").key;
        let addr = region.as_ptr() as u64;
        let mut group = c.benchmark_group(format!("copy/{name}"));
        for size in SIZES {
            group.throughput(Throughput::Bytes(size as u64));
            group.bench_with_input(BenchmarkId::new("memcpy to", size), &size, |b, &size| {
                b.iter(|| black_box(&mut region[..size]).copy_from_slice(black_box(&packet[..size])));
            });
            group.bench_with_input(BenchmarkId::new("memcpy from", size), &size, |b, &size| {
                b.iter(|| black_box(&mut packet[..size]).copy_from_slice(black_box(&region[..size])));
            });
            group.bench_with_input(BenchmarkId::new("fault::copy_to", size), &size, |b, &size| {
                // SAFETY: the target is the buffer above, and nobody else uses it.
                b.iter(|| unsafe { fault::copy_to(black_box(addr), black_box(&packet[..size])) });
            });
            group.bench_with_input(BenchmarkId::new("fault::copy_from", size), &size, |b, &size| {
                // SAFETY: the source is the buffer above.
                b.iter(|| unsafe { fault::copy_from(black_box(addr), black_box(&mut packet[..size])) });
            });
            group.bench_with_input(BenchmarkId::new("Registry::write", size), &size, |b, &size| {
                b.iter(|| registry.write(who, black_box(key), black_box(addr), black_box(&packet[..size])));
            });
            group.bench_with_input(BenchmarkId::new("Registry::read", size), &size, |b, &size| {
                b.iter(|| {
                    registry.read(who, black_box(key), black_box(addr), black_box(&mut packet[..size]))
                });
            });
        }
    }
}

/// Finding and checking a key among many, and an atomic.
fn keys(c: &mut Criterion) {
    let registry = Registry::new(Limits::default()).expect("handlers");
    let region = buffer(0);
    let addr = region.as_ptr() as u64;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let spec = RegionSpec::new(1, addr, 65536, access);
    let keys: Vec<u32> = (0..1024).map(|_| registry.register(&spec).expect("registration").key).collect();
    let who = Accessor::remote(1, 1);
    let mut group = c.benchmark_group("key");
    group.bench_function("check", |b| {
        b.iter(|| registry.check(who, black_box(keys[0]), black_box(addr), 4096, AccessNeed::Write));
    });
    group.bench_function("check, 1024 keys in turn", |b| {
        let mut turn = 0;
        b.iter(|| {
            turn = (turn + 1) % keys.len();
            registry.check(who, black_box(keys[turn]), black_box(addr), 4096, AccessNeed::Write)
        });
    });
    group.bench_function("fetch and add", |b| {
        b.iter(|| registry.atomic(who, black_box(keys[0]), black_box(addr), AtomicOp::FetchAdd { add: 1 }));
    });
}

/// A registration and its end, for little and for much memory.
fn registration(c: &mut Criterion) {
    let registry = Registry::new(Limits::default()).expect("handlers");
    let mut group = c.benchmark_group("register and deregister");
    for (name, len) in [("4 KiB", 4096), ("64 GiB", 64usize << 30)] {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, never touched.
        let addr = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        assert_ne!(addr, libc::MAP_FAILED);
        let spec = RegionSpec::new(1, addr as u64, len as u64, Access::LOCAL_WRITE);
        group.bench_function(name, |b| {
            b.iter(|| registry.deregister(registry.register(black_box(&spec)).expect("registration").key));
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(30)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(600));
    targets = copies, keys, registration
}
criterion_main!(benches);
