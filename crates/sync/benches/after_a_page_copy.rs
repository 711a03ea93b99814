//! The cost of locks and stores after a copy to memory that is not in the cache: `cargo bench -p terrace-sync`.
//!
//! Each variant copies pages to random offsets of 256 MiB, and runs other code after each copy. The variants alternate,
//! and the median of a variant's rounds is its result.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use terrace_sync::{BiasedMutex, Mutex, allow_bias};

const PAGE: usize = 4096;
const PAGES: usize = 64 << 10;
const ROUNDS: usize = 15;
const COPIES: usize = 20_000;

/// A name, and the code that runs after each copy.
type Variant<'a> = (&'static str, Box<dyn FnMut() + 'a>);

/// The time of one copy and of `after_copy`.
fn round(target: &mut [u8], source: &[u8], random: &mut u64, after_copy: &mut dyn FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..COPIES {
        // xorshift64
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        let at = (*random as usize % PAGES) * PAGE;
        black_box(&mut target[at..at + PAGE]).copy_from_slice(black_box(source));
        after_copy();
    }
    start.elapsed() / COPIES as u32
}

/// `count` stores to memory in the cache.
fn stores(count: usize) -> impl FnMut() {
    let words: Vec<_> = (0..64).map(AtomicU64::new).collect();
    move || {
        for word in words.iter().cycle().take(count) {
            word.store(black_box(7), Ordering::Relaxed);
        }
    }
}

fn main() {
    allow_bias();
    let (biased, ordinary) = (BiasedMutex::new(0u64), Mutex::new(0u64));
    let [mut few, mut few_more] = [stores(40), stores(40)];
    let mut variants: Vec<Variant<'_>> = vec![
        ("nothing", Box::new(|| ())),
        ("40 stores", Box::new(stores(40))),
        ("80 stores", Box::new(stores(80))),
        ("120 stores", Box::new(stores(120))),
        ("200 stores", Box::new(stores(200))),
        ("40 and an ordinary one, 4 times", {
            Box::new(|| {
                few();
                (0..4).for_each(|_| *ordinary.lock() += 1);
            })
        }),
        ("40 and a biased one, 4 times", {
            Box::new(|| {
                few_more();
                (0..4).for_each(|_| *biased.lock() += 1);
            })
        }),
    ];
    let (mut target, source) = (vec![1u8; PAGE * PAGES], vec![2u8; PAGE]);
    let mut random = 88_172_645_463_325_252;
    let mut times = vec![Vec::new(); variants.len()];
    for _ in 0..ROUNDS {
        for ((_, after_copy), times) in variants.iter_mut().zip(&mut times) {
            times.push(round(&mut target, &source, &mut random, after_copy.as_mut()));
        }
    }
    let medians: Vec<_> = times
        .iter_mut()
        .map(|times| {
            times.sort_unstable();
            times[ROUNDS / 2].as_nanos()
        })
        .collect();
    for ((name, _), median) in variants.iter().zip(&medians) {
        println!("{name:>30}  {median:5} ns ({:.2}x)", *median as f64 / medians[0] as f64);
    }
}
