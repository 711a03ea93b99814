//! A device with the delays and errors of a fault plan.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use terrace_faults::{Faults, StorageOperation};

use super::request::{Command, Completion, Device, Request};

/// Wraps a device: requests are delayed or failed as the plan says.
#[derive(Debug)]
pub(crate) struct Injected {
    inner: Box<dyn Device>,
    faults: Arc<Faults>,
    /// Delayed requests.
    held: BinaryHeap<Reverse<Held>>,
    held_so_far: u64,
    /// Failed requests, to be reported.
    failed: Vec<Completion>,
    /// Readable when the next delayed request is due.
    timer: OwnedFd,
    /// Readable when the inner device or the timer is.
    both: OwnedFd,
}

/// A delayed request. Ordered by due time, then by arrival.
#[derive(Debug)]
struct Held {
    due: Instant,
    number: u64,
    request: Request,
    error: Option<Errno>,
}

impl PartialEq for Held {
    fn eq(&self, other: &Held) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Held {}
impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Held) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Held {
    fn cmp(&self, other: &Held) -> std::cmp::Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

impl Injected {
    /// # Errors
    /// When no descriptor is available.
    pub(crate) fn new(inner: Box<dyn Device>, faults: Arc<Faults>) -> io::Result<Injected> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for source in [inner.descriptor(), timer.as_fd()] {
            epoll::add(&both, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let (held, failed) = (BinaryHeap::new(), Vec::new());
        Ok(Injected { inner, faults, held, held_so_far: 0, failed, timer, both })
    }

    /// Removes due requests from the heap: queues failed ones for `reap`, and returns the others for the inner device.
    /// Sets the timer for the next due request.
    fn release(&mut self, now: Instant) -> Vec<Request> {
        let mut due = Vec::new();
        while self.held.peek().is_some_and(|Reverse(held)| held.due <= now) {
            let Some(Reverse(held)) = self.held.pop() else { break };
            match held.error {
                Some(error) => self.failed.push(Completion { request: held.request, result: Err(error) }),
                None => due.push(held.request),
            }
        }
        // Zero would disarm the timer. Setting it also clears its readable state.
        let next = self.held.peek().map(|Reverse(held)| held.due.saturating_duration_since(now));
        let wait = next.map_or(Duration::ZERO, |wait| wait.max(Duration::from_nanos(1)));
        let value = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            tracing::warn!("fault injection timer: {error}");
        }
        due
    }
}

impl Device for Injected {
    fn submit(&mut self, requests: &mut Vec<Request>) {
        if requests.is_empty() && self.held.is_empty() {
            return self.inner.submit(requests);
        }
        let now = Instant::now();
        for request in requests.drain(..) {
            let fate = self.faults.storage(operation_of(&request.command));
            let error = fate.error.map(Errno::from_raw_os_error);
            self.held_so_far += 1;
            let (due, number) = (now + fate.delay, self.held_so_far);
            self.held.push(Reverse(Held { due, number, request, error }));
        }
        let mut due = self.release(now);
        self.inner.submit(&mut due);
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.failed);
        self.inner.reap(done);
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.both.as_fd()
    }
}

fn operation_of(command: &Command) -> StorageOperation {
    match command {
        Command::Read { .. } => StorageOperation::Read,
        Command::Write { .. } => StorageOperation::Write,
        Command::Sync { .. } => StorageOperation::Sync,
    }
}
