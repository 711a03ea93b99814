//! What a miss costs beside a bare io_uring read: `cargo bench -p terrace-tier`. Random reads of 4 KiB, past the page
//! cache, so many under way at a time. `TERRACE_BENCH_DIR` says on which file system.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use io_uring::{IoUring, opcode, types};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_hostmem::HostRange;
use terrace_memory::{Pager, Waker};
use terrace_tier::{BackingFile, Tier, TierConfig};

const FILE_BYTES: u64 = 512 << 20;
const READ_BYTES: u64 = 4096;
const DEPTHS: [usize; 3] = [1, 16, 64];

/// A file of random bytes; removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        let dir = std::env::var("TERRACE_BENCH_DIR").unwrap_or("/tmp".into());
        let path = PathBuf::from(dir).join(format!("terrace-tier-bench-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        let block: Vec<u8> =
            (0..1 << 20).map(|index: u32| (index.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        for offset in (0..FILE_BYTES).step_by(block.len()) {
            file.write_all_at(&block, offset).unwrap();
        }
        file.sync_all().unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn offset(random: &mut StdRng) -> u64 {
    random.random_range(0..FILE_BYTES / READ_BYTES) * READ_BYTES
}

/// So many reads by io_uring alone.
fn bare(ring: &mut IoUring, file: &File, buffers: &mut [u8], depth: usize, count: u64) -> Duration {
    let mut random = StdRng::seed_from_u64(1);
    let mut push = |ring: &mut IoUring, slot: u64| {
        let target = buffers[slot as usize * READ_BYTES as usize..].as_mut_ptr();
        let read = opcode::Read::new(types::Fd(file.as_raw_fd()), target, READ_BYTES as u32);
        let read = read.offset(offset(&mut random)).build().user_data(slot);
        // SAFETY: the buffers and the file outlive the requests, all of which are waited for below.
        unsafe { ring.submission().push(&read) }.unwrap();
    };
    let start = Instant::now();
    let mut asked = (depth as u64).min(count);
    (0..asked).for_each(|slot| push(ring, slot));
    let mut done = 0;
    while done < count {
        ring.submit_and_wait(1).unwrap();
        let ended: Vec<u64> = ring.completion().map(|entry| entry.user_data()).collect();
        done += ended.len() as u64;
        for slot in ended {
            if asked < count {
                asked += 1;
                push(ring, slot);
            }
        }
    }
    start.elapsed()
}

/// So many misses of a region.
fn misses(tier: &Tier, pager: &dyn Pager, depth: usize, count: u64) -> Duration {
    let mut random = StdRng::seed_from_u64(1);
    let waker: Waker = Arc::new(|| {});
    let (mut under_way, mut asked, mut out) = (VecDeque::new(), 0, vec![0; READ_BYTES as usize]);
    let start = Instant::now();
    while asked < count || !under_way.is_empty() {
        while asked < count && under_way.len() < depth {
            let addr = pager.translation().range().addr + offset(&mut random);
            under_way.push_back(pager.read(HostRange { addr, len: READ_BYTES }, &waker).unwrap());
            asked += 1;
        }
        tier.advance();
        under_way.retain(|transfer| match transfer.outcome() {
            None => true,
            Some(outcome) => {
                outcome.unwrap();
                transfer.read(0, &mut out).unwrap();
                false
            }
        });
    }
    start.elapsed()
}

fn compare(criterion: &mut Criterion) {
    let scratch = Scratch::new();
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&scratch.0).unwrap();
    let tier = Tier::open(TierConfig::new(64 << 20)).unwrap();
    let backing = BackingFile::open(&scratch.0, None, true).unwrap();
    let region = tier.add(backing.source().unwrap()).unwrap();
    let mut ring = IoUring::new(64).unwrap();
    let mut space = vec![0; 65 * READ_BYTES as usize];
    let aligned = space.as_ptr().align_offset(READ_BYTES as usize);
    let mut group = criterion.benchmark_group("4 KiB miss");
    group.throughput(Throughput::Elements(1)).sample_size(20).measurement_time(Duration::from_secs(3));
    for depth in DEPTHS {
        group.bench_function(BenchmarkId::new("io_uring", depth), |bencher| {
            let buffers = &mut space[aligned..];
            bencher.iter_custom(|count| bare(&mut ring, &direct, buffers, depth, count));
        });
        group.bench_function(BenchmarkId::new("tier", depth), |bencher| {
            bencher.iter_custom(|count| misses(&tier, &*region, depth, count));
        });
    }
    group.finish();
    tier.remove(&region);
}

criterion_group!(benches, compare);
criterion_main!(benches);
