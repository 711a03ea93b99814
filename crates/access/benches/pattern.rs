//! The cost of telling data from signature pages beside a plain comparison: `cargo bench -p terrace-access`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use terrace_access::pattern::{CHUNK_BYTES, PAGE_BYTES, Pattern};

/// A page that differs from the signature page only at the end of each chunk: the longest comparison.
fn nearly_the_pattern(pattern: &Pattern) -> Vec<u8> {
    let mut page = pattern.bytes().to_vec();
    page.iter_mut().skip(CHUNK_BYTES - 1).step_by(CHUNK_BYTES).for_each(|byte| *byte ^= 1);
    page
}

fn suspects(c: &mut Criterion) {
    let pattern = Pattern::derive(&[7; 32]);
    let mut group = c.benchmark_group("suspects");
    group.throughput(Throughput::Bytes(PAGE_BYTES as u64));
    let pages = [("zeros", vec![0; PAGE_BYTES]), ("nearly the pattern", nearly_the_pattern(&pattern))];
    for (name, page) in &pages {
        group.bench_with_input(BenchmarkId::new("page", name), page, |bencher, page| {
            bencher.iter(|| pattern.suspects(0, black_box(page)));
        });
        group.bench_with_input(BenchmarkId::new("unaligned", name), page, |bencher, page| {
            bencher.iter(|| pattern.suspects(100, black_box(&page[100..4000])));
        });
    }
    let equal = pattern.bytes().to_vec();
    group.bench_function("memcmp of a page", |bencher| {
        bencher.iter(|| black_box(&equal[..]) == black_box(&pattern.bytes()[..]));
    });
    group.finish();
    c.bench_function("derive", |bencher| bencher.iter(|| Pattern::derive(black_box(&[9; 32]))));
}

criterion_group!(benches, suspects);
criterion_main!(benches);
