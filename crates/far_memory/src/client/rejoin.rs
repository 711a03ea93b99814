//! The threads that use lost nodes again, of a client that has two copies of each page. One finds nodes that have ended, and
//! tries lost ones. The other one has pages copied to those that have joined: it does not wait for a node that is tried.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use terrace_nic::{Cq, Device, Pd};
use terrace_sync::Mutex;

use super::connect_error::ConnectError;
use super::link::Link;
use super::operations::Operations;
use super::refill::COPY_INTERVAL;
use super::transport::Asked;

/// How often connections are checked, and whether there is something to copy.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// The time from the loss of a node to the first attempt, and between attempts.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The most that it grows to for a node that is lost again and again: such a node costs operations in flight the client's
/// timeout each time.
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// A node that was used for so long since it has joined is as good as any other.
const STEADY: Duration = Duration::from_secs(60);

/// What the threads need of their client.
pub(super) struct Rejoining {
    pub device: Arc<Device>,
    pub pd: Arc<Pd>,
    pub cq: Arc<Cq>,
    pub name: String,
    pub entries: u64,
    pub depth: u32,
    pub operations: Arc<Mutex<Operations>>,
}

/// The running threads. They end soon after this is dropped: at the end of an attempt to connect, which is bounded.
pub(super) struct RejoinThreads {
    stop: Arc<AtomicBool>,
    threads: [Thread; 2],
}

impl RejoinThreads {
    pub fn start(rejoining: Rejoining) -> std::io::Result<RejoinThreads> {
        let (rejoining, stop) = (Arc::new(rejoining), Arc::new(AtomicBool::new(false)));
        let start = |name: &str, run: fn(&Rejoining, &AtomicBool)| {
            let (rejoining, stopped) = (rejoining.clone(), stop.clone());
            let builder = std::thread::Builder::new().name(name.into());
            Ok(builder.spawn(move || run(&rejoining, &stopped))?.thread().clone())
        };
        let rejoin = start("terrace-rejoin", Rejoining::rejoin)?;
        let refill = start("terrace-refill", Rejoining::refill).inspect_err(|_: &std::io::Error| {
            stop.store(true, Ordering::Release);
            rejoin.unpark();
        })?;
        Ok(RejoinThreads { stop, threads: [rejoin, refill] })
    }
}

impl Drop for RejoinThreads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.threads.iter().for_each(Thread::unpark);
    }
}

impl Rejoining {
    fn rejoin(&self, stopped: &AtomicBool) {
        let count = self.operations.lock().links.len();
        let mut attempts = vec![Attempts::default(); count];
        while !stopped.load(Ordering::Acquire) {
            self.check_nodes(&mut attempts, stopped);
            std::thread::park_timeout(CHECK_INTERVAL);
        }
    }

    fn refill(&self, stopped: &AtomicBool) {
        while !stopped.load(Ordering::Acquire) {
            let goes_on = self.advance(stopped);
            std::thread::park_timeout(if goes_on { COPY_INTERVAL } else { CHECK_INTERVAL });
        }
    }

    /// Begins and ends copies. Returns whether there is more to do soon.
    fn advance(&self, stopped: &AtomicBool) -> bool {
        let (mut operations, now) = (self.operations.lock(), Instant::now());
        // The device ends after that.
        if stopped.load(Ordering::Acquire) {
            return false;
        }
        let goes_on = operations.advance_refill(now);
        if goes_on && let Err(error) = operations.advance(&self.cq, now) {
            tracing::debug!(%error, "completions are lost");
        }
        goes_on
    }

    /// Finds nodes that have ended, and tries lost ones whose time has come.
    fn check_nodes(&self, attempts: &mut [Attempts], stopped: &AtomicBool) {
        let now = Instant::now();
        let due = {
            let mut operations = self.operations.lock();
            if stopped.load(Ordering::Acquire) {
                return;
            }
            operations.find_ended_nodes(now);
            let lost = operations.links.iter().zip(attempts.iter_mut()).enumerate();
            let due = lost.filter_map(|(node, (link, attempts))| {
                let is_due = attempts.is_due(link.lost.is_some(), now);
                is_due.then_some((node, link.address))
            });
            due.collect::<Vec<_>>()
        };
        for (node, address) in due {
            let Rejoining { device, pd, cq, name, entries, depth, .. } = self;
            let asked = Asked { device, pd, cq, name, entries: *entries, depth: *depth };
            match Link::connect(address, &asked) {
                Ok(link) => {
                    let mut operations = self.operations.lock();
                    if stopped.load(Ordering::Acquire) {
                        return;
                    }
                    operations.rejoin(node, link);
                    attempts[node].note_joined(Instant::now());
                }
                Err(error) => {
                    tracing::debug!(node = %address, %error, "a lost memory node cannot be used");
                    // That a node is not there needs no further word.
                    let is_absent = matches!(error, ConnectError::Unreachable(..));
                    let refusal = (!is_absent).then(|| error.to_string());
                    self.operations.lock().links[node].note_refusal(refusal);
                    attempts[node].note_failed(Instant::now());
                }
            }
        }
    }
}

/// When a lost node is tried.
#[derive(Clone, Copy, Debug, Default)]
struct Attempts {
    pause: Duration,
    /// When it is tried next; `None` while the node is used.
    due: Option<Instant>,
    joined: Option<Instant>,
}

impl Attempts {
    /// Whether the node is to be tried now. Notes that it is lost, if that is new.
    fn is_due(&mut self, is_lost: bool, now: Instant) -> bool {
        if !is_lost {
            return false;
        }
        let due = *self.due.get_or_insert_with(|| {
            let is_steady = self.joined.is_none_or(|joined| now.saturating_duration_since(joined) >= STEADY);
            self.pause = if is_steady { PAUSE_MIN } else { (2 * self.pause).clamp(PAUSE_MIN, PAUSE_MAX) };
            now + self.pause
        });
        due <= now
    }

    fn note_failed(&mut self, now: Instant) {
        self.due = Some(now + self.pause);
    }

    fn note_joined(&mut self, now: Instant) {
        (self.due, self.joined) = (None, Some(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pause until a node that was lost at `now` is due.
    fn pause(attempts: &mut Attempts, now: Instant) -> Duration {
        assert!(!attempts.is_due(true, now));
        let due = attempts.due.expect("a lost node is tried again");
        assert!(attempts.is_due(true, due));
        due - now
    }

    #[test]
    fn a_node_that_is_lost_again_soon_waits_twice_as_long_up_to_five_minutes() {
        let (mut attempts, mut now) = (Attempts::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..10 {
            pauses.push(pause(&mut attempts, now).as_secs());
            attempts.note_joined(now);
            now += STEADY / 2;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        now += STEADY;
        assert_eq!(pause(&mut attempts, now), PAUSE_MIN);
        // Attempts that fail come at the same pace.
        attempts.note_failed(now);
        assert!(!attempts.is_due(true, now) && attempts.is_due(true, now + PAUSE_MIN));
    }

    #[test]
    fn a_node_that_is_used_is_not_tried() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        assert!(!attempts.is_due(false, now) && attempts.due.is_none());
    }
}
