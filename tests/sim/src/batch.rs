//! Many seeds, on several threads.

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

/// Seeds to run.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// The first seed.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Threads; `None`: as many as there are processors.
    pub threads: Option<NonZeroUsize>,
}

/// A batch's progress.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Seeds that have been run.
    pub done: u64,
    /// Seeds of the batch.
    pub total: u64,
}

#[derive(Debug)]
pub struct FailedSeed {
    pub seed: u64,
    /// What failed.
    pub why: String,
}

impl fmt::Display for FailedSeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FailedSeed { seed, why } = self;
        write!(f, "seed {seed}: {why}\nreplay it with: cargo run --release -p terrace-sim -- --seed {seed}")
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

/// How often the progress is reported.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Reports after which a running seed counts as stuck; a seed should take milliseconds. The thread of a device that
/// never finishes cannot be stopped, only abandoned. The unit is reports, not seconds, because a machine or a process
/// can be suspended.
const SEED_REPORTS_MAX: u32 = 600;

thread_local! {
    /// The seed that this thread runs, for a panic to name.
    static SEED: Cell<Option<u64>> = const { Cell::new(None) };
}

impl Batch {
    /// Runs the seeds until one fails. Calls `report` a few times a second.
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
                return Err(FailedSeed { seed, why: format!("has not ended after {limit:?}") });
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
            match run_caught(seed) {
                Ok(counts) => tally.merge(&counts),
                Err(why) => {
                    let mut failed = self.failed.lock();
                    if failed.as_ref().is_none_or(|failed| failed.seed > seed) {
                        *failed = Some(FailedSeed { seed, why });
                    }
                }
            }
            *self.running[index].lock() = None;
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        self.tally.lock().merge(&tally);
    }

    /// Called with each report.
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

/// Runs one seed. A panic counts as a failure where panics can be caught.
fn run_caught(seed: u64) -> Result<Tally, String> {
    SEED.set(Some(seed));
    let result = catch_unwind(AssertUnwindSafe(|| crate::run(seed, false)));
    SEED.set(None);
    match result {
        Ok(Ok(tally)) => Ok(tally),
        Ok(Err(Failure(why))) => Err(why),
        Err(_) => Err("a panic; see above".into()),
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
