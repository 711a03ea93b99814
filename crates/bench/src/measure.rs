//! One measurement: the concurrent client threads of a workload.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::application::{Application, Store};
use crate::ledger::Ledger;
use crate::target::{Connect, TargetError};
use crate::worker::{Schedule, WorkError, Worker};
use crate::workload::{Measured, Workload};

/// The times at which the caller samples the server's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleTime {
    /// The end of the warm-up.
    Begin,
    /// The end of the measured time.
    End,
}

/// Runs the workload. `epoch` is higher than in all earlier measurements on the same region, and not 0. `sample` is called
/// while the clients run.
pub fn measure(
    workload: &Workload,
    epoch: u16,
    connect: &dyn Connect,
    sample: &mut dyn FnMut(SampleTime),
) -> Result<Measured, WorkError> {
    let ledger =
        Ledger::new(workload.key_count(), workload.access_bytes as u64, workload.threads as u64, epoch);
    let store =
        (workload.application == Application::KeyValueStore).then(|| Store::new(workload.region_bytes));
    let (stop, connected) = (AtomicBool::new(false), Barrier::new(workload.threads + 1));
    let run_thread = |thread: usize| -> Result<Measured, WorkError> {
        let mut outcome = None;
        let connection = connect.with_target(thread, workload.depth, workload.access_bytes, &mut |target| {
            let worker = Worker::new(workload, &ledger, store.as_ref(), thread, target);
            // The schedule begins when all threads have connected or failed.
            connected.wait();
            let measured = worker.run(Schedule::new(workload, Instant::now()), &stop);
            stop.fetch_or(measured.is_err(), Ordering::Relaxed);
            outcome = Some(measured);
        });
        match (outcome, connection) {
            (Some(outcome), _) => outcome,
            (None, connection) => {
                stop.store(true, Ordering::Relaxed);
                connected.wait();
                Err(WorkError::Connect {
                    thread,
                    error: connection.err().unwrap_or(TargetError("the thread did not run".into())),
                })
            }
        }
    };
    let outcomes: Vec<Result<Measured, WorkError>> = std::thread::scope(|scope| {
        let run_thread = &run_thread;
        let threads: Vec<_> =
            (0..workload.threads).map(|thread| scope.spawn(move || run_thread(thread))).collect();
        connected.wait();
        let schedule = Schedule::new(workload, Instant::now());
        for (time, at) in [(SampleTime::Begin, schedule.begin), (SampleTime::End, schedule.end)] {
            sleep_until(at, &stop);
            sample(time);
        }
        threads.into_iter().map(|thread| thread.join().expect("a client thread panicked")).collect()
    });
    let mut sum = Measured::empty(workload.measured);
    for outcome in outcomes {
        sum.add(&outcome?);
    }
    Ok(sum)
}

/// Sleeps in slices, so that it ends soon after a failure.
fn sleep_until(at: Instant, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        match at.checked_duration_since(Instant::now()) {
            None | Some(Duration::ZERO) => return,
            Some(left) => std::thread::sleep(left.min(Duration::from_millis(50))),
        }
    }
}
