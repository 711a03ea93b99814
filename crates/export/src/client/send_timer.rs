//! The time after which requests leave that no call has taken along.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use terrace_sync::Mutex;

/// How long a request may wait for a call that takes it along.
const DELAY: Duration = Duration::from_millis(5);

/// A timer that the device's engine sleeps on, which is set once for many requests: setting one can take as long as a message
/// (a virtual machine leaves its processor).
#[derive(Debug)]
pub struct SendTimer {
    timer: OwnedFd,
    is_set: AtomicBool,
    /// When it expires, if it is set.
    end: Mutex<Instant>,
}

impl SendTimer {
    /// A timer that is not set.
    ///
    /// # Errors
    /// The system's, if there is no descriptor left.
    pub fn new() -> rustix::io::Result<SendTimer> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        Ok(SendTimer { timer, is_set: AtomicBool::new(false), end: Mutex::new(Instant::now()) })
    }

    /// Sets it, unless it is set.
    pub fn set(&self) {
        if self.is_set.load(Ordering::SeqCst) {
            return;
        }
        let mut end = self.end.lock();
        if !self.is_set.swap(true, Ordering::SeqCst) {
            *end = Instant::now() + DELAY;
            self.arm(DELAY);
        }
    }

    /// Whether it has expired since it was set. It is not set any more then.
    pub fn take(&self) -> bool {
        if !self.is_set.load(Ordering::SeqCst) {
            return false;
        }
        let end = self.end.lock();
        let is_over = Instant::now() >= *end;
        if is_over {
            // Its descriptor is not readable any more.
            self.arm(Duration::ZERO);
            self.is_set.store(false, Ordering::SeqCst);
        }
        is_over
    }

    /// Has the descriptor become readable after so long; never, and not readable now, for zero.
    fn arm(&self, delay: Duration) {
        let it_value = Timespec { tv_sec: delay.as_secs() as i64, tv_nsec: delay.subsec_nanos().into() };
        let once = Itimerspec { it_interval: Timespec::default(), it_value };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            tracing::error!(%error, "a timer cannot be set");
        }
    }
}

impl AsFd for SendTimer {
    /// Readable once it has expired.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
