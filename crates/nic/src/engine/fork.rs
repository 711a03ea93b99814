//! Forking. A child inherits the memory and the forking thread, and no other thread. So no other thread may hold a lock
//! during the fork, and the child needs an engine of its own, if it uses the device at all.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use terrace_sync::ArcMutexGuard;

use crate::colocated;
use crate::device::Device;
use crate::engine::Handle;
use crate::error::Error;
use crate::forwarding;
use crate::local::{ForkLock, Sockets};
use crate::progress_callback;
use crate::qp::QueuePair;
use crate::semaphore::Doorbell;
use crate::tx::Receiver;

/// While it exists, the engine and the thread for same-host peers hold no lock and take none. Other threads may still
/// hold the device's locks, and take them: so locks whose holders call the device are taken now, before
/// [`ParkedThreads::lock`].
#[must_use = "the engine waits until the pause that `lock` returns has ended"]
pub struct ParkedThreads {
    device: Arc<Device>,
    sockets: ArcMutexGuard<Option<Sockets>>,
}

/// While it exists, the device's threads hold no lock, no thread receives, and the locks are held that
/// `resume_in_child` takes: another thread of the program may be in the middle of a verb. The forking thread keeps it
/// from just before the fork, and ends it in the parent and in the child.
#[must_use = "resume in the parent and in the child"]
pub struct ForkPause {
    device: Arc<Device>,
    receiving: Option<ArcMutexGuard<Receiver<QueuePair>>>,
    local: Option<ForkLock>,
    handle: ArcMutexGuard<Handle>,
    callbacks: progress_callback::ForkLock,
    forwarding: forwarding::ForkLock,
}

/// How long the forking thread sleeps between checks whether the engine is at rest.
const REST: Duration = Duration::from_micros(20);

/// How long a child without descriptors or threads for an engine goes on without one before it tries again.
const RESTART_NS: u64 = 1_000_000_000;

impl Device {
    /// Brings the device's threads to rest before `fork`. A process parks the threads of all of its devices before it
    /// locks one: the engine of one device forwards packets to another.
    pub fn park_for_fork(self: &Arc<Self>) -> ParkedThreads {
        let sockets = self.local.lock_sockets();
        let engine = &self.engine;
        engine.pause.begin();
        let running = engine.handle.lock().thread.is_some() && !engine.missing.load(Ordering::SeqCst);
        if running {
            engine.wake();
            while !engine.pause.is_parked() && !engine.stopping.load(Ordering::SeqCst) {
                std::thread::sleep(REST);
            }
        }
        ParkedThreads { device: self.clone(), sockets }
    }

    /// Starts the engine of a forked child, at its first call that needs one. A child that cannot have one now makes
    /// progress by its own polls only, and tries again at a later call.
    #[cold]
    pub(crate) fn restart_engine(self: &Arc<Self>) {
        let (engine, now) = (&self.engine, self.clock.now());
        if now.0 < engine.restart_at.load(Ordering::Relaxed) || !engine.missing.swap(false, Ordering::SeqCst)
        {
            return;
        }
        if let Err(error) = self.start_own_engine() {
            tracing::warn!(%error, "no engine in this forked process for now: it makes progress while it polls");
            engine.restart_at.store(now.after_ns(RESTART_NS).0, Ordering::Relaxed);
            engine.missing.store(true, Ordering::SeqCst);
        }
    }

    /// Starts an engine with a doorbell of this process.
    fn start_own_engine(self: &Arc<Self>) -> Result<(), Error> {
        let doorbell = Arc::new(Doorbell::new()?);
        self.engine.handle.lock().doorbell = doorbell;
        self.start_engine()
    }
}

impl ParkedThreads {
    /// Takes the device's locks. Verbs that other threads of the program call during the fork are the program's
    /// responsibility, as with every library.
    pub fn lock(self) -> ForkPause {
        let ParkedThreads { device, sockets } = self;
        let receiving = Some(device.rx.lock_arc());
        device.memory.before_fork();
        let (handle, callbacks) = (device.engine.handle.lock_arc(), device.callbacks.lock_for_fork());
        // Behind the callbacks, which may post work requests.
        let local = Some(device.local.lock_for_fork(sockets));
        let forwarding = device.forwarding.lock_for_fork();
        ForkPause { device, receiving, local, handle, callbacks, forwarding }
    }
}

impl ForkPause {
    /// Goes on, in the parent.
    pub fn resume_in_parent(mut self) {
        self.device.memory.after_fork_parent();
        self.receiving = None;
        self.local = None;
        self.device.engine.pause.end();
    }

    /// Goes on, in the child. Its engine starts with its first call of a verb.
    pub fn resume_in_child(mut self) {
        let engine = &self.device.engine;
        engine.sleepers.fetch_sub(engine.sleeping_threads.swap(0, Ordering::SeqCst), Ordering::SeqCst);
        self.device.memory.after_fork_child();
        self.device.callbacks.forget(&mut self.callbacks);
        colocated::remove(&self.device);
        self.forwarding.forget();
        if let Some(lock) = self.local.take() {
            self.device.local.forget(lock);
        }
        if let Some(receiver) = &mut self.receiving {
            // The rings are the parent's.
            std::mem::forget(std::mem::take(&mut receiver.peer_rx));
        }
        self.receiving = None;
        // The parent executes them.
        self.device.runnable.clear();
        // The handle is of a thread that this process does not have: it must be neither joined nor detached.
        std::mem::forget(self.handle.thread.take());
        engine.announced.wake_up();
        engine.restart_at.store(0, Ordering::Relaxed);
        engine.missing.store(engine.wanted, Ordering::SeqCst);
        engine.pause.forget();
    }
}
