//! The accesses under way: what each waits for, and what it does next. Knows nothing of threads; its caller has it
//! under a lock, runs the jobs that it asks for, and gives requests to the device.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use slab::Slab;
use terrace_memory::fault::Fault;
use terrace_memory::{AccessError, PAGE_BYTES, Waker};

use crate::checks::Checks;
use crate::config::IoMethod;
use crate::device::{Completion, Request};
use crate::job::{Job, Outcome, Seen, Span};
use crate::order::{PageQueues, PartId};
use crate::part::{Lane, Part, Step, Task, apply};
use crate::regions::{RegionId, Regions};
use crate::stats::Kind;
use crate::transfer::Brought;
use crate::unit::{Plan, Residency, Unit, plan};

/// What is to be done once the lock is released.
#[derive(Default)]
pub(crate) struct Work {
    pub(crate) jobs: Vec<Job>,
    /// Jobs that may wait for the disk.
    pub(crate) slow_jobs: Vec<Job>,
    pub(crate) wakers: Vec<Waker>,
    /// Parts that ended: somebody may wait for that. Their buffers go back when the lock is released, because that wakes
    /// those who wait for buffers.
    pub(crate) ended: Vec<Part>,
}

/// What changes of a region while it is served.
#[derive(Debug)]
pub(crate) struct RegionState {
    pub(crate) units: Box<[Unit]>,
    pub(crate) order: PageQueues,
    /// Writes and atomics under way, by number.
    writes: BTreeSet<u64>,
    writes_so_far: u64,
    /// Flushes that wait for writes, or for the one that is being carried out.
    flushes: Vec<PartId>,
    /// A flush is being carried out. One at a time: the file tells of a failure once, and all are to hear of it.
    is_syncing: bool,
    /// Those that it is carried out for as well.
    synced_along: Vec<PartId>,
    /// Parts under way.
    pub(crate) part_count: usize,
    /// Units that are being moved or cleaned.
    pub(crate) moves: usize,
    /// Takes no more accesses, and its units do not begin to move.
    pub(crate) closing: bool,
    /// Units that have something in the page cache.
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

/// The accesses under way, of all regions.
#[derive(Debug, Default)]
pub(crate) struct Core {
    pub(crate) regions: Regions<RegionState>,
    parts: Slab<Part>,
    /// Parts whose turn has come. Not started by what ends: each might end at once, and so on.
    ready: VecDeque<PartId>,
    /// Requests for the device.
    pub(crate) queue: Vec<Request>,
    /// Those, and the ones that the device has.
    pub(crate) in_flight: Arc<AtomicUsize>,
    /// Storage is to be troubled: what the page cache has, and files that are memory, are asked for from the device, too.
    pub(crate) all_by_device: bool,
    /// Memory that is locked, or about to be, or not yet unlocked.
    pub(crate) locked_bytes: u64,
}

impl Core {
    pub(crate) fn new(all_by_device: bool) -> Core {
        Core { all_by_device, ..Core::default() }
    }

    pub(crate) fn unit(&mut self, region: RegionId, unit: usize) -> &mut Unit {
        &mut self.regions[region].units[unit]
    }

    /// Whether a region is there and takes accesses.
    pub(crate) fn serves(&self, region: RegionId) -> bool {
        self.regions.get(region).is_some_and(|state| !state.closing)
    }

    /// Notes that a unit has something in the page cache.
    pub(crate) fn note_cached(&mut self, region: RegionId, unit: usize) {
        let state = &mut self.regions[region];
        (state.units[unit].cached, state.units[unit].cached_again) = (true, true);
        state.to_clean.push(unit);
    }

    /// Begins a part: as soon as nobody uses its pages.
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
        // The NIC copies what is resident without asking, so what comes here must not wait for anybody either: it is done
        // before the call returns.
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

    /// A part has all of its pages: decides how to go about it.
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

    /// Notes for a part's unit what its transfer means to it.
    fn note_transfer(&mut self, id: PartId, plan: Plan) {
        let part = &mut self.parts[id];
        let state = &mut self.regions[part.region.id];
        let unit = &mut state.units[part.unit];
        let direct = part.io.as_ref().is_some_and(|io| io.direct);
        part.kind = if direct { Kind::Direct } else { Kind::Buffered };
        if !direct && part.region.method != IoMethod::Buffered {
            // Buffered reads leave pages, too.
            unit.touched |= plan == Plan::BringAndCopy;
            unit.cached_again = true;
            if !std::mem::replace(&mut unit.cached, true) {
                state.to_clean.push(part.unit);
            }
        }
        if direct && part.task.is_write() {
            unit.direct_writes += 1;
            part.lane = Lane::Direct;
        }
    }

    /// Gives the transfer under way to the device, or to whoever is there if the file is memory.
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

    /// A job was run.
    pub(crate) fn job_done(&mut self, outcome: Outcome, work: &mut Work) {
        self.note_outcome(outcome, work);
        self.start_ready(work);
    }

    /// The device is done with a request.
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
            // The ring says so when the thread that had submitted ends, or no worker is to be had: nothing is wrong.
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
                    // Goes on at a page, so the end of what was moved may be moved again.
                    io.done -= io.done % PAGE_BYTES as usize;
                }
                let (is_stuck, needed_end) = (io.done == before, io.at + io.needed as u64);
                // Less than a page is no progress: at the end of the file there never will be any.
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

    /// All that was needed was moved.
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
                target.copy_from_slice(&apply(op, before).to_ne_bytes());
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

    /// A part has ended: tells its access, and what waited for it.
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

    /// A flush was carried out: ends those that it was carried out for as well, and starts what waited for it.
    fn sync_done(&mut self, region: RegionId, result: Result<(), AccessError>, work: &mut Work) {
        let state = &mut self.regions[region];
        state.is_syncing = false;
        for id in std::mem::take(&mut state.synced_along) {
            self.finish(id, result, work);
        }
        self.start_flushes(region, work);
    }

    /// Starts the flushes that no longer wait for a write, as one.
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
            // All of the file.
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
