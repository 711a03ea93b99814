//! The threads that read the kernel's requests take turns, so that one of them is awake when the next request comes.
//!
//! ```text
//!               the kernel has a request          no other thread reads: polls, then reads
//!   (reading) ----------------------------> (busy) ----------------------------------------> (reading)
//!       ^                                     |
//!       |                                     | another one reads
//!       |      100 ms, or a busy one sleeps   v
//!       +---------------------------------- (waiting)
//! ```
//!
//! The kernel wakes a thread that sleeps in `read` for each request, which can take longer than the request (decision 80). A thread that
//! polls needs that only if no other one sleeps there. So the others wait here, while one reads or is busy without sleeping.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrace_sync::{Condvar, Mutex, SpinBudget};

/// A waiting thread reads after so long, whatever the others do: a busy one may sleep where it does not call [`pass`].
const WAIT_MAX: Duration = Duration::from_millis(100);

thread_local! {
    /// The queue of requests that this thread reads.
    static TURNS: RefCell<Option<Arc<Turns>>> = const { RefCell::new(None) };
}

/// The threads of a mount that read the kernel's requests.
pub(crate) struct Turns {
    /// The connection to the kernel. Until it is known, all threads read.
    device: OnceLock<Arc<OwnedFd>>,
    threads: Mutex<Threads>,
    /// A waiting thread is to read.
    passed: Condvar,
    /// See [`WAIT_MAX`].
    wait_max: Duration,
    polls: SpinBudget,
}

/// What the threads do. Others are busy.
struct Threads {
    /// So many are in `read`, or about to be.
    reading: usize,
    waiting: usize,
}

/// A request that a thread has read. The thread takes its turn again when this is dropped.
pub(crate) struct Turn<'a>(&'a Turns);

/// Has another thread read, if this one is the only one that does: it is about to sleep.
pub(crate) fn pass() {
    TURNS.with_borrow(|turns| {
        if let Some(turns) = turns {
            turns.pass();
        }
    });
}

impl Turns {
    /// Those of so many threads, which read now.
    pub(crate) fn new(threads: usize) -> Arc<Turns> {
        Arc::new(Turns::with_wait(threads, WAIT_MAX))
    }

    fn with_wait(reading: usize, wait_max: Duration) -> Turns {
        let threads = Mutex::new(Threads { reading, waiting: 0 });
        let (device, passed, polls) = (OnceLock::new(), Condvar::default(), SpinBudget::default());
        Turns { device, threads, passed, wait_max, polls }
    }

    /// The connection to the kernel.
    pub(crate) fn set_device(&self, device: Arc<OwnedFd>) {
        // It is set once.
        let _ = self.device.set(device);
    }

    /// This thread has read a request. If the kernel has another one already, another thread reads that.
    pub(crate) fn begin(self: &Arc<Turns>) -> Turn<'_> {
        TURNS.with_borrow_mut(|turns| {
            turns.get_or_insert_with(|| {
                terrace_export::call_before_sleep(pass);
                self.clone()
            });
        });
        self.end_reading();
        Turn(self)
    }

    fn end_reading(&self) {
        let is_last = {
            let mut threads = self.threads.lock();
            threads.reading -= 1;
            threads.reading == 0
        };
        if is_last && self.is_readable() {
            self.pass();
        }
    }

    fn pass(&self) {
        let threads = self.threads.lock();
        if threads.reading == 0 && threads.waiting > 0 {
            self.passed.notify_one();
        }
    }

    /// Waits while another thread reads, and returns whether there was one. This thread reads then.
    fn begin_reading(&self) -> bool {
        let mut threads = self.threads.lock();
        let waits = threads.reading > 0 && self.device.get().is_some();
        if waits {
            threads.waiting += 1;
            let end = Instant::now() + self.wait_max;
            while threads.reading > 0 && !self.passed.wait_until(&mut threads, end) {}
            threads.waiting -= 1;
        }
        threads.reading += 1;
        waits
    }

    /// Whether the kernel has a request, or the connection has ended.
    fn is_readable(&self) -> bool {
        let Some(device) = self.device.get() else { return false };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // After an error the thread that reads finds out.
        !matches!(poll(&mut [PollFd::new(device, PollFlags::IN)], Some(&now)), Ok(0))
    }

    /// Polls for the next request, for as long as that has paid lately. Other threads get the processor if they need it.
    fn poll(&self) {
        let end = Instant::now() + self.polls.take();
        let mut is_here = false;
        while !is_here && Instant::now() < end {
            is_here = self.is_readable();
            if !is_here {
                std::thread::yield_now();
            }
        }
        self.polls.note(is_here);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // A program that has its answer often sends the next request soon.
        if !self.0.begin_reading() {
            self.0.poll();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeWriter, Write};

    use super::*;

    /// Turns of threads that wait without an end, and the other end of their connection.
    fn turns(reading: usize) -> (Turns, PipeWriter) {
        let turns = Turns::with_wait(reading, Duration::from_secs(3600));
        let (device, kernel) = std::io::pipe().unwrap();
        turns.set_device(Arc::new(device.into()));
        (turns, kernel)
    }

    fn wait_until_one_waits(turns: &Turns) {
        while turns.threads.lock().waiting == 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_waits_while_another_one_reads_and_reads_when_that_one_passes() {
        let (turns, _kernel) = turns(2);
        turns.end_reading();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| turns.begin_reading());
            wait_until_one_waits(&turns);
            // The other one sleeps with its request.
            turns.end_reading();
            turns.pass();
            assert!(waiting.join().unwrap());
        });
        assert_eq!(turns.threads.lock().reading, 1);
    }

    #[test]
    fn a_request_that_is_there_already_is_read_by_a_thread_that_waits() {
        let (turns, mut kernel) = turns(2);
        turns.end_reading();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| turns.begin_reading());
            wait_until_one_waits(&turns);
            kernel.write_all(b"request").unwrap();
            turns.end_reading();
            assert!(waiting.join().unwrap());
        });
    }

    #[test]
    fn a_thread_does_not_wait_if_no_other_one_reads_or_the_one_that_should_does_not() {
        let (turns, _kernel) = turns(1);
        turns.end_reading();
        assert!(!turns.begin_reading());
        let late = Turns::with_wait(1, Duration::ZERO);
        late.set_device(turns.device.get().unwrap().clone());
        assert!(late.begin_reading());
        assert_eq!(late.threads.lock().reading, 2);
    }
}
