//! Progress: whoever has time takes requests to the device and brings what is done back.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use terrace_faults::{Faults, StorageOperation};
use terrace_sync::{Condvar, Mutex};

use crate::config::TierConfig;
use crate::core::{Core, Work};
use crate::device::{Device, Injected};
use crate::error::TierError;
use crate::job::Job;
use crate::pool::Pool;
use crate::residency::Departure;
use crate::workers::Workers;

/// Requests that are submitted at a time.
const DEVICE_DEPTH: u32 = 512;
/// How long whoever waits for accesses to end sleeps before it makes progress itself again.
const PATIENCE: Duration = Duration::from_micros(200);

/// What the threads that make progress share.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) pool: Arc<Pool>,
    pub(crate) core: Mutex<Core>,
    /// Units that other processes keep from leaving. Locked after `core`.
    pub(crate) set_aside: Mutex<Vec<Departure>>,
    /// Signalled when parts have ended.
    ended: Condvar,
    device: Mutex<Box<dyn Device>>,
    /// For what may wait for the disk.
    pub(crate) workers: Workers,
    /// The device's.
    pub(crate) descriptor: OwnedFd,
    /// Of the core: looked at without its lock.
    pub(crate) in_flight: Arc<AtomicUsize>,
    pub(crate) dram_bytes: u64,
    /// Takes whatever is written to it.
    pub(crate) null: File,
    /// A plan that troubles storage.
    faults: Option<Arc<Faults>>,
}

impl Engine {
    pub(crate) fn open(config: &TierConfig) -> Result<Engine, TierError> {
        let pool = Pool::new(config.pool_bytes() as usize).map_err(TierError::system("map buffers"))?;
        let mut device = config.device.open(DEVICE_DEPTH).map_err(TierError::system("set up io_uring"))?;
        let faults = config.faults.clone().filter(|faults| faults.plan().troubles_storage());
        if let Some(faults) = &faults {
            let injected = Injected::new(device, faults.clone());
            device = Box::new(injected.map_err(TierError::system("set up a timer for faults"))?);
        }
        let descriptor = device.descriptor().try_clone_to_owned();
        let descriptor = descriptor.map_err(TierError::system("duplicate a descriptor"))?;
        let null = File::options().write(true).open("/dev/null");
        let null = null.map_err(TierError::system("open /dev/null"))?;
        let core = Core::new(faults.is_some());
        Ok(Engine {
            pool,
            in_flight: core.in_flight.clone(),
            core: Mutex::new(core),
            set_aside: Mutex::default(),
            ended: Condvar::new(),
            device: Mutex::new(device),
            workers: Workers::default(),
            descriptor,
            dram_bytes: config.dram_bytes,
            null,
            faults,
        })
    }

    /// Suffers what the fault plan has for an operation that no device carries out: waits, and may fail.
    ///
    /// # Errors
    /// The plan's.
    pub(crate) fn suffer(&self, operation: StorageOperation) -> std::io::Result<()> {
        let Some(faults) = &self.faults else { return Ok(()) };
        let fate = faults.storage(operation);
        std::thread::sleep(fate.delay);
        fate.error.map_or(Ok(()), |error| Err(std::io::Error::from_raw_os_error(error)))
    }

    /// Takes requests to the device, and ends what is done. Returns whether anything was.
    pub(crate) fn advance(&self) -> bool {
        let mut progress = false;
        // Whoever queues requests advances afterwards: it sees its own.
        while self.in_flight.load(Ordering::Relaxed) > 0 {
            // Another thread is here. It looks at the queue once more after it has left the device, so that what was
            // queued before we found it here is taken along.
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

    /// Does what was found to do under the core's lock. Returns whether that made requests.
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

    /// Runs `change` under the core's lock when `condition` holds. Makes progress meanwhile.
    pub(crate) fn when<R>(
        &self,
        mut condition: impl FnMut(&mut Core) -> bool,
        change: impl FnOnce(&mut Core) -> R,
    ) -> R {
        loop {
            self.advance();
            let mut core = self.core.lock();
            if condition(&mut core) {
                return change(&mut core);
            }
            // What ends meanwhile signals; what another thread has submitted may be ours to reap.
            self.ended.wait_for(&mut core, PATIENCE);
        }
    }
}
