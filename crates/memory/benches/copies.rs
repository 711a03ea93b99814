//! The cost of fault safety and key checks against a plain `memcpy`: `cargo bench -p terrace-memory`.
//!
//! The contestants alternate in short rounds, and the best round of each counts, so that other load on the machine
//! hardly changes the ratios.

use std::hint::black_box;
use std::time::Instant;

use terrace_hostmem::{AtomicOp, fault};
use terrace_memory::{Access, AccessNeed, Accessor, Limits, RegionSpec, Registry};

const ROUNDS: usize = 300;
/// Approximate length of a round, in nanoseconds.
const ROUND_NS: f64 = 50_000.0;

/// A name, and the call to time.
type Contestant<'a> = (&'static str, Box<dyn FnMut() + 'a>);

/// Nanoseconds per call in one round.
fn round(count: usize, call: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..count {
        call();
    }
    start.elapsed().as_nanos() as f64 / count as f64
}

/// The best nanoseconds per call of each contestant.
fn race(contestants: &mut [Contestant<'_>]) -> Vec<f64> {
    let mut best = vec![f64::INFINITY; contestants.len()];
    let counts: Vec<usize> = contestants
        .iter_mut()
        .map(|(_, call)| (ROUND_NS / round(100, call.as_mut()).max(0.5)).ceil() as usize)
        .collect();
    for _ in 0..ROUNDS {
        for ((best, count), (_, call)) in best.iter_mut().zip(&counts).zip(contestants.iter_mut()) {
            *best = best.min(round(*count, call.as_mut()));
        }
    }
    best
}

/// Prints the times, and each one's ratio to the first.
fn report(title: &str, mut contestants: Vec<Contestant<'_>>) {
    let times = race(&mut contestants);
    print!("{title:>24}");
    for ((name, _), time) in contestants.iter().zip(&times) {
        print!("  {name} {time:8.1} ns ({:.2}x)", time / times[0]);
    }
    println!();
}

/// Memory that starts `offset` bytes into a page.
fn buffer(offset: usize) -> *mut u8 {
    let block = Box::leak(vec![1u8; 65536 + 8192].into_boxed_slice());
    let start = block.as_ptr().align_offset(4096) + offset;
    block[start..].as_mut_ptr()
}

/// Copies between the program's memory and a packet's payload, which lies 12 or 16 bytes behind the packet's start.
fn copies(registry: &Registry) {
    let who = Accessor::remote(1, 1);
    for (title, region_offset, packet_offset) in
        [("payload at 16", 0, 16), ("payload at 12", 0, 12), ("odd", 5, 12)]
    {
        let (region, packet) = (buffer(region_offset), buffer(packet_offset));
        let addr = region as u64;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let key = registry.register(&RegionSpec::new(1, addr, 65536, access)).expect("registration").key;
        // SAFETY: both buffers have 65536 bytes and live for ever; one thread uses them, one copy at a time.
        let out = |len| unsafe { std::slice::from_raw_parts_mut(packet, black_box(len)) };
        // SAFETY: as above.
        let data = |len| unsafe { std::slice::from_raw_parts(packet, black_box(len)) };
        // SAFETY: as above.
        let memcpy_in = |len| unsafe { packet.copy_to(black_box(region), black_box(len)) };
        // SAFETY: as above.
        let memcpy_out = |len| unsafe { region.copy_to(black_box(packet), black_box(len)) };
        // SAFETY: as above.
        let copy_to = |len| unsafe { fault::copy_to(black_box(addr), data(len)) }.expect("mapped");
        // SAFETY: as above.
        let copy_from = |len| unsafe { fault::copy_from(black_box(addr), out(len)) }.expect("mapped");
        let write = |len| registry.write(who, black_box(key), addr, data(len)).expect("permitted");
        let read = |len| registry.read(who, black_box(key), addr, out(len)).expect("permitted");
        for len in [8, 64, 256, 1024, 4096, 65536] {
            report(
                &format!("{title}, {len} B in"),
                vec![
                    ("memcpy", Box::new(|| memcpy_in(len))),
                    ("copy_to", Box::new(|| copy_to(len))),
                    ("write", Box::new(|| write(len))),
                ],
            );
            report(
                &format!("{title}, {len} B out"),
                vec![
                    ("memcpy", Box::new(|| memcpy_out(len))),
                    ("copy_from", Box::new(|| copy_from(len))),
                    ("read", Box::new(|| read(len))),
                ],
            );
        }
    }
}

/// Looks up and checks a key, alone and among many; also an atomic.
fn keys(registry: &Registry) {
    let addr = buffer(0) as u64;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let spec = RegionSpec::new(1, addr, 65536, access);
    let keys: Vec<u32> = (0..1024).map(|_| registry.register(&spec).expect("registration").key).collect();
    let who = Accessor::remote(1, 1);
    let check = |key| registry.check(who, black_box(key), addr, 4096, AccessNeed::Write).expect("permitted");
    let add = AtomicOp::FetchAdd { add: 1 };
    let mut turn = 0;
    let check_in_turn = || {
        turn = (turn + 1) % 1024;
        check(keys[turn]);
    };
    let fetch_and_add = || {
        black_box(registry.atomic(who, black_box(keys[0]), addr, add).expect("permitted"));
    };
    report(
        "key",
        vec![
            ("check", Box::new(|| check(keys[0]))),
            ("1024 keys in turn", Box::new(check_in_turn)),
            ("fetch and add", Box::new(fetch_and_add)),
        ],
    );
}

/// Registers and deregisters little and much memory.
fn registration(registry: &Registry) {
    let sparse = |len: u64| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, never touched.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len as usize, protection, flags, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED);
        RegionSpec::new(1, addr as u64, len, Access::LOCAL_WRITE)
    };
    let (small, large) = (sparse(4096), sparse(64 << 30));
    let register = |spec: &RegionSpec| {
        let key = registry.register(black_box(spec)).expect("registration").key;
        registry.deregister(key).expect("its end");
    };
    report(
        "register, deregister",
        vec![("4 KiB", Box::new(|| register(&small))), ("64 GiB", Box::new(|| register(&large)))],
    );
}

fn main() {
    let registry = Registry::new(Limits::default()).expect("signal handlers");
    copies(&registry);
    keys(&registry);
    registration(&registry);
}
