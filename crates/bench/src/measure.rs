//! One measurement: all client threads of a workload, side by side.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::ledger::Ledger;
use crate::target::Connect;
use crate::worker::{Schedule, WorkError, Worker};
use crate::workload::{Measured, Workload};

/// Runs the workload. `epoch` is higher than in all measurements before on the same region, and not 0.
pub fn measure(workload: &Workload, epoch: u16, connect: &dyn Connect) -> Result<Measured, WorkError> {
    let ledger =
        Ledger::new(workload.key_count(), workload.access_bytes as u64, workload.threads as u64, epoch);
    let (stop, connected) = (AtomicBool::new(false), Barrier::new(workload.threads));
    let work = |thread: usize| -> Result<Measured, WorkError> {
        let worker = Worker::new(workload, &ledger, thread, connect);
        // Connecting takes longer for some; the time that counts begins when everybody is there, also those who failed.
        connected.wait();
        let outcome = worker.and_then(|worker| worker.run(Schedule::new(workload, Instant::now()), &stop));
        if outcome.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        outcome
    };
    let outcomes: Vec<Result<Measured, WorkError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workload.threads)
            .map(|thread| {
                let work = &work;
                scope.spawn(move || work(thread))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a client thread panicked")).collect()
    });
    let mut sum = Measured::empty(workload.measured);
    for outcome in outcomes {
        sum.add(&outcome?);
    }
    Ok(sum)
}
