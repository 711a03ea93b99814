//! Storage requests that are held until a plan's delay is over.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::active::{Faults, StorageOperation};

/// The requests `R` of a device that a plan delays or fails. Its caller is between the device and the requester: it
/// passes new requests through [`Delayed::release`], and reports [`Delayed::take_failed`] with the device's completions.
#[derive(Debug)]
pub struct Delayed<R> {
    faults: Arc<Faults>,
    held: BinaryHeap<Reverse<Held<R>>>,
    held_so_far: u64,
    /// With their errnos.
    failed: Vec<(R, i32)>,
    /// Readable when the next held request is due.
    timer: OwnedFd,
    /// When the timer is due.
    timer_due: Option<Instant>,
    /// Readable when the device or the timer is.
    either: OwnedFd,
}

/// A delayed request. Ordered by due time, then by arrival.
#[derive(Debug)]
struct Held<R> {
    due: Instant,
    number: u64,
    request: R,
    error: Option<i32>,
}

impl<R> PartialEq for Held<R> {
    fn eq(&self, other: &Held<R>) -> bool {
        self.cmp(other).is_eq()
    }
}
impl<R> Eq for Held<R> {}
impl<R> PartialOrd for Held<R> {
    fn partial_cmp(&self, other: &Held<R>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<R> Ord for Held<R> {
    fn cmp(&self, other: &Held<R>) -> Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

impl<R> Delayed<R> {
    /// For a device whose descriptor is readable when it has completions.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn new(faults: Arc<Faults>, device: BorrowedFd<'_>) -> io::Result<Delayed<R>> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        let either = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for source in [device, timer.as_fd()] {
            epoll::add(&either, source, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Delayed {
            faults,
            held: BinaryHeap::new(),
            held_so_far: 0,
            failed: Vec::new(),
            timer,
            timer_due: None,
            either,
        })
    }

    /// Takes all of `requests`, asks the plan for the fate of each, and replaces them by those that are due for the device.
    /// Sets the timer when another one is due next: a device that is polled calls this many times while it holds requests, and
    /// a virtual machine leaves its processor at each setting.
    pub fn release(&mut self, requests: &mut Vec<R>, operation_of: impl Fn(&R) -> StorageOperation) {
        if requests.is_empty() && self.held.is_empty() {
            return;
        }
        let now = Instant::now();
        for request in requests.drain(..) {
            let fate = self.faults.storage(operation_of(&request));
            self.held_so_far += 1;
            let (due, number) = (now + fate.delay, self.held_so_far);
            self.held.push(Reverse(Held { due, number, request, error: fate.error }));
        }
        while self.held.peek().is_some_and(|Reverse(held)| held.due <= now) {
            let Some(Reverse(held)) = self.held.pop() else { break };
            match held.error {
                Some(error) => self.failed.push((held.request, error)),
                None => requests.push(held.request),
            }
        }
        self.set_timer(now);
    }

    fn set_timer(&mut self, now: Instant) {
        let next = self.held.peek().map(|Reverse(held)| held.due);
        if next == self.timer_due {
            return;
        }
        // Zero would disarm the timer. Setting it also clears its readable state.
        let wait = next.map(|due| due.saturating_duration_since(now));
        let wait = wait.map_or(Duration::ZERO, |wait| wait.max(Duration::from_nanos(1)));
        let value = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        match timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.timer_due = next,
            Err(error) => tracing::warn!("fault injection timer: {error}"),
        }
    }

    /// The requests that have failed, each with its errno.
    pub fn take_failed(&mut self) -> impl Iterator<Item = (R, i32)> + '_ {
        self.failed.drain(..)
    }

    /// Readable when the device has completions, or [`Delayed::release`] would find a request due.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::plan::FaultPlan;

    const SLOW: &str =
        "[[fault]]\nkind = \"slow-storage\"\noperation = \"read\"\ndelay_us_min = 5000\ndelay_us_max = 5000";
    const FAILING: &str = "[[fault]]\nkind = \"failing-storage\"\noperation = \"read\"\nerror = \"io\"";

    fn delayed(plan: &str) -> (Delayed<u32>, OwnedFd) {
        let plan = FaultPlan::parse(plan).expect("a valid plan");
        let device = eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor");
        let faults = Arc::new(Faults::new(plan, "test"));
        (Delayed::new(faults, device.as_fd()).expect("descriptors"), device)
    }

    #[test]
    fn a_slow_request_is_held_and_then_released() {
        let (mut delayed, _device) = delayed(SLOW);
        let mut requests = vec![7];
        delayed.release(&mut requests, |_| StorageOperation::Read);
        assert!(requests.is_empty());
        let deadline = Instant::now() + Duration::from_secs(10);
        while requests.is_empty() {
            assert!(Instant::now() < deadline, "it is due after 5 ms");
            let mut events = [rustix::event::PollFd::new(&delayed.either, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut events, None).expect("it becomes readable");
            delayed.release(&mut requests, |_| StorageOperation::Read);
        }
        assert_eq!(requests, [7]);
        let mut events = [rustix::event::PollFd::new(&delayed.either, rustix::event::PollFlags::IN)];
        let ready = rustix::event::poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        assert_eq!(ready, Ok(0), "nothing else is due");
    }

    #[test]
    fn a_failing_request_is_reported_and_not_released() {
        let (mut delayed, _device) = delayed(FAILING);
        let mut requests = vec![1, 2];
        delayed.release(&mut requests, |&number| match number {
            1 => StorageOperation::Read,
            _ => StorageOperation::Write,
        });
        assert_eq!(requests, [2]);
        assert_eq!(delayed.take_failed().map(|(request, _)| request).collect::<Vec<_>>(), [1]);
    }
}
