//! Progress: submits requests to the device and reaps completions, in the thread that calls [`Engine::advance`].

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use terrace_faults::{Faults, StorageOperation};
use terrace_sync::{Condvar, Mutex};

use crate::config::BaselineConfig;
use crate::core::{Core, Work};
use crate::device::{Device, Injected};
use crate::error::BaselineError;
use crate::job::Job;
use crate::pool::Pool;
use crate::workers::Workers;

/// Requests submitted at a time.
const DEVICE_DEPTH: u32 = 512;
/// How long [`Engine::when`] waits for a signal before it polls the device again.
const PATIENCE: Duration = Duration::from_micros(200);

/// The state that all threads share.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) pool: Arc<Pool>,
    pub(crate) core: Mutex<Core>,
    /// Signalled when accesses have ended.
    ended: Condvar,
    device: Mutex<Box<dyn Device>>,
    /// Threads for jobs that may wait for the disk.
    pub(crate) workers: Workers,
    /// The device's descriptor.
    pub(crate) descriptor: OwnedFd,
    /// The core's count, read without its lock.
    pub(crate) in_flight: Arc<AtomicUsize>,
    dram_bytes: u64,
    /// The fault plan, if it covers storage.
    faults: Option<Arc<Faults>>,
}

impl Engine {
    pub(crate) fn open(config: &BaselineConfig) -> Result<Engine, BaselineError> {
        let pool = Pool::new(config.pool_bytes() as usize).map_err(BaselineError::system("map buffers"))?;
        let mut device =
            config.device.open(DEVICE_DEPTH).map_err(BaselineError::system("set up io_uring"))?;
        let faults = config.faults.clone().filter(|faults| faults.plan().has_storage_faults());
        if let Some(faults) = &faults {
            let injected = Injected::new(device, faults.clone());
            device = Box::new(injected.map_err(BaselineError::system("set up a timer for faults"))?);
        }
        let descriptor = device.descriptor().try_clone_to_owned();
        let descriptor = descriptor.map_err(BaselineError::system("duplicate a descriptor"))?;
        let core = Core::new(faults.is_some());
        Ok(Engine {
            pool,
            in_flight: core.in_flight.clone(),
            core: Mutex::new(core),
            ended: Condvar::new(),
            device: Mutex::new(device),
            workers: Workers::default(),
            descriptor,
            dram_bytes: config.dram_bytes,
            faults,
        })
    }

    /// Applies the fault plan to an operation that bypasses the device: sleeps for the plan's delay, then returns its
    /// error.
    ///
    /// # Errors
    /// The error that the plan gives.
    pub(crate) fn suffer(&self, operation: StorageOperation) -> std::io::Result<()> {
        let Some(faults) = &self.faults else { return Ok(()) };
        let fate = faults.storage(operation);
        std::thread::sleep(fate.delay);
        fate.error.map_or(Ok(()), |error| Err(std::io::Error::from_raw_os_error(error)))
    }

    /// Reserves a part of the budget.
    ///
    /// # Errors
    /// `NoRoom`.
    pub(crate) fn reserve(&self, bytes: u64) -> Result<(), BaselineError> {
        let mut core = self.core.lock();
        let room = self.dram_bytes - core.locked_bytes;
        if bytes > room {
            return Err(BaselineError::NoRoom { region: bytes, room });
        }
        core.locked_bytes += bytes;
        Ok(())
    }

    /// Gives a part of the budget back.
    pub(crate) fn release(&self, bytes: u64) {
        self.core.lock().locked_bytes -= bytes;
    }

    /// Submits queued requests and handles completions. Returns whether any request completed.
    pub(crate) fn advance(&self) -> bool {
        let mut progress = false;
        // Relaxed: each thread that queues requests calls this afterwards, and reads its own count.
        while self.in_flight.load(Ordering::Relaxed) > 0 {
            // Another thread is submitting. It reads the queue again after it has released the device, and so submits
            // what this thread queued before.
            let Some(mut device) = self.device.try_lock() else { break };
            let mut requests = std::mem::take(&mut self.core.lock().queue);
            let mut done = Vec::new();
            device.submit(&mut requests);
            device.reap(&mut done);
            drop(device);
            self.in_flight.fetch_sub(done.len(), Ordering::Relaxed);
            progress |= !done.is_empty();
            let mut work = Work::default();
            let more = {
                let mut core = self.core.lock();
                for completion in done {
                    core.request_done(completion, &mut work);
                }
                !core.queue.is_empty()
            };
            if !self.settle(work) && !more {
                break;
            }
        }
        progress
    }

    /// Carries out what the core returned. Returns whether that queued requests.
    pub(crate) fn settle(&self, mut work: Work) -> bool {
        let mut more = false;
        loop {
            if !work.ended.is_empty() {
                self.ended.notify_all();
                work.ended.clear();
            }
            for waker in work.wakers.drain(..) {
                waker();
            }
            let given_back = work.slow_jobs.drain(..).filter_map(|job| self.workers.hand_over(job));
            work.jobs.extend(given_back);
            if work.jobs.is_empty() {
                return more;
            }
            let outcomes: Vec<_> = work.jobs.drain(..).map(Job::run).collect();
            let mut core = self.core.lock();
            for outcome in outcomes {
                core.job_done(outcome, &mut work);
            }
            more |= !core.queue.is_empty();
        }
    }

    /// Polls the device until `condition` holds.
    pub(crate) fn when(&self, condition: impl Fn(&Core) -> bool) {
        loop {
            self.advance();
            let mut core = self.core.lock();
            if condition(&core) {
                return;
            }
            // Completions signal. The timeout is for requests that another thread submitted and this one has to reap.
            self.ended.wait_for(&mut core, PATIENCE);
        }
    }
}
