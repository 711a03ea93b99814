//! FLUSHes of regions without pager, which wait for storage. A thread carries them out: a receive pass holds the
//! device's receive lock, and no other queue pair of the device would be served meanwhile.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use terrace_memory::{AccessError, StorageFlush, Transfer, Waker};
use terrace_sync::{ArcMutexGuard, Mutex};

use crate::engine::Engine;
use crate::signals::without_signals;

/// The FLUSHes of a device that have not begun, and its thread, which ends when there are none.
#[derive(Default)]
pub(crate) struct FlushThread(Arc<Mutex<State>>);

/// The locked state.
pub(crate) type ForkLock = ArcMutexGuard<State>;

#[derive(Default)]
pub(crate) struct State {
    /// A FLUSH whose queue pair has gone meanwhile is not carried out.
    flushes: VecDeque<Weak<Flush>>,
    is_running: bool,
}

/// A FLUSH that a peer waits for.
struct Flush {
    storage: StorageFlush,
    outcome: OnceLock<Result<(), AccessError>>,
    waker: Waker,
}

impl Flush {
    fn carry_out(&self) {
        let _ = self.outcome.set(self.storage.carry_out());
        (self.waker)();
    }
}

impl fmt::Debug for Flush {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flush").field("storage", &self.storage).finish_non_exhaustive()
    }
}

impl Transfer for Flush {
    fn outcome(&self) -> Option<Result<(), AccessError>> {
        self.outcome.get().copied()
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), AccessError> {
        Err(AccessError::OutOfRange)
    }
}

impl FlushThread {
    /// Locks the state while the process forks.
    pub fn lock_for_fork(&self) -> ForkLock {
        self.0.lock_arc()
    }

    /// Carries out a FLUSH, and then calls the waker. A device without engine has no threads: the caller waits.
    ///
    /// # Errors
    /// `Flush` when there is no thread for it.
    pub fn carry_out(
        &self,
        storage: StorageFlush,
        waker: &Waker,
        engine: &Engine,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        let flush = Arc::new(Flush { storage, outcome: OnceLock::new(), waker: waker.clone() });
        if engine.has_thread() {
            self.add(&flush)?;
        } else {
            flush.carry_out();
        }
        Ok(flush)
    }

    /// Hands a FLUSH to the thread.
    ///
    /// # Errors
    /// `Flush` when the thread cannot be started.
    fn add(&self, flush: &Arc<Flush>) -> Result<(), AccessError> {
        let mut state = self.0.lock();
        if !state.is_running {
            let queue = self.0.clone();
            let builder = std::thread::Builder::new().name("terrace-flush".into());
            let spawned = without_signals(|| builder.spawn(move || run(&queue)));
            spawned.map_err(|error| {
                tracing::error!(%error, "a FLUSH fails: no thread for it");
                AccessError::Flush
            })?;
            state.is_running = true;
        }
        state.flushes.push_back(Arc::downgrade(flush));
        Ok(())
    }
}

impl State {
    /// In a forked child: the FLUSHes and the thread are the parent's.
    pub fn forget(&mut self) {
        *self = State::default();
    }
}

/// The thread: carries out all FLUSHes in the queue.
fn run(queue: &Mutex<State>) {
    loop {
        let mut state = queue.lock();
        let Some(flush) = state.flushes.pop_front() else {
            state.is_running = false;
            return;
        };
        drop(state);
        if let Some(flush) = flush.upgrade() {
            flush.carry_out();
        }
    }
}
