//! A client thread: posts accesses up to its depth, measures latencies and verifies data.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::content::fill;
use crate::keys::Keys;
use crate::ledger::{Corruption, Ledger};
use crate::target::{Completion, Target, TargetError};
use crate::workload::{Measured, STEP, Workload};

/// The time after which an access counts as lost. It is checked after the end of the measured time.
const ACCESS_TIMEOUT: Duration = Duration::from_secs(20);

/// An error of a measurement.
#[derive(Debug, thiserror::Error)]
pub enum WorkError {
    /// The connection failed.
    #[error("client thread {thread} cannot connect: {error}")]
    Connect {
        /// The client thread.
        thread: usize,
        /// The error.
        error: TargetError,
    },
    /// An access was refused or failed.
    #[error("{operation} of {len} bytes at offset {offset}: {error}")]
    Access {
        /// READ or WRITE.
        operation: &'static str,
        /// The offset in the region.
        offset: u64,
        /// In bytes.
        len: usize,
        /// The error.
        error: TargetError,
    },
    /// The connection broke.
    #[error("polling for completions: {0}")]
    Poll(TargetError),
    /// Accesses have no completions.
    #[error("{count} accesses had not completed {} s after they were posted; one of them: {example}", ACCESS_TIMEOUT.as_secs())]
    Lost {
        /// The number of lost accesses.
        count: usize,
        /// The operation and the offset of one of them.
        example: String,
    },
    /// A completion has the tag of no access in flight.
    #[error("a completion with tag {0}, which no access in flight has")]
    Stray(u64),
    /// The region had other data than was written to it.
    #[error("WRONG DATA: {0}")]
    Corrupt(#[from] Corruption),
}

/// The times at which all threads of a measurement change phase.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// The start of the measured time.
    pub begin: Instant,
    /// The end of the measured time; no access begins after it.
    pub end: Instant,
    /// The time at which the hotspot switches.
    pub switch: Option<Instant>,
}

impl Schedule {
    /// The schedule of a workload that starts now.
    pub fn new(workload: &Workload, now: Instant) -> Schedule {
        let begin = now + workload.warm_up;
        Schedule {
            begin,
            end: begin + workload.measured,
            switch: workload.switch_after.map(|after| begin + after),
        }
    }
}

/// The expected result of an outstanding access.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    is_write: bool,
    key: u64,
    /// For a READ the acknowledged version at the time of posting, for a WRITE the new version.
    version: u32,
    posted: Instant,
}

/// A client thread.
pub struct Worker<'a> {
    workload: &'a Workload,
    ledger: &'a Ledger,
    thread: usize,
    schedule: Schedule,
    target: &'a mut dyn Target,
    keys: Keys,
    /// The data of the current READ or WRITE.
    bytes: Vec<u8>,
    slots: Vec<Option<Outstanding>>,
    free: Vec<usize>,
    measured: Measured,
}

impl<'a> Worker<'a> {
    /// The worker of thread `thread`, whose target has a buffer for each outstanding access.
    pub fn new(
        workload: &'a Workload,
        ledger: &'a Ledger,
        thread: usize,
        target: &'a mut dyn Target,
    ) -> Worker<'a> {
        let keys = Keys::new(
            workload.distribution,
            workload.theta,
            workload.key_count(),
            thread as u64,
            workload.threads as u64,
        );
        Worker {
            workload,
            ledger,
            thread,
            schedule: Schedule::new(workload, Instant::now()),
            target,
            keys,
            bytes: vec![0; workload.access_bytes],
            slots: vec![None; workload.depth],
            free: (0..workload.depth).collect(),
            measured: Measured::empty(workload.measured),
        }
    }

    /// Runs until the end of the schedule, or until `stop` is set because another thread has failed.
    pub fn run(mut self, schedule: Schedule, stop: &AtomicBool) -> Result<Measured, WorkError> {
        self.schedule = schedule;
        self.run_loop(stop)?;
        Ok(self.measured)
    }

    /// Posts accesses and handles completions until the end.
    fn run_loop(&mut self, stop: &AtomicBool) -> Result<(), WorkError> {
        let mut done = Vec::with_capacity(self.workload.depth);
        let mut now = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if now < self.schedule.end {
                while let Some(slot) = self.free.pop() {
                    self.post(slot, now)?;
                }
            } else if self.free.len() == self.slots.len() {
                break;
            } else {
                self.check_lost(now)?;
            }
            self.target.poll(&mut done).map_err(WorkError::Poll)?;
            now = Instant::now();
            for completion in done.drain(..) {
                self.complete(completion, now)?;
            }
        }
        Ok(())
    }

    fn post(&mut self, slot: usize, now: Instant) -> Result<(), WorkError> {
        let key = self.keys.next(self.schedule.switch.is_some_and(|switch| now >= switch));
        let is_write = self.keys.chance(self.workload.write_percent);
        let posted = Instant::now();
        let outstanding = match is_write {
            true => self.post_write(slot, key, posted),
            false => {
                let version = self.ledger.acknowledged(key);
                let (offset, len) = self.range_of(key);
                (self.target.read(offset, slot, len, slot as u64))
                    .map(|()| Outstanding { is_write, key, version, posted })
                    .map_err(|error| self.access_error(is_write, key, error))
            }
        }?;
        self.slots[slot] = Some(outstanding);
        Ok(())
    }

    fn post_write(&mut self, slot: usize, key: u64, posted: Instant) -> Result<Outstanding, WorkError> {
        let key = self.ledger.owned(key, self.thread as u64);
        let stamp = self.ledger.issue(key);
        let (offset, len) = self.range_of(key);
        fill(&mut self.bytes, offset, stamp);
        let stored = self.target.store(slot, &self.bytes);
        let written = stored.and_then(|()| self.target.write(offset, slot, len, slot as u64));
        written.map_err(|error| self.access_error(true, key, error))?;
        Ok(Outstanding { is_write: true, key, version: stamp.version, posted })
    }

    fn range_of(&self, key: u64) -> (u64, usize) {
        (key * self.workload.access_bytes as u64, self.workload.access_bytes)
    }

    fn access_error(&self, is_write: bool, key: u64, error: TargetError) -> WorkError {
        let (offset, len) = self.range_of(key);
        WorkError::Access { operation: if is_write { "WRITE" } else { "READ" }, offset, len, error }
    }

    fn complete(&mut self, completion: Completion, now: Instant) -> Result<(), WorkError> {
        let slot = completion.tag as usize;
        let Some(outstanding) = self.slots.get_mut(slot).and_then(Option::take) else {
            return Err(WorkError::Stray(completion.tag));
        };
        let Outstanding { is_write, key, version, .. } = outstanding;
        completion.outcome.map_err(|error| self.access_error(is_write, key, error))?;
        if is_write {
            self.ledger.acknowledge(key, version);
        } else if self.workload.verify {
            let loaded = self.target.load(slot, &mut self.bytes);
            loaded.map_err(|error| self.access_error(is_write, key, error))?;
            let verified = self.ledger.verify(key, version, &self.bytes)?;
            self.measured.verified.granules += verified.granules;
            self.measured.verified.mixed += verified.mixed;
        }
        self.count(&outstanding, now);
        self.free.push(slot);
        Ok(())
    }

    /// Counts a completed access, if it is within the measured time.
    fn count(&mut self, outstanding: &Outstanding, now: Instant) {
        let Some(since) = now.checked_duration_since(self.schedule.begin).filter(|_| now < self.schedule.end)
        else {
            return;
        };
        let nanoseconds = (now - outstanding.posted).as_nanos() as u64;
        let (count, latencies) = match outstanding.is_write {
            true => (&mut self.measured.writes, &mut self.measured.write_latencies),
            false => (&mut self.measured.reads, &mut self.measured.read_latencies),
        };
        *count += 1;
        latencies.saturating_record(nanoseconds.max(1));
        let step = (since.as_nanos() / STEP.as_nanos()) as usize;
        if let Some(in_step) = self.measured.timeline.get_mut(step) {
            *in_step += 1;
        }
    }

    /// Fails if accesses are in flight for longer than the timeout.
    fn check_lost(&self, now: Instant) -> Result<(), WorkError> {
        let lost: Vec<&Outstanding> =
            self.slots.iter().flatten().filter(|access| now > access.posted + ACCESS_TIMEOUT).collect();
        match lost.first() {
            None => Ok(()),
            Some(access) => Err(WorkError::Lost {
                count: lost.len(),
                example: format!(
                    "{} at offset {}",
                    if access.is_write { "WRITE" } else { "READ" },
                    self.range_of(access.key).0
                ),
            }),
        }
    }
}
