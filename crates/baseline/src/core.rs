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

use crate::config::IoMethod;
use crate::device::{Completion, Request};
use crate::job::{Job, Outcome, Span};
use crate::order::{AccessId, PageQueues};
use crate::pending::{Pending, Step, Task};
use crate::plan::{Plan, plan};
use crate::regions::{RegionId, Regions};
use crate::transfer::Brought;

/// What the caller does after it has released the core's lock.
#[derive(Default)]
pub(crate) struct Work {
    pub(crate) jobs: Vec<Job>,
    /// Jobs that may wait for the disk.
    pub(crate) slow_jobs: Vec<Job>,
    pub(crate) wakers: Vec<Waker>,
    /// Ended accesses, for threads that wait for one to end. Their buffers are freed outside the lock, because freeing
    /// calls the wakers of requesters that wait for buffers.
    pub(crate) ended: Vec<Pending>,
}

/// The mutable state of a region that is served.
#[derive(Debug, Default)]
pub(crate) struct RegionState {
    pub(crate) order: PageQueues,
    /// Numbers of the writes and atomics under way.
    writes: BTreeSet<u64>,
    writes_so_far: u64,
    /// Flushes that wait for writes, or for the flush under way.
    flushes: Vec<AccessId>,
    /// A flush is under way. One at a time: the kernel reports a write-back failure once per open file, and each flush
    /// must return it.
    is_syncing: bool,
    /// Flushes that the flush under way completes, too.
    synced_along: Vec<AccessId>,
    /// Accesses under way.
    pub(crate) access_count: usize,
    /// The region takes no new accesses.
    pub(crate) closing: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Core {
    pub(crate) regions: Regions<RegionState>,
    accesses: Slab<Pending>,
    /// Accesses that have all of their pages. [`Core::finish`] only queues them here: starting them there could recurse
    /// without bound.
    ready: VecDeque<AccessId>,
    /// Requests to submit to the device.
    pub(crate) queue: Vec<Request>,
    /// Count of queued and submitted requests.
    pub(crate) in_flight: Arc<AtomicUsize>,
    /// A fault plan covers storage: reads of cached pages and of memory files go through the device, too.
    pub(crate) all_by_device: bool,
    /// Locked memory, with regions that are being locked or unlocked.
    pub(crate) locked_bytes: u64,
}

impl Core {
    pub(crate) fn new(all_by_device: bool) -> Core {
        Core { all_by_device, ..Core::default() }
    }

    /// Whether the region exists and takes accesses.
    pub(crate) fn serves(&self, region: RegionId) -> bool {
        self.regions.get(region).is_some_and(|state| !state.closing)
    }

    /// Adds an access; it starts when it has all of its pages.
    pub(crate) fn add(&mut self, mut access: Pending, work: &mut Work) {
        let state = &mut self.regions[access.region.id];
        state.access_count += 1;
        if access.task.is_write() {
            access.write_number = state.writes_so_far;
            state.writes.insert(state.writes_so_far);
            state.writes_so_far += 1;
        }
        let (pages, write, region) = (access.pages(), access.task.is_write(), access.region.id);
        if let Task::Flush { before, .. } = &mut access.task {
            *before = state.writes_so_far;
            state.flushes.push(self.accesses.insert(access));
            self.start_flushes(region, work);
            return self.start_ready(work);
        }
        let in_order = access.is_in_order();
        let id = self.accesses.insert(access);
        let missing = if in_order { state.order.enter(id, pages, write) } else { 0 };
        self.accesses[id].pages_missing = missing;
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

    /// Starts an access that has all of its pages.
    fn start(&mut self, id: AccessId, work: &mut Work) {
        let access = &mut self.accesses[id];
        let plan = match plan(access.need(), access.means()) {
            Plan::Peek if self.all_by_device => Plan::Read { direct: true },
            plan => plan,
        };
        match plan {
            Plan::Copy => {
                let is_pinned = access.region.method == IoMethod::Pinned;
                let jobs = if is_pinned { &mut work.jobs } else { &mut work.slow_jobs };
                return jobs.push(copy_job(access, id));
            }
            Plan::Peek => {
                access.step = Step::Working;
                return work.jobs.push(Job::Peek(span(access, id)));
            }
            Plan::Read { direct } => begin_read(access, direct),
            Plan::Write { direct } => {
                access.step = Step::Writing;
                access.io = Some(access.io_of_bytes(direct));
            }
            Plan::Modify { direct: true } => {
                access.step = Step::Fetching;
                access.io = Some(access.io_of_pages(true, access.span()));
            }
            Plan::Modify { direct: false } => {
                access.step = Step::Fetching;
                access.io = Some(access.io_of_bytes(false));
            }
        }
        self.issue(id, work);
    }

    /// Submits the transfer to the device, or runs it as a job if the file is memory.
    fn issue(&mut self, id: AccessId, work: &mut Work) {
        let access = &mut self.accesses[id];
        if access.lies_beyond() {
            return self.too_short(id, work);
        }
        let is_memory = access.region.files.is_memory && !self.all_by_device;
        let request = access.request(id);
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
                let access = &mut self.accesses[id];
                access.data = buffer;
                if let (Task::Atomic(_), Ok(before)) = (access.task, result) {
                    access.caller.found(before);
                }
                self.finish(id, result.map(drop).map_err(|Fault| AccessError::Fault), work);
            }
            Outcome::Peeked { id, buffer, is_read } => {
                let access = &mut self.accesses[id];
                access.data = Some(buffer);
                if is_read {
                    return self.finish(id, Ok(()), work);
                }
                begin_read(access, true);
                self.issue(id, work);
            }
            Outcome::Transferred(completion) => self.transferred(completion, work),
        }
    }

    fn transferred(&mut self, completion: Completion, work: &mut Work) {
        let id = completion.request.id;
        let access = &mut self.accesses[id];
        *access.io_buffer() = completion.request.command.into_buffer();
        match completion.result {
            // io_uring returns these when the submitting thread exits or no io-wq worker is available: not an error of
            // the file.
            Err(Errno::AGAIN | Errno::INTR | Errno::CANCELED | Errno::FAULT) if access.may_retry() => {
                self.issue(id, work);
            }
            Err(error) => self.transfer_failed(id, error, work),
            Ok(_) if access.step == Step::Syncing => {
                let has_lost = access.region.has_lost();
                self.finish(id, if has_lost { Err(AccessError::Flush) } else { Ok(()) }, work);
            }
            Ok(count) => {
                let io = access.io.as_mut().expect("a step with a transfer");
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
                if is_stuck && !(access.region.files.reach(needed_end) && access.may_retry()) {
                    return self.too_short(id, work);
                }
                self.issue(id, work);
            }
        }
    }

    fn too_short(&mut self, id: AccessId, work: &mut Work) {
        let access = &self.accesses[id];
        if access.region.may_complain() {
            tracing::warn!(offset = access.file_offset(), "a region's file has become too short");
        }
        self.finish(id, Err(AccessError::Fault), work);
    }

    fn transfer_failed(&mut self, id: AccessId, error: Errno, work: &mut Work) {
        let access = &mut self.accesses[id];
        let direct = access.io.as_ref().is_some_and(|io| io.direct);
        if direct && matches!(error, Errno::INVAL | Errno::OPNOTSUPP) {
            tracing::warn!(%error, "direct access does not work: accesses go through the page cache");
            access.region.give_up_direct();
            return self.start(id, work);
        }
        if access.region.may_complain() {
            let (offset, len, task) = (access.file_offset(), access.len, access.task);
            tracing::warn!(%error, offset, len, ?task, "an access to a region's file failed");
        }
        let error = match error {
            _ if access.step == Step::Syncing => {
                access.region.note_loss(&error);
                AccessError::Flush
            }
            Errno::NOSPC | Errno::DQUOT => AccessError::NoSpace,
            _ => AccessError::Device,
        };
        self.finish(id, Err(error), work);
    }

    /// The transfer has moved all needed bytes.
    fn step_done(&mut self, id: AccessId, work: &mut Work) {
        let access = &mut self.accesses[id];
        if access.step != Step::Fetching {
            return self.finish(id, Ok(()), work);
        }
        let direct = access.io.as_ref().is_some_and(|io| io.direct);
        let bytes = access.bytes();
        let scratch = access.scratch.as_mut().expect("it was just filled");
        match access.task {
            Task::Atomic(op) => {
                let target = &mut scratch[bytes];
                let before = u64::from_ne_bytes((&*target).try_into().expect("an atomic has 8 bytes"));
                target.copy_from_slice(&op.apply(before).to_ne_bytes());
                access.caller.found(before);
            }
            _ => {
                let data = access.data.as_ref().expect("a write has data");
                scratch[bytes.clone()].copy_from_slice(&data[bytes]);
            }
        }
        access.step = Step::WritingBack;
        access.io =
            Some(if direct { access.io_of_pages(true, access.span()) } else { access.io_of_bytes(false) });
        self.issue(id, work);
    }

    /// Ends an access, and grants its pages to waiting ones.
    fn finish(&mut self, id: AccessId, result: Result<(), AccessError>, work: &mut Work) {
        let mut access = self.accesses.remove(id);
        let region = access.region.clone();
        let write = access.task.is_write();
        let state = &mut self.regions[region.id];
        state.access_count -= 1;
        region.count(&access, result);
        if let (Task::Read, Ok(()), Some(buffer)) = (access.task, result, access.data.take()) {
            access.caller.bring(Brought { buffer, skip: access.skip() });
        }
        work.wakers.push(access.caller.end(result));
        let (accesses, ready) = (&mut self.accesses, &mut self.ready);
        let pages = if access.is_in_order() { access.pages() } else { 0..0 };
        state.order.leave(pages, write, |next| {
            let next_access = &mut accesses[next];
            next_access.pages_missing -= 1;
            if next_access.pages_missing == 0 {
                ready.push_back(next);
            }
        });
        if write {
            state.writes.remove(&access.write_number);
            self.start_flushes(region.id, work);
        }
        if access.step == Step::Syncing {
            self.sync_done(region.id, result, work);
        }
        work.ended.push(access);
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
        let accesses = &self.accesses;
        let is_ready = |id: &mut AccessId| match accesses[*id].task {
            Task::Flush { before, .. } => before <= oldest_write,
            _ => false,
        };
        let mut ready: Vec<AccessId> = state.flushes.extract_if(.., is_ready).collect();
        let Some(id) = ready.pop() else { return };
        let access = &mut self.accesses[id];
        if let (Task::Flush { len, .. }, false) = (&mut access.task, ready.is_empty()) {
            // The whole file.
            *len = u64::MAX;
        }
        (state.is_syncing, state.synced_along) = (true, ready);
        access.step = Step::Syncing;
        self.issue(id, work);
    }
}

fn begin_read(access: &mut Pending, direct: bool) {
    access.step = Step::Reading;
    access.io =
        Some(if direct { access.io_of_pages(true, access.bytes().end) } else { access.io_of_bytes(false) });
}

fn span(access: &mut Pending, id: AccessId) -> Span {
    let buffer = access.data.take().expect("an access that copies has a buffer");
    Span { id, region: access.region.clone(), offset: access.offset, buffer, bytes: access.bytes() }
}

fn copy_job(access: &mut Pending, id: AccessId) -> Job {
    access.step = Step::Working;
    match access.task {
        Task::Atomic(op) => Job::Atomic { id, addr: access.addr(), op },
        Task::Write => Job::CopyIn(span(access, id)),
        Task::Read | Task::Flush { .. } => Job::CopyOut(span(access, id)),
    }
}
