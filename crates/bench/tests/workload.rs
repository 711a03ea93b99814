//! Measurements on memory of this process.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use terrace_bench::application::{Application, Table};
use terrace_bench::content::Stamp;
use terrace_bench::keys::Distribution;
use terrace_bench::measure::measure;
use terrace_bench::target::{Body, Completion, Connect, MemoryTarget, SharedBytes, Target, TargetError};
use terrace_bench::worker::WorkError;
use terrace_bench::workload::Workload;

const REGION: usize = 1 << 20;

fn workload() -> Workload {
    Workload {
        application: Application::Blocks,
        region_bytes: REGION as u64,
        access_bytes: 4096,
        write_percent: 50,
        distribution: Distribution::Zipf,
        theta: 0.99,
        threads: 2,
        depth: 4,
        verify: true,
        switch_after: None,
        warm_up: Duration::from_millis(20),
        measured: Duration::from_millis(200),
    }
}

#[test]
fn everything_is_counted_and_verified() {
    let region = MemoryTarget::region(REGION, Application::Blocks);
    let measured = measure(&workload(), 1, &region, &mut |_| {}).unwrap();
    assert!(measured.reads > 0 && measured.writes > 0);
    assert_eq!(measured.timeline.iter().sum::<u64>(), measured.reads + measured.writes);
    assert_eq!(measured.read_latencies.len(), measured.reads);
    assert!(measured.verified.granules >= measured.reads * 64);
    // The next measurement accepts the content that this one left.
    measure(&Workload { access_bytes: 256, ..workload() }, 2, &region, &mut |_| {}).unwrap();
}

#[test]
fn corruption_in_the_region_is_detected() {
    let region = MemoryTarget::region(REGION, Application::Blocks);
    let middle = REGION / 2 + 17;
    region.lock().unwrap_or_else(PoisonError::into_inner)[middle] ^= 1;
    let read_all = Workload { write_percent: 0, distribution: Distribution::Sequential, ..workload() };
    assert!(matches!(measure(&read_all, 1, &region, &mut |_| {}), Err(WorkError::Corrupt(_))));
    // Without verification, corruption is not detected.
    measure(&Workload { verify: false, ..read_all }, 1, &region, &mut |_| {}).unwrap();
}

/// The defect of a faulty target.
#[derive(Clone, Copy)]
enum Fault {
    LosesWrites,
    BreaksConnection,
    StrayCompletion,
    FailsAccesses,
}

struct Faulty<'a> {
    inner: &'a mut dyn Target,
    fault: Fault,
    countdown: u32,
}

impl Faulty<'_> {
    fn is_due(&mut self) -> bool {
        self.countdown = self.countdown.saturating_sub(1);
        self.countdown == 0
    }
}

impl Target for Faulty<'_> {
    fn read(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
        self.inner.read(offset, slot, len, tag)
    }

    fn write(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
        match (self.fault, self.is_due()) {
            // The write is acknowledged, but not executed.
            (Fault::LosesWrites, true) => self.inner.write(offset, slot, 0, tag),
            _ => self.inner.write(offset, slot, len, tag),
        }
    }

    fn find_file(&mut self, slot: usize, tag: u64) -> Result<(), TargetError> {
        self.inner.find_file(slot, tag)
    }

    fn commit(&mut self, offset: u64, len: usize, tag: u64) -> Result<(), TargetError> {
        self.inner.commit(offset, len, tag)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), TargetError> {
        self.inner.poll(done)?;
        match (self.fault, self.is_due()) {
            (Fault::StrayCompletion, true) => done.push(Completion { tag: 99, outcome: Ok(()) }),
            (Fault::FailsAccesses, true) if !done.is_empty() => {
                done[0].outcome = Err(TargetError("remote access error".into()));
            }
            (Fault::BreaksConnection, true) => return Err(TargetError("the connection is gone".into())),
            _ => {}
        }
        Ok(())
    }

    fn store(&mut self, slot: usize, bytes: &[u8]) -> Result<(), TargetError> {
        self.inner.store(slot, bytes)
    }

    fn load(&mut self, slot: usize, bytes: &mut [u8]) -> Result<(), TargetError> {
        self.inner.load(slot, bytes)
    }
}

struct FaultyRegion(SharedBytes, Fault);

impl Connect for FaultyRegion {
    fn with_target(
        &self,
        thread: usize,
        slots: usize,
        slot_bytes: usize,
        body: Body<'_>,
    ) -> Result<(), TargetError> {
        self.0.with_target(thread, slots, slot_bytes, &mut |inner| {
            body(&mut Faulty { inner, fault: self.1, countdown: 50 });
        })
    }
}

#[test]
fn a_lost_write_is_detected() {
    let region = FaultyRegion(MemoryTarget::region(1 << 16, Application::Blocks), Fault::LosesWrites);
    let few_keys = Workload { region_bytes: 1 << 16, ..workload() };
    match measure(&few_keys, 1, &region, &mut |_| {}) {
        Err(WorkError::Corrupt(corruption)) => {
            assert!(corruption.to_string().contains("must be"), "{corruption}")
        }
        other => panic!("{:?}", other.map(|measured| measured.reads)),
    }
}

#[test]
fn each_failure_of_the_target_has_its_error() {
    let outcome = |fault| {
        measure(
            &workload(),
            1,
            &FaultyRegion(MemoryTarget::region(REGION, Application::Blocks), fault),
            &mut |_| {},
        )
        .map(|_| ())
    };
    assert!(matches!(outcome(Fault::StrayCompletion), Err(WorkError::Stray(99))));
    assert!(matches!(outcome(Fault::BreaksConnection), Err(WorkError::Poll(_))));
    let message = outcome(Fault::FailsAccesses).unwrap_err().to_string();
    assert!(message.contains("4096 bytes at offset") && message.contains("remote access error"), "{message}");
}

#[test]
fn a_thread_that_cannot_connect_ends_the_measurement() {
    struct OneConnection;
    impl Connect for OneConnection {
        fn with_target(&self, thread: usize, _: usize, _: usize, body: Body<'_>) -> Result<(), TargetError> {
            match thread {
                0 => {
                    body(&mut MemoryTarget::new(MemoryTarget::region(REGION, Application::Blocks), 4, 4096));
                    Ok(())
                }
                _ => Err(TargetError("no server".into())),
            }
        }
    }
    let long = Workload { measured: Duration::from_secs(600), ..workload() };
    assert!(matches!(
        measure(&long, 1, &OneConnection, &mut |_| {}),
        Err(WorkError::Connect { thread: 1, .. })
    ));
}

fn store_workload() -> Workload {
    Workload { application: Application::KeyValueStore, access_bytes: 128, write_percent: 0, ..workload() }
}

fn store_region() -> SharedBytes {
    MemoryTarget::region(REGION, Application::KeyValueStore)
}

#[test]
fn each_key_of_a_store_is_found_and_verified() {
    let all = Workload { distribution: Distribution::Sequential, threads: 1, ..store_workload() };
    let measured = measure(&all, 1, &store_region(), &mut |_| {}).unwrap();
    assert!(measured.reads > 0 && measured.lookups > 0);
    assert_eq!(measured.writes, 0);
    // The warm-up is verified, too. A key and its value have two granules each, as have the keys of the wrong leaf.
    assert!(measured.verified.granules >= 4 * measured.reads.max(Table::new(REGION as u64).key_count()));
    let per_read = measured.lookups as f64 / measured.reads as f64;
    assert!((0.99..1.3).contains(&per_read), "{per_read} READs of keys for a READ of a value");
}

#[test]
fn wrong_keys_and_values_are_detected() {
    let (value, keys) = (Table::value_offset(100) as usize, Table::keys_offset(Table::leaf_of(100)) as usize);
    let all = Workload { distribution: Distribution::Sequential, ..store_workload() };
    for (at, expected) in [(keys, "are not the keys of leaf 6"), (value, "are not the value of key 0x")] {
        let region = store_region();
        region.lock().unwrap_or_else(PoisonError::into_inner)[at + 3] ^= 1;
        let error = measure(&all, 1, &region, &mut |_| {}).unwrap_err();
        assert!(matches!(error, WorkError::Table(_)) && error.to_string().contains(expected), "{error}");
    }
    // Without verification of all bytes a lookup fails that does not find its key.
    let region = store_region();
    region.lock().unwrap_or_else(PoisonError::into_inner)[keys + 4 * 8] ^= 1;
    let error = measure(&Workload { verify: false, ..all }, 1, &region, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("is not in leaf 6"), "{error}");
}

#[test]
fn a_store_is_not_found_in_other_content() {
    let blocks = MemoryTarget::region(REGION, Application::Blocks);
    assert!(matches!(measure(&store_workload(), 1, &blocks, &mut |_| {}), Err(WorkError::Table(_))));
}

#[test]
fn accesses_to_a_file_are_to_the_address_that_was_found() {
    /// Finds the file at another offset than it is.
    struct Displaced<'a>(&'a mut dyn Target, u64);
    impl Target for Displaced<'_> {
        fn read(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
            self.0.read(offset, slot, len, tag)
        }

        fn write(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
            self.0.write(offset, slot, len, tag)
        }

        fn find_file(&mut self, slot: usize, tag: u64) -> Result<(), TargetError> {
            self.0.find_file(slot, tag)?;
            self.0.store(slot, &self.1.to_le_bytes())
        }

        fn commit(&mut self, offset: u64, len: usize, tag: u64) -> Result<(), TargetError> {
            self.0.commit(offset, len, tag)
        }

        fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), TargetError> {
            self.0.poll(done)
        }

        fn store(&mut self, slot: usize, bytes: &[u8]) -> Result<(), TargetError> {
            self.0.store(slot, bytes)
        }

        fn load(&mut self, slot: usize, bytes: &mut [u8]) -> Result<(), TargetError> {
            self.0.load(slot, bytes)
        }
    }
    struct DisplacedRegion(SharedBytes, u64);
    impl Connect for DisplacedRegion {
        fn with_target(
            &self,
            thread: usize,
            slots: usize,
            slot_bytes: usize,
            body: Body<'_>,
        ) -> Result<(), TargetError> {
            self.0.with_target(thread, slots, slot_bytes, &mut |inner| body(&mut Displaced(inner, self.1)))
        }
    }
    let outcome = |offset, workload: &Workload| {
        let region = MemoryTarget::region(REGION, Application::FileSystem);
        measure(workload, 1, &DisplacedRegion(region, offset), &mut |_| {})
    };
    let files = Workload { application: Application::FileSystem, ..workload() };
    let measured = outcome(0, &files).unwrap();
    assert!(measured.reads > 0 && measured.writes > 0 && measured.verified.granules > 0);
    let accesses = measured.reads + measured.writes;
    // Some lookups were before the measured time, or their accesses after it.
    let in_flight = (files.threads * files.depth) as u64;
    assert!(measured.lookups.abs_diff(accesses) <= in_flight, "{} for {accesses}", measured.lookups);
    let reads = Workload { write_percent: 0, ..files };
    let error = outcome(4096, &reads).unwrap_err();
    assert!(matches!(error, WorkError::Corrupt(_)), "{error}");
    let error = outcome(u64::MAX - 4096, &reads).unwrap_err();
    assert!(error.to_string().contains("outside of the region"), "{error}");
}

#[test]
fn content_begins_with_the_initial_stamp() {
    let region = MemoryTarget::region(REGION, Application::Blocks);
    let bytes = region.lock().unwrap();
    assert_eq!(terrace_bench::content::stamp_of(&bytes[640..704], 640), Some(Stamp::INITIAL));
}

/// Completes each access after a delay.
struct Slow<'a> {
    inner: &'a mut dyn Target,
    waiting: Vec<(Instant, Completion)>,
}

const DELAY: Duration = Duration::from_millis(3);

impl Target for Slow<'_> {
    fn read(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
        self.inner.read(offset, slot, len, tag)
    }

    fn write(&mut self, offset: u64, slot: usize, len: usize, tag: u64) -> Result<(), TargetError> {
        self.inner.write(offset, slot, len, tag)
    }

    fn find_file(&mut self, slot: usize, tag: u64) -> Result<(), TargetError> {
        self.inner.find_file(slot, tag)
    }

    fn commit(&mut self, offset: u64, len: usize, tag: u64) -> Result<(), TargetError> {
        self.inner.commit(offset, len, tag)
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), TargetError> {
        let mut ended = Vec::new();
        self.inner.poll(&mut ended)?;
        self.waiting.extend(ended.into_iter().map(|completion| (Instant::now() + DELAY, completion)));
        let now = Instant::now();
        while self.waiting.first().is_some_and(|(due, _)| *due <= now) {
            done.push(self.waiting.remove(0).1);
        }
        Ok(())
    }

    fn store(&mut self, slot: usize, bytes: &[u8]) -> Result<(), TargetError> {
        self.inner.store(slot, bytes)
    }

    fn load(&mut self, slot: usize, bytes: &mut [u8]) -> Result<(), TargetError> {
        self.inner.load(slot, bytes)
    }
}

struct SlowRegion(SharedBytes);

impl Connect for SlowRegion {
    fn with_target(
        &self,
        thread: usize,
        slots: usize,
        slot_bytes: usize,
        body: Body<'_>,
    ) -> Result<(), TargetError> {
        self.0.with_target(thread, slots, slot_bytes, &mut |inner| {
            body(&mut Slow { inner, waiting: Vec::new() })
        })
    }
}

#[test]
fn no_latency_is_shorter_than_the_delay_of_the_target() {
    let region = SlowRegion(MemoryTarget::region(REGION, Application::Blocks));
    let measured = measure(&workload(), 1, &region, &mut |_| {}).unwrap();
    let least = DELAY.as_nanos() as u64;
    for latencies in [&measured.read_latencies, &measured.write_latencies] {
        // The histogram has a precision of three digits.
        assert!(latencies.min() >= least - least / 500, "{} ns", latencies.min());
        assert!(latencies.value_at_quantile(0.5) >= latencies.min());
    }
}
