//! A client thread: posts accesses up to its depth, measures latencies and verifies data.
//!
//! An access is a sequence of [steps](Step). The completion of one step posts the next. The last one is the READ or WRITE
//! of the data; the application determines those before it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::application::{Application, KEYS_BYTES, Place, Store, Table, TableError};
use crate::content::fill;
use crate::keys::Keys;
use crate::ledger::{Corruption, Ledger, Verified};
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
        /// READ or WRITE of the data, or the operation that looked its address up.
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
    /// The key-value store's table had other data than was written to it, or lacks a key.
    #[error("WRONG DATA: {0}")]
    Table(#[from] TableError),
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

/// The step of an access that is in flight.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The request for the file's address.
    FindFile,
    /// The READ of a leaf's keys.
    ReadKeys {
        leaf: u64,
        /// Whether the predicted leaf was the wrong one, so that this is the one beside it.
        is_adjacent: bool,
    },
    /// The READ or WRITE of the data.
    Data { offset: u64 },
}

/// An outstanding access.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    is_write: bool,
    key: u64,
    step: Step,
    /// For a READ the acknowledged version when it was posted, for a WRITE the new version.
    version: u32,
    /// When the first step was posted.
    posted: Instant,
}

impl Outstanding {
    /// The name of the step's operation, and its offset in the region.
    fn operation(&self) -> (&'static str, u64) {
        match self.step {
            Step::FindFile => ("a request for the file's address, for an access", 0),
            Step::ReadKeys { leaf, .. } => ("a READ of keys, for a READ", Table::keys_offset(leaf)),
            Step::Data { offset } => (if self.is_write { "WRITE" } else { "READ" }, offset),
        }
    }
}

/// A client thread.
pub struct Worker<'a> {
    workload: &'a Workload,
    ledger: &'a Ledger,
    /// For [`Application::KeyValueStore`].
    store: Option<&'a Store>,
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
    /// The worker of thread `thread`, whose target has a buffer for each outstanding access. With a `store`, accesses are
    /// to its table.
    pub fn new(
        workload: &'a Workload,
        ledger: &'a Ledger,
        store: Option<&'a Store>,
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
            store,
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
                    self.begin(slot, now)?;
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

    /// Chooses an access, and posts its first step.
    fn begin(&mut self, slot: usize, now: Instant) -> Result<(), WorkError> {
        let key = self.keys.next(self.schedule.switch.is_some_and(|switch| now >= switch));
        let is_write = self.keys.chance(self.workload.write_percent);
        let key = if is_write { self.ledger.owned(key, self.thread as u64) } else { key };
        let posted = Instant::now();
        let step = match (self.workload.application, self.store) {
            (_, Some(store)) => Step::ReadKeys { leaf: store.predict(key), is_adjacent: false },
            (Application::FileSystem, None) => Step::FindFile,
            (_, None) => Step::Data { offset: self.offset_in_file(key) },
        };
        self.post(slot, Outstanding { is_write, key, step, version: 0, posted })
    }

    /// Posts the step of an access.
    fn post(&mut self, slot: usize, mut access: Outstanding) -> Result<(), WorkError> {
        let (len, tag) = (self.workload.access_bytes, slot as u64);
        let posted = match access.step {
            Step::FindFile => self.target.find_file(slot, tag),
            Step::ReadKeys { leaf, .. } => self.target.read(Table::keys_offset(leaf), slot, KEYS_BYTES, tag),
            Step::Data { offset } if access.is_write => {
                let stamp = self.ledger.issue(access.key);
                access.version = stamp.version;
                fill(&mut self.bytes, offset, stamp);
                let stored = self.target.store(slot, &self.bytes);
                stored.and_then(|()| self.target.write(offset, slot, len, tag))
            }
            Step::Data { offset } => {
                access.version = self.ledger.acknowledged(access.key);
                self.target.read(offset, slot, len, tag)
            }
        };
        posted.map_err(|error| self.access_error(&access, error))?;
        self.slots[slot] = Some(access);
        Ok(())
    }

    fn offset_in_file(&self, key: u64) -> u64 {
        key * self.workload.access_bytes as u64
    }

    fn access_error(&self, access: &Outstanding, error: TargetError) -> WorkError {
        let (operation, offset) = access.operation();
        WorkError::Access { operation, offset, len: self.workload.access_bytes, error }
    }

    fn complete(&mut self, completion: Completion, now: Instant) -> Result<(), WorkError> {
        let slot = completion.tag as usize;
        let Some(access) = self.slots.get_mut(slot).and_then(Option::take) else {
            return Err(WorkError::Stray(completion.tag));
        };
        completion.outcome.map_err(|error| self.access_error(&access, error))?;
        let step = match access.step {
            Step::FindFile => self.file_found(slot, &access)?,
            Step::ReadKeys { leaf, is_adjacent } => self.keys_read(slot, &access, leaf, is_adjacent)?,
            Step::Data { .. } => {
                self.complete_data(slot, &access)?;
                self.count(&access, now);
                self.free.push(slot);
                return Ok(());
            }
        };
        self.measured.lookups += u64::from(self.is_measured(now));
        self.post(slot, Outstanding { step, ..access })
    }

    /// The step after the server's answer: the access to the block at the file's address.
    fn file_found(&mut self, slot: usize, access: &Outstanding) -> Result<Step, WorkError> {
        let mut start = [0; 8];
        let loaded = self.target.load(slot, &mut start);
        loaded.map_err(|error| self.access_error(access, error))?;
        let offset = u64::from_le_bytes(start).saturating_add(self.offset_in_file(access.key));
        Ok(Step::Data { offset })
    }

    /// The step after the READ of a leaf's keys: the READ of the value, or of the keys of the leaf beside it.
    fn keys_read(
        &mut self,
        slot: usize,
        access: &Outstanding,
        leaf: u64,
        is_adjacent: bool,
    ) -> Result<Step, WorkError> {
        let loaded = self.target.load(slot, &mut self.bytes[..KEYS_BYTES]);
        loaded.map_err(|error| self.access_error(access, error))?;
        let table = &self.store.expect("only accesses to a store READ keys").table;
        let keys = &self.bytes[..KEYS_BYTES];
        if self.workload.verify {
            let verified = table.verify_keys(leaf, keys)?;
            self.count_verified(verified);
        }
        let key = table.key(access.key);
        let adjacent = match Table::search(key, leaf, &self.bytes[..KEYS_BYTES]) {
            Place::Found(index) => return Ok(Step::Data { offset: Table::value_offset(index) }),
            Place::Before => leaf.checked_sub(1),
            Place::After => Some(leaf + 1),
            Place::Absent => None,
        };
        match adjacent.filter(|&leaf| !is_adjacent && leaf < table.leaf_count()) {
            Some(leaf) => Ok(Step::ReadKeys { leaf, is_adjacent: true }),
            None => Err(TableError::NotFound { key, leaf }.into()),
        }
    }

    /// Verifies the data of a completed READ, or records a completed WRITE.
    fn complete_data(&mut self, slot: usize, access: &Outstanding) -> Result<(), WorkError> {
        let &Outstanding { is_write, key, version, .. } = access;
        if is_write {
            self.ledger.acknowledge(key, version);
        } else if self.workload.verify {
            let loaded = self.target.load(slot, &mut self.bytes);
            loaded.map_err(|error| self.access_error(access, error))?;
            let verified = match self.store {
                Some(store) => store.table.verify_value(key, &self.bytes)?,
                None => self.ledger.verify(key, version, &self.bytes)?,
            };
            self.count_verified(verified);
        }
        Ok(())
    }

    fn count_verified(&mut self, verified: Verified) {
        self.measured.verified.granules += verified.granules;
        self.measured.verified.mixed += verified.mixed;
    }

    fn is_measured(&self, now: Instant) -> bool {
        (self.schedule.begin..self.schedule.end).contains(&now)
    }

    /// Counts a completed access, if it is within the measured time.
    fn count(&mut self, access: &Outstanding, now: Instant) {
        if !self.is_measured(now) {
            return;
        }
        let nanoseconds = (now - access.posted).as_nanos() as u64;
        let (count, latencies) = match access.is_write {
            true => (&mut self.measured.writes, &mut self.measured.write_latencies),
            false => (&mut self.measured.reads, &mut self.measured.read_latencies),
        };
        *count += 1;
        latencies.saturating_record(nanoseconds.max(1));
        let step = ((now - self.schedule.begin).as_nanos() / STEP.as_nanos()) as usize;
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
            Some(access) => {
                let (operation, offset) = access.operation();
                Err(WorkError::Lost { count: lost.len(), example: format!("{operation} at offset {offset}") })
            }
        }
    }
}
