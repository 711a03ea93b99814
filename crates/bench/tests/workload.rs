//! Measurements on memory of this process.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use terrace_bench::content::Stamp;
use terrace_bench::keys::Distribution;
use terrace_bench::measure::measure;
use terrace_bench::target::{Body, Completion, Connect, MemoryTarget, SharedBytes, Target, TargetError};
use terrace_bench::worker::WorkError;
use terrace_bench::workload::Workload;

const REGION: usize = 1 << 20;

fn workload() -> Workload {
    Workload {
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
    let region = MemoryTarget::region(REGION);
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
    let region = MemoryTarget::region(REGION);
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
    let region = FaultyRegion(MemoryTarget::region(1 << 16), Fault::LosesWrites);
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
        measure(&workload(), 1, &FaultyRegion(MemoryTarget::region(REGION), fault), &mut |_| {}).map(|_| ())
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
                    body(&mut MemoryTarget::new(MemoryTarget::region(REGION), 4, 4096));
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

#[test]
fn content_begins_with_the_initial_stamp() {
    let region = MemoryTarget::region(REGION);
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
    let region = SlowRegion(MemoryTarget::region(REGION));
    let measured = measure(&workload(), 1, &region, &mut |_| {}).unwrap();
    let least = DELAY.as_nanos() as u64;
    for latencies in [&measured.read_latencies, &measured.write_latencies] {
        // The histogram has a precision of three digits.
        assert!(latencies.min() >= least - least / 500, "{} ns", latencies.min());
        assert!(latencies.value_at_quantile(0.5) >= latencies.min());
    }
}
