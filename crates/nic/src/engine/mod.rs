//! The engine: a thread that makes progress when no thread of the program does. A passive target of READs and WRITEs
//! never calls a verb after its setup, but its timers have to be served.
//!
//! ```text
//!            packet, deadline, doorbell                    the program polls
//!   +-------+ ---------------------> +----------+ ------------------------> +---------+
//!   | ARMED |   sleeps on the        | spinning |                           | STANDBY |  sleeps in ticks
//!   +-------+ <--------------------- +----------+ <------------------------ +---------+
//!              nothing for 50 µs                    the program stopped
//!                                                   polling, or armed a
//!                                                   completion queue
//! ```
//!
//! While the program polls, its own thread does all the work, and the engine would only take a processor away from
//! it. When idle, the engine sleeps in the kernel without a limit of time.

mod announce;
mod driver;
pub(crate) mod fork;
mod pause;
mod priority;
pub(crate) mod start;
mod stat_server;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use terrace_fabric::udp::BURST_MAX;
use terrace_sync::{Mutex, SpinBudget};
use terrace_transport::Time;

use crate::error::Error;
use crate::semaphore::Doorbell;

use announce::{Announced, Mode};
use pause::Pause;

/// Polls after which the program's thread checks whether the engine has noticed that the program polls.
const POLLS_PER_CHECK: u32 = 32;

/// After so many full bursts the engine is behind: more datagrams have piled up than windows usually let peers send.
const FULL_BURSTS_BEHIND: u32 = 8;

/// The doorbell and the handle of the thread.
pub(crate) struct Handle {
    /// Replaced after a fork, because the descriptor is shared with the parent.
    doorbell: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

/// The state that the engine shares with the rest of the device.
pub(crate) struct Engine {
    wanted: bool,
    stat_socket: bool,
    handle: Arc<Mutex<Handle>>,
    /// Whether the thread has yet to be started, because the process is a forked child.
    missing: AtomicBool,
    /// When a child whose attempt to start it has failed tries again, by the device's clock; 0 before the first attempt.
    restart_at: AtomicU64,
    stopping: AtomicBool,
    pause: Pause,
    announced: Announced,
    /// Counts polls of empty completion queues, roughly: only whether it changes matters. A poll that finds entries
    /// makes no progress: a program that always finds some must not keep the engine in standby, or nobody serves its
    /// peers.
    polls: AtomicU32,
    /// Completion queues that are armed for an event, and threads of the program that sleep until the engine has made progress.
    sleepers: AtomicI32,
    /// The threads among them, which a forked child does not have.
    sleeping_threads: AtomicI32,
    /// How long threads that wait for events poll for packets themselves.
    waiting: SpinBudget,
    /// Receives in a row that returned full bursts.
    full_bursts: AtomicU32,
}

impl Engine {
    pub fn new(wanted: bool, stat_socket: bool) -> Result<Engine, Error> {
        Ok(Engine {
            wanted,
            stat_socket,
            handle: Arc::new(Mutex::new(Handle { doorbell: Arc::new(Doorbell::new()?), thread: None })),
            missing: AtomicBool::new(false),
            restart_at: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            pause: Pause::default(),
            announced: Announced::new(),
            polls: AtomicU32::new(0),
            sleepers: AtomicI32::new(0),
            sleeping_threads: AtomicI32::new(0),
            waiting: SpinBudget::default(),
            full_bursts: AtomicU32::new(0),
        })
    }

    /// The doorbell that wakes it.
    pub fn doorbell(&self) -> Arc<Doorbell> {
        self.handle.lock().doorbell.clone()
    }

    /// Wakes the engine if it sleeps.
    pub fn wake(&self) {
        if self.wanted {
            self.handle.lock().doorbell.ring();
        }
    }

    /// Makes the engine serve the timers by then.
    pub fn wake_by(&self, deadline: Time) {
        if self.announced.sleeps_past(deadline) {
            self.wake();
        }
    }

    /// Whether ACKs may be deferred: in standby the engine sends them if the program does not.
    pub fn sends_deferred_acks(&self) -> bool {
        !self.wanted || self.is_in_standby()
    }

    /// Whether the engine leaves progress to the program, which polls, and looks every tick whether it still does.
    #[inline]
    pub fn is_in_standby(&self) -> bool {
        self.announced.is_mode(Mode::Standby)
    }

    /// Whether any completion queue is armed for an event, or any thread sleeps until the engine has made progress.
    #[inline]
    pub fn has_sleepers(&self) -> bool {
        self.sleepers.load(Ordering::Relaxed) > 0
    }

    /// Whether this process is a forked child that has not used the device.
    pub fn is_missing(&self) -> bool {
        self.missing.load(Ordering::Relaxed) && self.restart_at.load(Ordering::Relaxed) == 0
    }

    /// Notes how many datagrams a receive has brought. Called under the receive lock.
    #[inline]
    pub fn note_burst(&self, received: usize) {
        let before = self.full_bursts.load(Ordering::Relaxed);
        let full_bursts = if received >= BURST_MAX as usize { before.saturating_add(1) } else { 0 };
        if full_bursts != before {
            self.full_bursts.store(full_bursts, Ordering::Relaxed);
        }
    }

    /// Whether packets pile up faster than they are handled.
    fn is_behind(&self) -> bool {
        self.full_bursts.load(Ordering::Relaxed) >= FULL_BURSTS_BEHIND
    }

    /// Ends the thread and waits for it.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake();
        let thread = self.handle.lock().thread.take();
        if let Some(thread) = thread
            && !self.missing.load(Ordering::Acquire)
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }

    /// Counts a poll that makes progress. An engine that sleeps on the network does not notice by itself that the
    /// program polls: the program has taken each packet before the engine is awake. So the program wakes it now and
    /// then.
    #[inline]
    fn note_poll(&self) -> u32 {
        // Threads that count at the same time may lose counts. That does no harm and is cheaper.
        let polls = self.polls.load(Ordering::Relaxed).wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
        if polls.is_multiple_of(POLLS_PER_CHECK) {
            self.ask_to_stand_by();
        }
        polls
    }

    #[cold]
    fn ask_to_stand_by(&self) {
        if self.announced.is_mode(Mode::Armed) && !self.has_sleepers() {
            self.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_is_behind_while_every_receive_is_a_full_burst() {
        let engine = Engine::new(false, false).expect("an engine");
        let full = BURST_MAX as usize;
        for _ in 1..FULL_BURSTS_BEHIND {
            engine.note_burst(full);
            assert!(!engine.is_behind());
        }
        engine.note_burst(full);
        assert!(engine.is_behind());
        engine.note_burst(full - 1);
        assert!(!engine.is_behind());
        engine.note_burst(full);
        assert!(!engine.is_behind());
    }
}
