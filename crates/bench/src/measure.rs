//! One measurement: all client threads of a workload, at the same time.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::ledger::Ledger;
use crate::target::{Connect, TargetError};
use crate::worker::{Schedule, WorkError, Worker};
use crate::workload::{Measured, Workload};

/// The times at which the caller can read the server's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The end of the warm-up.
    Begin,
    /// The end of the measured time.
    End,
}

/// Runs the workload. `epoch` is not 0, and higher than in all earlier measurements on the same region. `observe` is
/// called while the clients work.
pub fn measure(
    workload: &Workload,
    epoch: u16,
    connect: &dyn Connect,
    observe: &mut dyn FnMut(Moment),
) -> Result<Measured, WorkError> {
    let ledger =
        Ledger::new(workload.key_count(), workload.access_bytes as u64, workload.threads as u64, epoch);
    let (stop, connected) = (AtomicBool::new(false), Barrier::new(workload.threads + 1));
    let work = |thread: usize| -> Result<Measured, WorkError> {
        let mut outcome = None;
        let made = connect.with_target(thread, workload.depth, workload.access_bytes, &mut |target| {
            let worker = Worker::new(workload, &ledger, thread, target);
            // Connecting takes some threads longer: the schedule begins once all threads have connected or failed.
            connected.wait();
            let worked = worker.run(Schedule::new(workload, Instant::now()), &stop);
            stop.fetch_or(worked.is_err(), Ordering::Relaxed);
            outcome = Some(worked);
        });
        match (outcome, made) {
            (Some(outcome), _) => outcome,
            (None, made) => {
                stop.store(true, Ordering::Relaxed);
                connected.wait();
                Err(WorkError::Connect {
                    thread,
                    error: made.err().unwrap_or(TargetError("nothing was done".into())),
                })
            }
        }
    };
    let outcomes: Vec<Result<Measured, WorkError>> = std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..workload.threads).map(|thread| scope.spawn(move || work(thread))).collect();
        connected.wait();
        let schedule = Schedule::new(workload, Instant::now());
        for (moment, at) in [(Moment::Begin, schedule.begin), (Moment::End, schedule.end)] {
            sleep_until(at, &stop);
            observe(moment);
        }
        threads.into_iter().map(|thread| thread.join().expect("a client thread panicked")).collect()
    });
    let mut sum = Measured::empty(workload.measured);
    for outcome in outcomes {
        sum.add(&outcome?);
    }
    Ok(sum)
}

/// Sleeps in slices, so that a failure ends it soon.
fn sleep_until(at: Instant, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        match at.checked_duration_since(Instant::now()) {
            None | Some(Duration::ZERO) => return,
            Some(left) => std::thread::sleep(left.min(Duration::from_millis(50))),
        }
    }
}
