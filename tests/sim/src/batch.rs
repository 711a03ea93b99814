//! Runs many seeds on several threads.

use std::cell::Cell;
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::thread;
use std::time::Duration;

use terrace_sync::Mutex;

use crate::tally::Tally;
use crate::world::Failure;

/// What is simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// The devices, by all verbs.
    #[default]
    Verbs,
    /// The NP-RDMA protocol on devices that know nothing of absence.
    NpRdma,
}

impl Model {
    /// Runs one seed, optionally with a trace on standard output.
    ///
    /// # Errors
    /// When the run deviates from the reference model or the specification.
    pub fn run(self, seed: u64, trace: bool) -> Result<Tally, Failure> {
        match self {
            Model::Verbs => crate::run(seed, trace),
            Model::NpRdma => crate::np::run(seed, trace),
        }
    }

    /// The options of `terrace-sim` for it.
    fn options(self) -> &'static str {
        match self {
            Model::Verbs => "",
            Model::NpRdma => "--np ",
        }
    }
}

/// Seeds to run.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// What is simulated.
    pub model: Model,
    /// The first seed.
    pub first: u64,
    /// The number of seeds.
    pub count: u64,
    /// The number of threads; `None` for one per CPU.
    pub threads: Option<NonZeroUsize>,
}

/// A batch's progress.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The number of seeds that have been run.
    pub done: u64,
    /// The number of seeds of the batch.
    pub total: u64,
}

#[derive(Debug)]
pub struct FailedSeed {
    pub model: Model,
    pub seed: u64,
    /// A description of the failure.
    pub reason: String,
}

impl fmt::Display for FailedSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FailedSeed { model, seed, reason } = self;
        let options = model.options();
        write!(
            f,
            "seed {seed}: {reason}\nreplay it with: cargo run --release -p terrace-sim -- {options}--seed {seed}"
        )
    }
}

/// State that the threads share.
struct Shared {
    batch: Batch,
    next: AtomicU64,
    done: AtomicU64,
    /// The seed that each thread runs, and the reports since its start.
    running: Vec<Mutex<Option<(u64, u32)>>>,
    tally: Mutex<Tally>,
    failed: Mutex<Option<FailedSeed>>,
}

/// The interval between two progress reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// A seed, which should take milliseconds, is stuck after this number of reports. The thread of a device that never
/// finishes cannot be stopped. The unit is reports, not seconds, because a machine or a process can be suspended.
const SEED_REPORTS_MAX: u32 = 600;

thread_local! {
    /// The seed that this thread runs, for the message of a panic.
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

impl Batch {
    /// Runs the seeds until one fails. Calls `report` at `REPORT_INTERVAL`.
    ///
    /// # Errors
    /// The lowest seed that failed.
    pub fn run(self, mut report: impl FnMut(&Progress)) -> Result<Tally, FailedSeed> {
        name_seed_in_panics();
        let threads =
            self.threads.or_else(|| thread::available_parallelism().ok()).map_or(1, NonZeroUsize::get);
        let shared = Arc::new(Shared {
            batch: self,
            next: AtomicU64::new(self.first),
            done: AtomicU64::new(0),
            running: (0..threads).map(|_| Mutex::default()).collect(),
            tally: Mutex::default(),
            failed: Mutex::default(),
        });
        let spawn = |index| {
            let shared = shared.clone();
            thread::spawn(move || shared.work(index))
        };
        let workers: Vec<_> = (0..threads).map(spawn).collect();
        while !workers.iter().all(thread::JoinHandle::is_finished) {
            thread::sleep(REPORT_INTERVAL);
            report(&Progress { done: shared.done.load(Ordering::Relaxed), total: self.count });
            if let Some(seed) = shared.stuck_seed() {
                let limit = REPORT_INTERVAL * SEED_REPORTS_MAX;
                return Err(FailedSeed {
                    model: self.model,
                    seed,
                    reason: format!("no end after {limit:?}"),
                });
            }
        }
        let failed = shared.failed.lock().take();
        match failed {
            Some(failed) => Err(failed),
            None => Ok(shared.tally.lock().clone()),
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut tally = Tally::default();
        loop {
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if seed - self.batch.first >= self.batch.count || self.failed.lock().is_some() {
                break;
            }
            *self.running[index].lock() = Some((seed, 0));
            match run_caught(self.batch.model, seed) {
                Ok(counts) => tally.merge(&counts),
                Err(reason) => {
                    let mut failed = self.failed.lock();
                    if failed.as_ref().is_none_or(|failed| failed.seed > seed) {
                        *failed = Some(FailedSeed { model: self.batch.model, seed, reason });
                    }
                }
            }
            *self.running[index].lock() = None;
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        self.tally.lock().merge(&tally);
    }

    /// Counts a report. Returns the lowest seed that is stuck.
    fn stuck_seed(&self) -> Option<u64> {
        let stuck = |running: &Mutex<Option<(u64, u32)>>| {
            let mut running = running.lock();
            let (seed, reports) = running.as_mut()?;
            *reports += 1;
            (*reports > SEED_REPORTS_MAX).then_some(*seed)
        };
        self.running.iter().filter_map(stuck).min()
    }
}

/// Runs one seed. A panic is a failure in builds that unwind.
fn run_caught(model: Model, seed: u64) -> Result<Tally, String> {
    SEED.set(Some(seed));
    let result = catch_unwind(AssertUnwindSafe(|| model.run(seed, false)));
    SEED.set(None);
    match result {
        Ok(Ok(tally)) => Ok(tally),
        Ok(Err(Failure(reason))) => Err(reason),
        Err(_) => Err("a panic, whose message is printed above".into()),
    }
}

/// In a release build a panic ends the process, so its message must name the seed.
fn name_seed_in_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if let Some(seed) = SEED.get() {
                eprintln!("seed {seed} panics; replay it with: cargo run -p terrace-sim -- --seed {seed}");
            }
            before(info);
        }));
    });
}
