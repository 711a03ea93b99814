//! The state machine of accesses under way. It starts no threads: the caller holds it under a lock, runs the jobs that
//! it returns and submits its requests to the device.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use slab::Slab;
use terrace_hostmem::PAGE_BYTES;
use terrace_hostmem::fault::Fault;
use terrace_memory::{AccessError, Waker};

use crate::checks::Checks;
use crate::config::IoMethod;
use crate::device::{Completion, Request};
use crate::job::{Job, Outcome, Seen, Span};
use crate::order::{PageQueues, PartId};
use crate::part::{Lane, Part, Step, Task};
use crate::regions::{RegionId, Regions};
use crate::stats::Kind;
use crate::transfer::Brought;
use crate::unit::{Plan, Residency, Unit, plan};

/// What the caller does after it has released the core's lock.
#[derive(Default)]
pub(crate) struct Work {
    pub(crate) jobs: Vec<Job>,
    /// Jobs that may wait for the disk.
    pub(crate) slow_jobs: Vec<Job>,
    pub(crate) wakers: Vec<Waker>,
    /// Ended parts, for threads that wait for one to end. Their buffers are freed outside the lock, because freeing
    /// calls the wakers of requesters that wait for buffers.
    pub(crate) ended: Vec<Part>,
}

/// The mutable state of a region that is served.
#[derive(Debug)]
pub(crate) struct RegionState {
    pub(crate) units: Box<[Unit]>,
    pub(crate) order: PageQueues,
    /// Numbers of the writes and atomics under way.
    writes: BTreeSet<u64>,
    writes_so_far: u64,
    /// Flushes that wait for writes, or for the flush under way.
    flushes: Vec<PartId>,
    /// A flush is under way. One at a time: the kernel reports a write-back failure once per open file, and each flush
    /// must return it.
    is_syncing: bool,
    /// Flushes that the flush under way completes, too.
    synced_along: Vec<PartId>,
    /// Parts under way.
    pub(crate) part_count: usize,
    /// Units that are being moved or cleaned.
    pub(crate) moves: usize,
    /// The region takes no new accesses, and its units start no moves.
    pub(crate) closing: bool,
    /// Units that may have pages in the page cache.
    pub(crate) to_clean: Vec<usize>,
    /// Which unit is checked for readahead next.
    pub(crate) checks: Checks,
}

impl RegionState {
    pub(crate) fn new(unit_count: usize) -> RegionState {
        RegionState {
            units: (0..unit_count).map(|_| Unit::default()).collect(),
            order: PageQueues::default(),
            writes: BTreeSet::new(),
            writes_so_far: 0,
            flushes: Vec::new(),
            is_syncing: false,
            synced_along: Vec::new(),
            part_count: 0,
            moves: 0,
            closing: false,
            to_clean: Vec::new(),
            checks: Checks::default(),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Core {
    pub(crate) regions: Regions<RegionState>,
    parts: Slab<Part>,
    /// Parts that have all of their pages. [`Core::finish`] only queues them here: starting them there could recurse
    /// without bound.
    ready: VecDeque<PartId>,
    /// Requests to submit to the device.
    pub(crate) queue: Vec<Request>,
    /// Count of queued and submitted requests.
    pub(crate) in_flight: Arc<AtomicUsize>,
    /// A fault plan covers storage: reads of cached pages and of memory files go through the device, too.
    pub(crate) all_by_device: bool,
    /// Locked memory, with units that are being locked or unlocked.
    pub(crate) locked_bytes: u64,
}

impl Core {
    pub(crate) fn new(all_by_device: bool) -> Core {
        Core { all_by_device, ..Core::default() }
    }

    pub(crate) fn unit(&mut self, region: RegionId, unit: usize) -> &mut Unit {
        &mut self.regions[region].units[unit]
    }

    /// Whether the region exists and takes accesses.
    pub(crate) fn serves(&self, region: RegionId) -> bool {
        self.regions.get(region).is_some_and(|state| !state.closing)
    }

    /// Records that a unit may have pages in the page cache.
    pub(crate) fn note_cached(&mut self, region: RegionId, unit: usize) {
        let state = &mut self.regions[region];
        (state.units[unit].cached, state.units[unit].cached_again) = (true, true);
        state.units[unit].kept = false;
        state.to_clean.push(unit);
    }

    /// Adds a part; it starts when it has all of its pages.
    pub(crate) fn add(&mut self, mut part: Part, work: &mut Work) {
        let state = &mut self.regions[part.region.id];
        state.part_count += 1;
        if part.task.is_write() {
            part.write_number = state.writes_so_far;
            state.units[part.unit].writes += 1;
            state.writes.insert(state.writes_so_far);
            state.writes_so_far += 1;
        }
        let (pages, write, region) = (part.pages(), part.task.is_write(), part.region.id);
        if let Task::Flush { before, .. } = &mut part.task {
            *before = state.writes_so_far;
            state.flushes.push(self.parts.insert(part));
            self.start_flushes(region, work);
            return self.start_ready(work);
        }
        // The NIC accesses resident memory without the page queues. An access to a resident unit must not wait either:
        // it completes before the call returns.
        part.in_order = state.units[part.unit].residency != Residency::Resident;
        let in_order = part.in_order;
        let id = self.parts.insert(part);
        let missing = if in_order { state.order.enter(id, pages, write) } else { 0 };
        self.parts[id].pages_missing = missing;
        if missing == 0 {
            self.ready.push_back(id);
        }
        self.start_ready(work);
    }

    fn start_ready(&mut self, work: &mut Work) {
        while let Some(id) = self.ready.pop_front() {
            self.start(id, work);
        }
    }

    /// Starts a part that has all of its pages.
    fn start(&mut self, id: PartId, work: &mut Work) {
        let part = &mut self.parts[id];
        let state = &mut self.regions[part.region.id];
        let unit = &mut state.units[part.unit];
        let plan = match plan(part.need(), unit, part.means()) {
            Plan::Peek if self.all_by_device => Plan::Read { direct: true },
            plan => plan,
        };
        match plan {
            Plan::Copy => {
                let locked = matches!(unit.residency, Residency::Locked | Residency::Resident);
                part.kind = if locked { Kind::Late } else { Kind::Mapping };
                unit.copies += 1;
                part.lane = Lane::Copy;
                let jobs = if locked { &mut work.jobs } else { &mut work.slow_jobs };
                return jobs.push(copy_job(part, id));
            }
            Plan::Peek => {
                part.kind = Kind::Cached;
                part.step = Step::Working;
                return work.jobs.push(Job::Peek(span(part, id)));
            }
            Plan::Read { direct } => begin_read(part, direct),
            Plan::Write { direct } => {
                part.step = Step::Writing;
                part.io = Some(part.io_of_bytes(direct));
            }
            Plan::Modify { direct: true } => {
                part.step = Step::Fetching;
                part.io = Some(part.io_of_pages(true, part.span()));
            }
            Plan::Modify { direct: false } | Plan::BringAndCopy => {
                part.step = Step::Fetching;
                part.io = Some(part.io_of_bytes(false));
            }
        }
        self.note_transfer(id, plan);
        self.issue(id, work);
    }

    /// Updates the state of the part's unit for the transfer that begins.
    fn note_transfer(&mut self, id: PartId, plan: Plan) {
        let part = &mut self.parts[id];
        let state = &mut self.regions[part.region.id];
        let unit = &mut state.units[part.unit];
        let direct = part.io.as_ref().is_some_and(|io| io.direct);
        part.kind = if direct { Kind::Direct } else { Kind::Buffered };
        if !direct && part.region.method != IoMethod::Buffered {
            // Buffered reads leave pages in the page cache, too.
            unit.touched |= plan == Plan::BringAndCopy;
            (unit.cached_again, unit.kept) = (true, false);
            if !std::mem::replace(&mut unit.cached, true) {
                state.to_clean.push(part.unit);
            }
        }
        if direct && part.task.is_write() {
            unit.direct_writes += 1;
            part.lane = Lane::Direct;
        }
    }

    /// Submits the transfer to the device, or runs it as a job if the file is memory.
    fn issue(&mut self, id: PartId, work: &mut Work) {
        let part = &mut self.parts[id];
        if part.lies_beyond() {
            return self.too_short(id, work);
        }
        let is_memory = part.region.ways.is_memory && !self.all_by_device;
        let request = part.request(id);
        if is_memory {
            return work.jobs.push(Job::Transfer(request));
        }
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.queue.push(request);
    }

    /// A job has run.
    pub(crate) fn job_done(&mut self, outcome: Outcome, work: &mut Work) {
        self.note_outcome(outcome, work);
        self.start_ready(work);
    }

    /// The device has completed a request.
    pub(crate) fn request_done(&mut self, completion: Completion, work: &mut Work) {
        self.transferred(completion, work);
        self.start_ready(work);
    }

    fn note_outcome(&mut self, outcome: Outcome, work: &mut Work) {
        match outcome {
            Outcome::Copied { id, buffer, result } => {
                let part = &mut self.parts[id];
                part.data = buffer;
                if let (Task::Atomic(_), Ok(before)) = (part.task, result) {
                    part.access.found(before);
                }
                self.finish(id, result.map(drop).map_err(|Fault| AccessError::Fault), work);
            }
            Outcome::Peeked { id, buffer, seen } => {
                let part = &mut self.parts[id];
                part.data = Some(buffer);
                if seen == Seen::All {
                    return self.finish(id, Ok(()), work);
                }
                begin_read(part, true);
                part.kind = Kind::Direct;
                let (region, unit) = (part.region.id, part.unit);
                if seen == Seen::Gone {
                    self.note_cached(region, unit);
                }
                self.issue(id, work);
            }
            Outcome::Transferred(completion) => self.transferred(completion, work),
        }
    }

    fn transferred(&mut self, completion: Completion, work: &mut Work) {
        let id = completion.request.id;
        let part = &mut self.parts[id];
        *part.io_buffer() = completion.request.command.into_buffer();
        match completion.result {
            // io_uring returns these when the submitting thread exits or no io-wq worker is available: not an error of
            // the file.
            Err(Errno::AGAIN | Errno::INTR | Errno::CANCELED | Errno::FAULT) if part.may_retry() => {
                self.issue(id, work);
            }
            Err(error) => self.transfer_failed(id, error, work),
            Ok(_) if part.step == Step::Syncing => {
                let is_lost = part.region.losses.are_there();
                self.finish(id, if is_lost { Err(AccessError::Flush) } else { Ok(()) }, work);
            }
            Ok(count) => {
                let io = part.io.as_mut().expect("a step with a transfer");
                let before = io.done;
                io.done += count;
                if io.done >= io.needed {
                    return self.step_done(id, work);
                }
                if io.direct {
                    // Direct I/O resumes at a page boundary, so the last partial page is moved again.
                    io.done -= io.done % PAGE_BYTES as usize;
                }
                let (is_stuck, needed_end) = (io.done == before, io.at + io.needed as u64);
                // Less than a page is no progress: past the end of the file there will be none.
                if is_stuck && !(part.region.ways.reach(needed_end) && part.may_retry()) {
                    return self.too_short(id, work);
                }
                self.issue(id, work);
            }
        }
    }

    fn too_short(&mut self, id: PartId, work: &mut Work) {
        let part = &self.parts[id];
        if part.region.may_complain() {
            tracing::warn!(offset = part.file_offset(), "a region's file has become too short");
        }
        self.finish(id, Err(AccessError::Fault), work);
    }

    fn transfer_failed(&mut self, id: PartId, error: Errno, work: &mut Work) {
        let part = &mut self.parts[id];
        let direct = part.io.as_ref().is_some_and(|io| io.direct);
        if direct && matches!(error, Errno::INVAL | Errno::OPNOTSUPP) {
            tracing::warn!(%error, "direct access does not work: misses go through the page cache");
            part.region.give_up_direct();
            let (region, unit, lane) = (part.region.id, part.unit, part.lane);
            part.lane = Lane::None;
            leave_lane(self.unit(region, unit), lane);
            return self.start(id, work);
        }
        if part.region.may_complain() {
            let (offset, len, task) = (part.file_offset(), part.len, part.task);
            tracing::warn!(%error, offset, len, ?task, "an access to a region's file failed");
        }
        let error = match error {
            _ if part.step == Step::Syncing => {
                part.region.note_loss(&error);
                AccessError::Flush
            }
            Errno::NOSPC | Errno::DQUOT => AccessError::NoSpace,
            _ => AccessError::Device,
        };
        self.finish(id, Err(error), work);
    }

    /// The transfer has moved all needed bytes.
    fn step_done(&mut self, id: PartId, work: &mut Work) {
        let part = &mut self.parts[id];
        if part.step != Step::Fetching {
            return self.finish(id, Ok(()), work);
        }
        let direct = part.io.as_ref().is_some_and(|io| io.direct);
        if let (Task::Atomic(op), false) = (part.task, part.region.exclusive) {
            let addr = part.addr();
            return work.jobs.push(Job::Atomic { id, addr, op });
        }
        let bytes = part.bytes();
        let scratch = part.scratch.as_mut().expect("it was just filled");
        match part.task {
            Task::Atomic(op) => {
                let target = &mut scratch[bytes];
                let before = u64::from_ne_bytes((&*target).try_into().expect("an atomic has 8 bytes"));
                target.copy_from_slice(&op.apply(before).to_ne_bytes());
                part.access.found(before);
            }
            _ => {
                let data = part.data.as_ref().expect("a write has data");
                scratch[bytes.clone()].copy_from_slice(&data[bytes]);
            }
        }
        part.step = Step::WritingBack;
        part.io = Some(if direct { part.io_of_pages(true, part.span()) } else { part.io_of_bytes(false) });
        self.issue(id, work);
    }

    /// Ends a part: completes its access, if it was the last, and grants its pages to waiting parts.
    fn finish(&mut self, id: PartId, result: Result<(), AccessError>, work: &mut Work) {
        let mut part = self.parts.remove(id);
        let region = part.region.clone();
        let (pages, write) = (part.pages(), part.task.is_write());
        let state = &mut self.regions[region.id];
        state.part_count -= 1;
        leave_lane(&mut state.units[part.unit], part.lane);
        region.count(&part, result);
        if let (Task::Read, Ok(()), Some(buffer)) = (part.task, result, part.data.take()) {
            let bytes = part.base..part.base + part.len;
            part.access.bring(part.index, Brought { buffer, skip: part.skip(), bytes });
        }
        work.wakers.extend(part.access.part_done(result));
        let (parts, ready) = (&mut self.parts, &mut self.ready);
        let pages = if part.in_order { pages } else { 0..0 };
        state.order.leave(pages, write, |next| {
            let next_part = &mut parts[next];
            next_part.pages_missing -= 1;
            if next_part.pages_missing == 0 {
                ready.push_back(next);
            }
        });
        if write {
            state.writes.remove(&part.write_number);
            state.units[part.unit].writes -= 1;
            self.start_flushes(region.id, work);
        }
        if part.step == Step::Syncing {
            self.sync_done(region.id, result, work);
        }
        work.ended.push(part);
    }

    /// Ends the flushes that the completed flush covered, and starts those that waited for it.
    fn sync_done(&mut self, region: RegionId, result: Result<(), AccessError>, work: &mut Work) {
        let state = &mut self.regions[region];
        state.is_syncing = false;
        for id in std::mem::take(&mut state.synced_along) {
            self.finish(id, result, work);
        }
        self.start_flushes(region, work);
    }

    /// Starts all flushes whose writes have ended, as one flush.
    fn start_flushes(&mut self, region: RegionId, work: &mut Work) {
        let state = &mut self.regions[region];
        if state.flushes.is_empty() || state.is_syncing {
            return;
        }
        let oldest_write = state.writes.first().copied().unwrap_or(u64::MAX);
        let parts = &self.parts;
        let is_ready = |id: &mut PartId| match parts[*id].task {
            Task::Flush { before, .. } => before <= oldest_write,
            _ => false,
        };
        let mut ready: Vec<PartId> = state.flushes.extract_if(.., is_ready).collect();
        let Some(id) = ready.pop() else { return };
        let part = &mut self.parts[id];
        if let (Task::Flush { len, .. }, false) = (&mut part.task, ready.is_empty()) {
            // The whole file.
            *len = u64::MAX;
        }
        (state.is_syncing, state.synced_along) = (true, ready);
        part.step = Step::Syncing;
        self.issue(id, work);
    }
}

fn leave_lane(unit: &mut Unit, lane: Lane) {
    match lane {
        Lane::None => {}
        Lane::Direct => unit.direct_writes -= 1,
        Lane::Copy => unit.copies -= 1,
    }
}

fn begin_read(part: &mut Part, direct: bool) {
    part.step = Step::Reading;
    part.io = Some(if direct { part.io_of_pages(true, part.bytes().end) } else { part.io_of_bytes(false) });
}

fn span(part: &mut Part, id: PartId) -> Span {
    let buffer = part.data.take().expect("an access that copies has a buffer");
    Span { id, region: part.region.clone(), offset: part.offset, buffer, bytes: part.bytes() }
}

fn copy_job(part: &mut Part, id: PartId) -> Job {
    part.step = Step::Working;
    match part.task {
        Task::Atomic(op) => Job::Atomic { id, addr: part.addr(), op },
        Task::Write => Job::CopyIn(span(part, id)),
        Task::Read | Task::Flush { .. } => Job::CopyOut(span(part, id)),
    }
}
