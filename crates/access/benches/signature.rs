//! The cost of comparing data with a signature page, relative to memcmp: `cargo bench -p terrace-access`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use terrace_access::signature::{CHUNK_BYTES, PAGE_BYTES, SignaturePage};

/// A page that differs from the signature page only at the end of each chunk: the longest comparison.
fn nearly_the_signature(signature: &SignaturePage) -> Vec<u8> {
    let mut page = signature.bytes().to_vec();
    page.iter_mut().skip(CHUNK_BYTES - 1).step_by(CHUNK_BYTES).for_each(|byte| *byte ^= 1);
    page
}

fn matches(c: &mut Criterion) {
    let signature = SignaturePage::derive(&[7; 32]);
    let mut group = c.benchmark_group("matches");
    group.throughput(Throughput::Bytes(PAGE_BYTES as u64));
    let pages =
        [("zeros", vec![0; PAGE_BYTES]), ("nearly the signature page", nearly_the_signature(&signature))];
    for (name, page) in &pages {
        group.bench_with_input(BenchmarkId::new("page", name), page, |bencher, page| {
            bencher.iter(|| signature.matches(0, black_box(page)));
        });
        group.bench_with_input(BenchmarkId::new("unaligned", name), page, |bencher, page| {
            bencher.iter(|| signature.matches(100, black_box(&page[100..4000])));
        });
    }
    let equal = signature.bytes().to_vec();
    group.bench_function("memcmp of a page", |bencher| {
        bencher.iter(|| black_box(&equal[..]) == black_box(&signature.bytes()[..]));
    });
    group.finish();
    c.bench_function("derive", |bencher| bencher.iter(|| SignaturePage::derive(black_box(&[9; 32]))));
}

criterion_group!(benches, matches);
criterion_main!(benches);
