//! A node of the simulated network: a device, its memory, its completion queues and its shared receive queue.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{OFlags, fcntl_setfl};
use terrace_fabric::sim::SimNet;
use terrace_nic::{
    AddressVector, AsyncEvent, CompChannel, Cq, CqInit, Device, DeviceConfig, Error, ManualClock, Pd, Srq,
    SrqInit,
};
use terrace_sync::Mutex;

use crate::end::Receive;
use crate::log::Log;
use crate::memory::Memory;
use crate::paging::Pagers;
use crate::plan::{NodePlan, Plan, Profile, Waiting};
use crate::port::{BlockedUntil, LimitedPort};
use crate::rng::{SimRng, Stream, stream_seed};

/// Entries of each completion queue, more than a run can leave unpolled.
const CQ_DEPTH: u32 = 1 << 16;

/// Work requests of a shared receive queue, and elements of each.
pub(crate) const SRQ_DEPTH: u32 = 64;
pub(crate) const SRQ_SGES: u32 = 4;

/// A completion queue and how the program waits for it.
pub(crate) struct Completions {
    pub cq: Arc<Cq>,
    pub channel: Option<Arc<CompChannel>>,
    pub waiting: Waiting,
}

/// A shared receive queue and the receives posted to it.
pub(crate) struct Shared {
    pub srq: Arc<Srq>,
    pub posted: BTreeMap<u64, Receive>,
    /// The limit that is armed.
    pub limit: Option<u32>,
}

pub(crate) struct Node {
    pub plan: NodePlan,
    pub device: Arc<Device>,
    pub pd: Arc<Pd>,
    pub memory: Memory,
    /// The pagers of its regions whose memory may be absent.
    pub pagers: Option<Arc<Pagers>>,
    pub log: Log,
    /// The completion queues of sends and of receives.
    pub completions: [Completions; 2],
    pub shared: Shared,
    pub blocked_until: BlockedUntil,
    /// The time of the device's next step, in nanoseconds; `None` while it has no work.
    pub wakes_at: Option<u64>,
    /// The time of the program's next tick, in nanoseconds.
    pub ticks_at: u64,
    /// Longest delay until the program's next tick, in nanoseconds. It doubles while the program is idle.
    pub tick_ns_max: u64,
}

impl Node {
    pub fn open(
        plan: &Plan,
        seed: u64,
        index: u8,
        net: &SimNet,
        clock: &Arc<ManualClock>,
        trace: bool,
    ) -> Result<Node, Error> {
        let node = &plan.nodes[usize::from(index)];
        let blocked_until = BlockedUntil::default();
        let port = LimitedPort {
            inner: net.port(node.address),
            receive_buffer_bytes: node.receive_buffer_bytes,
            clock: clock.clone(),
            block: node.block,
            rng: Mutex::new(SimRng::new(seed, Stream::Port(index))),
            blocked_until: blocked_until.clone(),
            trace,
        };
        let device_seed = stream_seed(seed, Stream::Device(index));
        let device = Device::open(DeviceConfig::simulated(Box::new(port), clock.clone(), device_seed))?;
        fcntl_setfl(device.async_fd(), OFlags::NONBLOCK)
            .map_err(|errno| Error::System(errno.raw_os_error()))?;
        let pagers = node.paging.clone().map(|plan| Arc::new(Pagers::new(plan, clock, seed, index)));
        if let Some(pagers) = &pagers {
            device.attach(pagers.clone());
        }
        let pd = device.alloc_pd()?;
        let log = Log::new(&pd, clock, seed, index, plan.profile == Profile::Perfect)?;
        device.attach(log.pagers.clone());
        let srq = pd.create_srq(SrqInit { max_wr: SRQ_DEPTH, max_sge: SRQ_SGES, limit: 0, cookie: 0 })?;
        let [sends, receives] = node.waiting;
        Ok(Node {
            plan: node.clone(),
            memory: Memory::new(&pd, seed, index, pagers.clone()),
            pagers,
            log,
            completions: [Completions::new(&device, sends)?, Completions::new(&device, receives)?],
            shared: Shared { srq, posted: BTreeMap::new(), limit: None },
            device,
            pd,
            blocked_until,
            wakes_at: None,
            ticks_at: 0,
            tick_ns_max: node.tick_ns.0,
        })
    }

    pub fn address_vector(&self) -> AddressVector {
        AddressVector {
            is_global: true,
            dgid: self.device.gids()[0].raw,
            port_num: 1,
            traffic_class: 2,
            hop_limit: 64,
            ..AddressVector::default()
        }
    }

    /// Returns the time when the port accepts packets again; `None` while it accepts them.
    pub fn unblocks_at(&self) -> Option<u64> {
        Some(self.blocked_until.load(Ordering::Relaxed)).filter(|until_ns| *until_ns != 0)
    }

    /// Whether requests of peers may have to wait: for absent memory, or for the end of an append.
    pub fn defers(&self) -> bool {
        self.pagers.is_some() || self.log.is_used()
    }

    /// Returns the time when the next access to absent memory ends, in nanoseconds.
    pub fn next_due(&self) -> Option<u64> {
        let pagers = self.pagers.iter().chain([&self.log.pagers]);
        pagers.filter_map(|pagers| pagers.next_due()).min()
    }

    /// Takes and acknowledges the oldest asynchronous event.
    pub fn async_event(&self) -> Result<Option<AsyncEvent>, Error> {
        match self.device.get_async_event() {
            Ok(event) => {
                event.ack();
                Ok(Some(event))
            }
            Err(Error::Again) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Destroys all objects except the device, which must then have none. The queue pairs are destroyed before.
    pub fn close(&mut self) -> Result<(), Error> {
        self.shared.srq.destroy()?;
        for completions in &self.completions {
            completions.cq.destroy()?;
            if let Some(channel) = &completions.channel {
                channel.destroy()?;
            }
        }
        self.memory.close()?;
        self.log.close()?;
        self.pd.dealloc()
    }
}

impl Completions {
    fn new(device: &Arc<Device>, waiting: Waiting) -> Result<Completions, Error> {
        let channel = match waiting {
            Waiting::Polls => None,
            Waiting::Events | Waiting::Solicited => Some(device.create_channel()?),
        };
        if let Some(channel) = &channel {
            let nonblocking = fcntl_setfl(channel.fd(), OFlags::NONBLOCK);
            nonblocking.map_err(|errno| Error::System(errno.raw_os_error()))?;
        }
        let cq = device.create_cq(CqInit { depth: CQ_DEPTH, channel: channel.clone(), cookie: 0 })?;
        let completions = Completions { cq, channel, waiting };
        completions.arm()?;
        Ok(completions)
    }

    /// Arms the queue, if the program waits for events.
    pub fn arm(&self) -> Result<(), Error> {
        match self.waiting {
            Waiting::Polls => Ok(()),
            Waiting::Events => self.cq.request_notify(false),
            Waiting::Solicited => self.cq.request_notify(true),
        }
    }

    /// Takes the pending event, if there is one.
    pub fn take_event(&self) -> Result<bool, Error> {
        let Some(channel) = &self.channel else { return Ok(false) };
        match channel.get_event() {
            Ok(cq) => {
                cq.ack_events(1);
                Ok(true)
            }
            Err(Error::Again) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
