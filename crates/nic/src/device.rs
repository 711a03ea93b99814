//! The device: what belongs to all of its objects, and protection domains, which name it to the objects in them.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use terrace_fabric::{Gid, Port};
use terrace_faults::Faults;
use terrace_memory::Registry;
use terrace_sync::{Backlog, Condvar, Mutex};
use terrace_transport::{MESSAGE_LEN_MAX, StagingBudget, Time};

use crate::clock::{Clock, ManualClock, MonotonicClock};
use crate::cq::Cq;
use crate::engine::Engine;
use crate::error::Error;
use crate::events::{AsyncEvent, AsyncQueue};
use crate::forwarding::Forwarding;
use crate::in_flight::InFlightBudgets;
use crate::limits::{Limits, Quotas};
use crate::local::LocalPath;
use crate::management::Management;
use crate::model::NicModel;
use crate::multicast_table::MulticastTable;
use crate::progress_callback::{self, ProgressCallback, ProgressCallbacks};
use crate::qp::QueuePair;
use crate::rate_limiter::RateLimiter;
use crate::srq::Srq;
use crate::table::QpTable;
use crate::timers::Timers;
use crate::tx::{Pending, Receiver, TxPool};
use crate::use_count::UseCount;
use crate::work_queue::numbers::Numbers;
use crate::work_queue::runnable::Runnable;
use crate::xrc_table::XrcTable;

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
    /// What the NIC knows of absent memory.
    pub model: NicModel,
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
            model: NicModel::default(),
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

/// A software RDMA NIC.
pub struct Device {
    pub(crate) port: Box<dyn Port>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) memory: Registry,
    pub(crate) model: NicModel,
    pub(crate) table: QpTable<QueuePair>,
    pub(crate) xrc: XrcTable<Srq>,
    /// The receive lock. Receive passes only try it; `fork`, the device's end and changes to the RX rings wait for it.
    pub(crate) rx: Arc<Mutex<Receiver<QueuePair>>>,
    /// Whether queue pairs had ACKs deferred after the last pass, or were destroyed since; [`Receiver`] has their list.
    /// Cleared under the receive lock.
    pub(crate) has_deferred_acks: AtomicBool,
    /// [`Device::probe_receive`] was called, and no pass has looked for packets since.
    pub(crate) is_receive_probed: AtomicBool,
    pub(crate) tx: TxPool<QueuePair>,
    pub(crate) pending: Pending<QueuePair>,
    /// Queue pairs whose work queues in memory have entries to execute.
    pub(crate) runnable: Runnable<QueuePair>,
    /// What these entries may name: queue pairs of this kind, and completion queues whose number was asked for.
    pub(crate) numbered_qps: Numbers<QueuePair>,
    pub(crate) numbered_cqs: Numbers<Cq>,
    pub(crate) timers: Timers<QueuePair>,
    pub(crate) rate_limiter: RateLimiter,
    pub(crate) in_flight: InFlightBudgets<QueuePair>,
    /// A thread that has re-registered a region, or has tried to end one, is done. For all regions: each would take memory for its own.
    pub(crate) region_changed: Condvar,
    pub(crate) staging: Arc<StagingBudget>,
    pub(crate) events: AsyncQueue,
    /// Overrun completion queues whose queue pairs have yet to be moved to the error state.
    pub(crate) overrun: Backlog<Arc<Cq>>,
    pub(crate) quotas: Quotas,
    pub(crate) counters: NicCounters,
    pub(crate) engine: Engine,
    pub(crate) callbacks: ProgressCallbacks,
    /// What `terrace stat` shows beside the device's own counters and the callbacks' reports.
    pub(crate) report: OnceLock<Report>,
    pub(crate) management: Management,
    pub(crate) key_watcher: OnceLock<KeyWatcher>,
    pub(crate) multicast: MulticastTable<QueuePair>,
    pub(crate) faults: Option<Arc<Faults>>,
    pub(crate) local: LocalPath,
    pub(crate) limits: Limits,
    pub(crate) guid: u64,
    pub(crate) next_number: AtomicU32,
    /// Whether it forwards packets of other devices, and takes forwarded packets.
    pub(crate) is_colocated: AtomicBool,
    pub(crate) forwarding: Forwarding,
    /// Bit i: GID i, or one a multiple of 32 further, is activated.
    pub(crate) activated: AtomicU32,
    /// The same, and the demultiplexer knows.
    pub(crate) announced: AtomicU32,
    pub(crate) closed: AtomicBool,
}

/// Statistics in `terrace stat`, under a name; `None` if there is nothing to show.
pub type Report = Box<dyn Fn() -> Option<(String, serde_json::Value)> + Send + Sync>;

/// Receives the keys of regions and windows that have ended.
pub type KeyWatcher = Arc<dyn Fn(u32) + Send + Sync>;

/// Packets that were dropped before a queue pair saw them.
#[derive(Debug, Default)]
pub(crate) struct NicCounters {
    pub malformed: AtomicU64,
    pub unknown_qp: AtomicU64,
    pub unknown_group: AtomicU64,
    pub wrong_partition: AtomicU64,
    /// Not dropped: forwarded to other processes.
    pub forwarded: AtomicU64,
}

impl Device {
    /// The device's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// What the device knows of absent memory.
    pub fn model(&self) -> NicModel {
        self.model
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
    pub fn instance(&self) -> u8 {
        self.port.instance()
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

    /// Has the watcher called with the key of each region and window that has ended from now on. Retained keys
    /// ([`QueuePair::retain_key`](crate::QueuePair::retain_key)) are not in use for others yet. A device keeps its first watcher.
    pub fn watch_keys(&self, watcher: KeyWatcher) {
        let _ = self.key_watcher.set(watcher);
    }

    /// Tells the watcher that the region or window of a key has ended.
    pub(crate) fn note_key_ended(&self, key: u32) {
        if let Some(watcher) = self.key_watcher.get() {
            watcher(key);
        }
    }

    /// Has the callback called by the thread that makes progress on this device, until the device is closed.
    pub fn attach(&self, callback: Arc<dyn ProgressCallback>) {
        self.callbacks.attach(callback);
        // The engine may sleep without its descriptor.
        self.engine.wake();
    }

    /// Has `terrace stat` show a report of what makes no progress with the device. A device keeps its first one.
    pub fn set_report(&self, report: Report) {
        let _ = self.report.set(report);
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

    /// The queue pair of that number.
    pub fn query_qp_by_number(&self, qpn: u32) -> Option<Arc<QueuePair>> {
        self.table.read().get(qpn).cloned()
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
            self.activated.fetch_or(bit, Ordering::SeqCst);
            if self.announced.load(Ordering::Relaxed) & bit == 0 && self.ask_demultiplexer_to_listen() {
                self.announced.fetch_or(bit, Ordering::Relaxed);
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
        self.callbacks.request();
        self.engine.wake_by(Time(0));
    }

    /// Whether a thread has looked for received packets since the last call, and true at first. Has the engine do so soon. A pager may keep
    /// the thread that receives packets waiting, and what peers have sent is not known meanwhile.
    pub fn probe_receive(&self) -> bool {
        let has_received = !self.is_receive_probed.swap(true, Ordering::SeqCst);
        self.engine.wake_by(Time(0));
        has_received
    }

    /// Carries out `act`, in which this thread calls no progress callbacks: verbs call them otherwise, as they do other things
    /// that are due. For callers of verbs that hold a lock which callbacks take. The engine calls those that are requested.
    pub fn postpone_callbacks<R>(&self, act: impl FnOnce() -> R) -> R {
        let result = progress_callback::postpone(act);
        if self.callbacks.are_requested() {
            self.engine.wake_by(Time(0));
        }
        result
    }

    /// Schedules a queue pair for the next pass, because of something that did not come from the network. Any thread
    /// may call this, whatever locks it holds.
    pub(crate) fn schedule_pass(&self, qp: &Arc<QueuePair>) {
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

/// A protection domain.
pub struct Pd {
    pub(crate) device: Arc<Device>,
    pub(crate) handle: u32,
    pub(crate) users: UseCount,
}

impl Pd {
    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A number that no other protection domain of the device has.
    pub fn handle(&self) -> u32 {
        self.handle
    }
}
