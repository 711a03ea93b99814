//! The device: what belongs to all of its objects.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_fabric::{Gid, Port};
use terrace_faults::Faults;
use terrace_memory::Registry;
use terrace_shm::GracePeriod;
use terrace_sync::Mutex;
use terrace_transport::{AckPolicy, MESSAGE_LEN_MAX, Time};
use terrace_wire::Path;

use crate::address::{self, AddressVector};
use crate::channel::CompChannel;
use crate::clock::{Clock, LazyTimestamp, ManualClock, MonotonicClock};
use crate::cq::{CompletionBypass, Cq, CqInit};
use crate::engine::Engine;
use crate::error::Error;
use crate::events::{AsyncEvent, AsyncQueue};
use crate::forwarding::Forwarding;
use crate::in_flight::InFlightBudget;
use crate::limits::{Limits, Quotas};
use crate::local::LocalPath;
use crate::management::Management;
use crate::pd::Pd;
use crate::progress_callback::{ProgressCallback, ProgressCallbacks};
use crate::qp::{self, QueuePair};
use crate::rate_limiter::RateLimiter;
use crate::table::QpTable;
use crate::timers::Timers;
use crate::tx::{Pending, Receiver, TxPool};
use crate::xrc::XrcTable;

/// Parameters of a device.
pub struct DeviceConfig {
    /// Its place in a network.
    pub port: Box<dyn Port>,
    /// The source of time.
    pub clock: Arc<dyn Clock>,
    /// The seed of queue pair numbers, keys and handles.
    pub seed: u64,
    /// Whether a thread makes progress when the program does not poll. Without it the caller calls [`Device::step`].
    pub engine: bool,
    /// Whether the engine answers `terrace stat`.
    pub stat_socket: bool,
    /// Whether same-host peers are reached without packets where that is possible.
    pub local: bool,
    /// The device's limits.
    pub limits: Limits,
    /// A fault plan by which the device withholds receives from peers, and whose counts it reports. Faults of packets
    /// are the port's own ([`terrace_fabric::fault::FaultyPort`]).
    pub faults: Option<Arc<Faults>>,
}

impl DeviceConfig {
    /// A device for real use.
    pub fn new(port: Box<dyn Port>) -> DeviceConfig {
        DeviceConfig {
            port,
            clock: Arc::new(MonotonicClock::new()),
            seed: rand::random(),
            engine: true,
            stat_socket: true,
            local: false,
            limits: Limits::default(),
            faults: None,
        }
    }

    /// A device that does nothing by itself, and repeats its behaviour for the same seed.
    pub fn simulated(port: Box<dyn Port>, clock: Arc<ManualClock>, seed: u64) -> DeviceConfig {
        DeviceConfig { clock, seed, engine: false, stat_socket: false, ..DeviceConfig::new(port) }
    }
}

/// The answer to `ibv_query_port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// Largest path MTU in bytes that Terrace can do.
    pub max_mtu: u32,
    /// Largest path MTU in bytes that fits the network.
    pub active_mtu: u32,
    /// Entries of the GID table.
    pub gid_count: usize,
    /// Entries of the partition key table; the only one is the default partition.
    pub pkey_count: u16,
    /// Longest message in bytes.
    pub max_message_bytes: u32,
    /// Whether the port works.
    pub active: bool,
}

/// Fruitless polls between two reads of the clock, which would cost a tenth of each.
const POLLS_PER_CLOCK: u32 = 8;

/// How long closing a device waits for same-host peers in the middle of accesses.
const READERS_AT_CLOSE: Duration = Duration::from_secs(1);

/// A software RDMA NIC.
pub struct Device {
    pub(crate) port: Box<dyn Port>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) memory: Registry,
    pub(crate) table: QpTable,
    pub(crate) xrc: XrcTable,
    /// The receive lock. Receive passes only try it; `fork`, the device's end and changes to the RX rings wait for it.
    pub(crate) rx: Arc<Mutex<Receiver>>,
    /// Whether queue pairs had ACKs deferred after the last pass, or were destroyed since; [`Receiver`] has their list.
    /// Cleared under the receive lock.
    pub(crate) acks_held: AtomicBool,
    pub(crate) tx: TxPool,
    pub(crate) pending: Pending,
    pub(crate) timers: Timers,
    pub(crate) pace: RateLimiter,
    pub(crate) in_flight: InFlightBudget,
    pub(crate) events: AsyncQueue,
    pub(crate) overrun: Overrun,
    pub(crate) quotas: Quotas,
    pub(crate) counters: NicCounters,
    pub(crate) engine: Engine,
    pub(crate) callbacks: ProgressCallbacks,
    pub(crate) management: Management,
    pub(crate) faults: Option<Arc<Faults>>,
    pub(crate) local: LocalPath,
    limits: Limits,
    guid: u64,
    next_number: AtomicU32,
    /// Whether it forwards packets of other devices, and takes forwarded packets.
    pub(crate) sibling: AtomicBool,
    pub(crate) forwarding: Forwarding,
    /// Bit i: GID i, or one a multiple of 32 further, is activated.
    activated: AtomicU32,
    closed: AtomicBool,
}

/// Overrun completion queues whose queue pairs have yet to be moved to the error state.
#[derive(Default)]
pub(crate) struct Overrun {
    pub list: Mutex<Vec<Arc<Cq>>>,
    pub any: AtomicBool,
}

/// Packets that were dropped before a queue pair saw them.
#[derive(Debug, Default)]
pub(crate) struct NicCounters {
    pub malformed: AtomicU64,
    pub unknown_qp: AtomicU64,
    pub wrong_partition: AtomicU64,
    /// Not dropped: forwarded to other processes.
    pub passed_on: AtomicU64,
}

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
            table: QpTable::new(config.port.slot(), &mut rng),
            xrc: XrcTable::default(),
            rx: Arc::new(Mutex::new(Receiver::new())),
            acks_held: AtomicBool::new(false),
            tx: TxPool::default(),
            pending: Pending::default(),
            timers: Timers::default(),
            pace: RateLimiter::default(),
            in_flight: InFlightBudget::new(qp::in_flight_bytes_max(&*config.port)),
            events: AsyncQueue::new()?,
            overrun: Overrun::default(),
            quotas: Quotas::new(&config.limits),
            counters: NicCounters::default(),
            engine: Engine::new(config.engine, config.stat_socket)?,
            callbacks: ProgressCallbacks::default(),
            management: Management::new(rng.random()),
            faults: config.faults,
            local: LocalPath::default(),
            limits: config.limits,
            guid: address::guid(config.port.gids(), config.port.slot()),
            next_number: AtomicU32::new(rng.random_range(1..1 << 16)),
            sibling: AtomicBool::new(false),
            forwarding: Forwarding::default(),
            activated: AtomicU32::new(0),
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
            qp.send_held_ack();
            self.table.remove(qp.qpn());
            qp.silence();
        }
        // References to queue pairs would keep these, and through them the device and its sockets, for ever.
        self.timers.clear();
        self.pending.clear();
        self.rx.lock().clear();
        self.in_flight.clear();
        self.tx.clear();
        self.callbacks.clear();
        self.management.clear();
        self.events.close();
    }

    /// Withdraws all queue pairs from same-host peers, and waits until these have finished their accesses, unless they
    /// take too long.
    fn withdraw_all(&self) {
        let qps = self.table.all();
        let withdrawn: Vec<_> = qps.iter().filter(|qp| qp.withdraw()).collect();
        let deadline = Instant::now() + READERS_AT_CLOSE;
        for qp in withdrawn {
            let patience = deadline.saturating_duration_since(Instant::now());
            if let Err(timeout) = GracePeriod::of_queue_pair(qp.qpn()).wait(patience) {
                tracing::error!("{timeout}: the device is closed meanwhile");
                return;
            }
        }
    }

    /// The device's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The fault plan in force, if there is one.
    pub fn faults(&self) -> Option<&Arc<Faults>> {
        self.faults.as_ref()
    }

    /// The node's identifier, made from its address, in host byte order.
    pub fn node_guid(&self) -> u64 {
        self.guid
    }

    /// The process's instance index at this address: the upper bits of the numbers of its queue pairs.
    pub fn slot(&self) -> u8 {
        self.port.slot()
    }

    /// The port's attributes.
    pub fn port_attributes(&self) -> PortAttributes {
        PortAttributes {
            max_mtu: 4096,
            active_mtu: self.port.mtu_limit(),
            gid_count: self.port.gids().len(),
            pkey_count: 1,
            max_message_bytes: MESSAGE_LEN_MAX,
            active: !self.is_closed(),
        }
    }

    /// The GID table.
    pub fn gids(&self) -> &[Gid] {
        self.port.gids()
    }

    /// Has the callback called by the thread that makes progress on this device, until the device is closed.
    pub fn attach(&self, callback: Arc<dyn ProgressCallback>) {
        self.callbacks.attach(callback);
        // The engine may sleep without its descriptor.
        self.engine.wake();
    }

    /// Makes a protection domain.
    pub fn alloc_pd(self: &Arc<Self>) -> Result<Arc<Pd>, Error> {
        self.check_open()?;
        Pd::new(self)
    }

    /// Makes a completion channel.
    pub fn create_channel(self: &Arc<Self>) -> Result<Arc<CompChannel>, Error> {
        self.check_open()?;
        CompChannel::new(self)
    }

    /// Makes a completion queue; EINVAL when the depth is out of range.
    pub fn create_cq(self: &Arc<Self>, init: CqInit) -> Result<Arc<Cq>, Error> {
        self.check_open()?;
        Cq::new(self, init)
    }

    /// The path to a queue pair of the peer that the vector names. EINVAL without a global route, for a port other than
    /// 1, a source index without a GID, or a destination of another family than the source.
    pub fn resolve(&self, av: &AddressVector, dest_qpn: u32) -> Result<Path, Error> {
        address::resolve(self.gids(), av, dest_qpn)
    }

    /// Readable while asynchronous events wait. Only `poll` and `fcntl` are of use to others.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.events.fd()
    }

    /// The oldest asynchronous event. Waits for one unless [`Device::async_fd`] has O_NONBLOCK. Fails with `Again`,
    /// `Interrupted`, or `NoDevice` once the device is closed.
    pub fn get_async_event(&self) -> Result<AsyncEvent, Error> {
        self.events.get()
    }

    /// Handles what has arrived and sends what waits, once. Returns whether there was anything to do.
    pub fn progress(&self) -> bool {
        self.advance(Some(self.clock.now()), None, || AckPolicy::Now)
    }

    /// Sends everything deferred, and receives nothing: for a process that ends. In a forked child that has not used
    /// the device all of that is the parent's.
    pub fn send_held_back(&self) {
        if !self.engine.is_missing() && self.has_waiting() {
            let mut unit = self.tx.take();
            self.pending.take_into(&mut unit.work, None);
            // Otherwise the thread that is receiving sends the deferred ACKs.
            if let Some(mut rx) = self.rx.try_lock() {
                self.release_acks(&mut rx, &mut unit.work);
            }
            self.flush(unit, &LazyTimestamp::new(&*self.clock, None));
        }
    }

    /// The queue pair of that number.
    pub fn query_qp_by_number(&self, qpn: u32) -> Option<Arc<QueuePair>> {
        self.table.read().get(qpn).cloned()
    }

    /// Makes progress for a program that polls a completion queue and has found it empty. When that brings something,
    /// the program is likely to post next, and ACKs wait to leave with that.
    pub(crate) fn progress_for(&self, cq: &Cq, polls: u32, bypass: Option<&CompletionBypass<'_>>) {
        let now = polls.is_multiple_of(POLLS_PER_CLOCK).then(|| self.clock.now());
        let active = self.advance(now, bypass, || {
            let is_in_vain = cq.is_empty() && !bypass.is_some_and(CompletionBypass::has_caught);
            if is_in_vain || !self.engine.looks_after_held_acks() { AckPolicy::Now } else { AckPolicy::Hold }
        });
        // The engine may have left standby just then.
        if active && !self.engine.looks_after_held_acks() && self.has_waiting() {
            self.engine.wake();
        }
    }

    /// The time by the device's clock, in which completion times are given.
    pub fn now(&self) -> Time {
        self.clock.now()
    }

    /// Activates a GID: the device receives packets to it. The first GID is always active.
    pub(crate) fn activate_gid(&self, gid_index: u8) {
        if gid_index > 0 {
            self.port.activate(gid_index);
            self.engine.wake();
            let bit = 1 << (gid_index % u32::BITS as u8);
            if self.activated.fetch_or(bit, Ordering::SeqCst) & bit == 0 {
                self.ask_front_to_listen();
            }
        }
    }

    /// Activates all GIDs: a datagram's sender may use any of them.
    pub(crate) fn activate_all_gids(&self) {
        (0u8..).zip(self.gids()).for_each(|(gid_index, _)| self.activate_gid(gid_index));
    }

    /// A number that this device has not given out lately.
    pub(crate) fn next_number(&self) -> u32 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Has the callbacks called soon: a thread that makes no progress has given one of them something to do. Takes no
    /// lock that is held while callbacks or pagers are called.
    pub fn request_callbacks(&self) {
        self.callbacks.ask();
        self.engine.wake_by(Time(0));
    }

    /// Schedules a queue pair for the next pass, because of something that did not come from the network. Any thread
    /// may call this, whatever locks it holds.
    pub(crate) fn look_at(&self, qp: &Arc<QueuePair>) {
        self.pending.add(qp);
        self.engine.wake_by(Time(0));
        if self.is_closed() {
            // The list would keep the device for ever.
            self.pending.clear();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.is_closed() { Err(Error::NoDevice("closed")) } else { Ok(()) }
    }
}

fn system_error(error: std::io::Error) -> Error {
    Error::System(error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()))
}
