//! Opening a device and closing it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_memory::Registry;
use terrace_shm::GracePeriod;
use terrace_sync::{Backlog, Condvar, Mutex};

use crate::address;
use crate::device::{Device, DeviceConfig, NicCounters};
use crate::engine::Engine;
use crate::error::Error;
use crate::events::AsyncQueue;
use crate::forwarding::Forwarding;
use crate::in_flight::InFlightBudgets;
use crate::limits::Quotas;
use crate::local::LocalPath;
use crate::management::Management;
use crate::multicast_table::MulticastTable;
use crate::progress_callback::ProgressCallbacks;
use crate::rate_limiter::RateLimiter;
use crate::table::QpTable;
use crate::timers::Timers;
use crate::tx::{Pending, Receiver, TxPool};
use crate::window::in_flight_bytes_max;
use crate::work_queue::numbers::Numbers;
use crate::work_queue::runnable::Runnable;
use crate::xrc_table::XrcTable;

/// How long closing a device waits for same-host peers in the middle of accesses.
const READERS_AT_CLOSE: Duration = Duration::from_secs(1);

impl Device {
    /// Opens a device and starts its engine.
    ///
    /// # Errors
    /// When the system has no descriptors or threads left.
    pub fn open(config: DeviceConfig) -> Result<Arc<Device>, Error> {
        let mut rng = StdRng::seed_from_u64(config.seed);
        let memory_limits = terrace_memory::Limits {
            regions_max: config.limits.max_mr,
            windows_max: config.limits.max_mw,
            seed: rng.random(),
        };
        let device = Arc::new(Device {
            memory: Registry::new(memory_limits).map_err(system_error)?,
            model: config.model,
            table: QpTable::new(config.port.instance(), &mut rng),
            xrc: XrcTable::default(),
            rx: Arc::new(Mutex::new(Receiver::new())),
            has_deferred_acks: AtomicBool::new(false),
            is_receive_probed: AtomicBool::new(false),
            tx: TxPool::default(),
            pending: Pending::default(),
            runnable: Runnable::default(),
            numbered_qps: Numbers::default(),
            numbered_cqs: Numbers::default(),
            timers: Timers::default(),
            rate_limiter: RateLimiter::default(),
            in_flight: InFlightBudgets::new(in_flight_bytes_max(&*config.port)),
            region_changed: Condvar::new(),
            staging: Arc::default(),
            events: AsyncQueue::new()?,
            overrun: Backlog::default(),
            quotas: Quotas::new(&config.limits),
            counters: NicCounters::default(),
            engine: Engine::new(config.engine, config.stat_socket)?,
            callbacks: ProgressCallbacks::default(),
            report: OnceLock::new(),
            management: Management::new(rng.random()),
            key_watcher: OnceLock::new(),
            multicast: MulticastTable::default(),
            faults: config.faults,
            local: LocalPath::default(),
            limits: config.limits,
            guid: address::guid(config.port.gids(), config.port.instance()),
            next_number: AtomicU32::new(rng.random_range(1..1 << 16)),
            is_colocated: AtomicBool::new(false),
            forwarding: Forwarding::default(),
            activated: AtomicU32::new(0),
            announced: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            clock: config.clock,
            port: config.port,
        });
        device.start_engine()?;
        if config.local {
            device.start_local_path();
        }
        Ok(device)
    }

    /// Closes the device: the engine stops, queue pairs fall silent, waiting `get` calls fail. Objects that still exist
    /// may be destroyed afterwards. Closing twice does nothing.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.engine.stop();
        self.forwarding.close();
        self.withdraw_all();
        self.local.stop();
        for qp in self.table.all() {
            qp.send_deferred_ack();
            self.table.remove(qp.qpn());
            qp.stop();
        }
        // References to queue pairs would keep these, and through them the device and its sockets, for ever.
        self.timers.clear();
        self.pending.clear();
        self.runnable.clear();
        self.rx.lock().clear();
        self.in_flight.clear();
        self.tx.clear();
        self.callbacks.clear();
        self.management.clear();
        self.detach_all();
        self.events.close();
    }

    /// Withdraws all queue pairs from same-host peers, and waits until these have finished their accesses, unless they
    /// take too long.
    fn withdraw_all(&self) {
        let qps = self.table.all();
        let withdrawn: Vec<_> = qps.iter().filter(|qp| qp.withdraw()).collect();
        let deadline = Instant::now() + READERS_AT_CLOSE;
        for qp in withdrawn {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if let Err(timeout) = GracePeriod::of_queue_pair(qp.qpn()).wait(remaining) {
                tracing::error!("{timeout}: the device is closed meanwhile");
                return;
            }
        }
    }
}

fn system_error(error: std::io::Error) -> Error {
    Error::System(error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()))
}
