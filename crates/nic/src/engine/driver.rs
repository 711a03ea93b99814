//! The engine's thread.

use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;
use terrace_sync::SpinBudget;
use terrace_transport::Time;

use super::stat_server::StatServer;
use super::{Engine, Mode, priority::Priority};
use crate::ack::AtPassEnd;
use crate::device::Device;
use crate::forwarding::Inbound;
use crate::semaphore::Doorbell;

/// How often the engine checks, while the program polls, whether it still does.
const TICK_NS: u64 = 1_000_000;

/// How long the program gets to answer what the engine has put into its memory, before the engine sends the ACK alone.
/// Meanwhile the engine sleeps: the program's thread may need this processor.
const ANSWER_NS: u64 = 60_000;

/// A program that polls at least this often polls busily.
const BUSY_POLL_NS: u64 = 125_000;

/// A program that has polled within this time may well answer at once.
const ACTIVE_NS: u64 = 100_000_000;

/// How long packets must not have piled up before the engine returns to its normal priority.
const CATCH_UP_NS: u64 = 50_000_000;

/// How often an engine that does not sleep checks for forwarded packets.
const FORWARDED_NS: u64 = 50_000;

/// How long a paused engine sleeps between checks whether the fork is over.
const PAUSE: Duration = Duration::from_micros(100);

/// The kernel may not defer the engine's short sleeps to save wakeups.
const TIMER_SLACK_NS: u64 = 1_000;

/// The thread's main function.
pub(super) fn run(device: Arc<Device>, doorbell: Arc<Doorbell>, stat: Option<StatServer>) {
    // On failure the ticks are late, and nothing worse.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK_NS));
    terrace_sync::allow_bias();
    let polls_seen = device.engine.polls.load(Ordering::Relaxed);
    let mut driver = Driver {
        device: &device,
        engine: &device.engine,
        doorbell: &doorbell,
        stat,
        polls_seen,
        checked_at: device.clock.now(),
        polled_at: None,
        budget: SpinBudget::default(),
        priority: Priority::default(),
        behind_at: None,
        due: None,
        forwarded_at: Time(0),
    };
    driver.run();
}

struct Driver<'a> {
    device: &'a Arc<Device>,
    engine: &'a Engine,
    doorbell: &'a Doorbell,
    stat: Option<StatServer>,
    /// The count of polls at the last check.
    polls_seen: u32,
    /// The time of that check.
    checked_at: Time,
    /// When the program was last seen to poll busily.
    polled_at: Option<Time>,
    budget: SpinBudget,
    priority: Priority,
    /// When packets were last seen to pile up.
    behind_at: Option<Time>,
    /// The timer that was due when the engine last went to sleep.
    due: Option<Time>,
    /// When forwarded packets were last checked for, without sleeping on them.
    forwarded_at: Time,
}

impl Driver<'_> {
    fn run(&mut self) {
        let mut mode = Mode::Armed;
        while !self.engine.stopping.load(Ordering::SeqCst) {
            self.engine.pause.park(|| std::thread::sleep(PAUSE));
            self.engine.announced.set_mode(mode);
            mode = match mode {
                Mode::Armed => self.armed(),
                Mode::Standby => self.standby(),
            };
        }
    }

    /// Sleeps until there is something to do, and does it.
    fn armed(&mut self) -> Mode {
        let deadline = self.device.timers.next();
        self.engine.announced.fall_asleep(deadline);
        // A thread that adds work after these checks sees that the engine sleeps, and rings.
        let has_pending = self.device.fall_asleep_at_rings();
        let wanted = has_pending || self.device.wants_pass() || self.device.callbacks.are_requested();
        let awaited = self.device.timers.next() == deadline && !wanted;
        // Still due: another thread has the receive lock, and needs a processor to handle what has arrived.
        let is_left = deadline.is_some() && self.due == deadline;
        let timeout = match awaited {
            true if is_left => Some(timespec(TICK_NS)),
            true => deadline.map(|deadline| self.time_until(deadline)),
            false => Some(Timespec::default()),
        };
        self.due = deadline.filter(|deadline| *deadline <= self.now());
        let descriptors = self.device.port.descriptors();
        let callbacks = self.device.callbacks.all();
        let others: SmallVec<[BorrowedFd<'_>; 2]> =
            callbacks.iter().filter_map(|callback| callback.descriptor()).collect();
        self.sleep(&descriptors, &others, timeout);
        self.engine.announced.wake_up();
        self.device.wake_up_at_rings();
        if self.program_polls() {
            return Mode::Standby;
        }
        let active = |polled_at: Time| self.now().0.saturating_sub(polled_at.0) < ACTIVE_NS;
        match self.polled_at.is_some_and(active) {
            true => self.take_over(),
            false => self.spin(),
        }
    }

    /// Sleeps for a tick, and takes over if the program did not poll meanwhile.
    fn standby(&mut self) -> Mode {
        self.sleep(&[], &[], Some(timespec(TICK_NS)));
        if self.program_polls() {
            if self.device.timers.is_due(self.now()) {
                self.device.progress();
            }
            return Mode::Standby;
        }
        if self.engine.sleepers.load(Ordering::SeqCst) > 0 {
            return self.spin();
        }
        self.take_over()
    }

    /// The program was busy lately and does not poll now: it may read its memory instead, and answer what it finds
    /// there. Its answer and the ACK then leave together. That keeps two such programs in the state in which each of
    /// them finds everything with its own polls.
    fn take_over(&mut self) -> Mode {
        if !self.device.advance(Some(self.now()), None, false, || AtPassEnd::Keep) {
            return Mode::Armed;
        }
        self.sleep(&[], &[], Some(timespec(ANSWER_NS)));
        if self.program_polls() {
            return Mode::Standby;
        }
        self.spin()
    }

    /// Makes progress until nothing has happened for a while, or the program takes over.
    fn spin(&mut self) -> Mode {
        let mut quiet_since: Option<Time> = None;
        let mut budget_ns = self.budget.take().as_nanos() as u64;
        loop {
            let now = self.now();
            if self.device.advance(Some(now), None, false, || AtPassEnd::Release) {
                if quiet_since.take().is_some() {
                    self.budget.note(true);
                    budget_ns = self.budget.take().as_nanos() as u64;
                }
            } else if self.priority.is_raised() || now.0 - quiet_since.get_or_insert(now).0 >= budget_ns {
                self.budget.note(false);
                return Mode::Armed;
            }
            self.keep_up(now);
            self.take_passed_on(now);
            if self.program_polls() {
                return Mode::Standby;
            }
            if self.engine.stopping.load(Ordering::Relaxed) || self.engine.pause.is_wanted() {
                return Mode::Armed;
            }
        }
    }

    /// Takes forwarded packets while the engine does not sleep on them.
    fn take_passed_on(&mut self, now: Time) {
        if now.0 - self.forwarded_at.0 < FORWARDED_NS {
            return;
        }
        self.forwarded_at = now;
        if let Some(inbound) = self.device.forwarding.inbound() {
            inbound.serve(self.device);
        }
    }

    /// Raises the priority while packets pile up, and a little longer: the next packets are then handled when they
    /// come.
    fn keep_up(&mut self, now: Time) {
        if self.engine.is_behind() {
            self.behind_at = Some(now);
        }
        self.priority.set_raised(self.behind_at.is_some_and(|at| now.0 - at.0 < CATCH_UP_NS));
    }

    /// Sleeps on the doorbell, the status socket, forwarding, these descriptors of the port, and those of callbacks.
    fn sleep(&mut self, port: &[BorrowedFd<'_>], others: &[BorrowedFd<'_>], timeout: Option<Timespec>) {
        let blocked_gid = self.device.tx.blocked_gid();
        // Without the port's descriptors, the program polls, and retries itself what waits.
        let retries = !port.is_empty();
        let blocked_gid = blocked_gid.filter(|_| retries);
        let refusing = blocked_gid.and_then(|gid_index| self.device.port.sending_descriptor(gid_index));
        let is_any_awaited = blocked_gid.is_some() && refusing.is_none();
        let writable = if is_any_awaited { PollFlags::OUT } else { PollFlags::empty() };
        let inbound = self.device.forwarding.inbound();
        let inbound_fd = inbound.as_deref().map(Inbound::fd);
        let mut fds: SmallVec<[PollFd<'_>; 8]> = SmallVec::new();
        let doorbell_fd = self.doorbell.fd();
        fds.push(PollFd::new(&doorbell_fd, PollFlags::IN));
        fds.extend(port.iter().map(|fd| PollFd::new(fd, PollFlags::IN | writable)));
        fds.extend(refusing.iter().map(|fd| PollFd::new(fd, PollFlags::OUT)));
        fds.extend(others.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let inbound_at = fds.len();
        fds.extend(inbound_fd.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let stat_fd = self.stat.as_ref().map(StatServer::fd);
        fds.extend(stat_fd.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        // An error here can only be a lack of memory; the engine then merely wakes too early.
        let _ = poll(&mut fds, timeout.as_ref());
        let rung = !fds[0].revents().is_empty();
        let has_clients = stat_fd.is_some() && fds.last().is_some_and(|fd| !fd.revents().is_empty());
        let has_forwarded = inbound_fd.is_some() && !fds[inbound_at].revents().is_empty();
        drop(fds);
        if rung {
            self.doorbell.silence();
        }
        if has_forwarded && let Some(inbound) = &inbound {
            inbound.serve(self.device);
        }
        if has_clients && let Some(stat) = &self.stat {
            stat.serve(self.device);
        }
    }

    /// Whether, since the last call, the program has polled so busily that the engine should not compete with it. A
    /// program that polls only now and then is served better by the engine. Programs that wait for events do not poll
    /// busily.
    fn program_polls(&mut self) -> bool {
        let (polls, now) = (self.engine.polls.load(Ordering::Relaxed), self.now());
        let polled = polls.wrapping_sub(self.polls_seen);
        let elapsed_ns = now.0 - self.checked_at.0;
        (self.polls_seen, self.checked_at) = (polls, now);
        let busily = elapsed_ns <= u64::from(polled) * BUSY_POLL_NS;
        let polls = polled > 0 && busily && self.engine.sleepers.load(Ordering::SeqCst) <= 0;
        if polls {
            self.polled_at = Some(now);
        }
        polls
    }

    fn now(&self) -> Time {
        self.device.clock.now()
    }

    fn time_until(&self, deadline: Time) -> Timespec {
        timespec(deadline.0.saturating_sub(self.now().0))
    }
}

fn timespec(ns: u64) -> Timespec {
    let duration = Duration::from_nanos(ns);
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}
