//! Management datagrams: messages between devices for which verbs have none. They go from queue pair 1 to queue pair 1,
//! which every device has and no program sees, with the Q_Key that InfiniBand gives it (IBTA volume 1, 10.2.5).

mod send;

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use smallvec::SmallVec;
use terrace_fabric::TxBatch;
use terrace_sync::{Mutex, RwLock};
use terrace_transport::Time;
use terrace_wire::{
    Bth, Deth, Extensions, Opcode, Packet, Path, Psn, QPN_INSTANCE_SHIFT, ROCE_PORT, RxMeta, emit_headers,
    port_of,
};

use crate::error::Error;

/// Longest payload of a management datagram in bytes.
pub const MANAGEMENT_BYTES_MAX: usize = 256;

/// Index of the management queue pair, within its process's instance.
const MANAGEMENT_INDEX: u32 = 1;
pub(crate) const INDEX_MASK: u32 = (1 << QPN_INSTANCE_SHIFT) - 1;
pub(crate) const MANAGEMENT_QKEY: u32 = 0x8001_0000;
const FULL_MEMBER_OF_DEFAULT_PARTITION: u16 = 0xffff;

/// The accepted rate of datagrams and their burst: an unknown sender must not keep the device busy with them.
#[derive(Clone, Copy)]
struct Rate {
    interval_ns: u64,
    burst: u64,
}

/// The accepted rates for datagrams of one kind: of one source, and twice that of all sources. So a source that floods
/// the device leaves as much to the others as it gets.
#[derive(Clone, Copy)]
struct Rates {
    each: Rate,
    all: Rate,
}

const fn rates(interval_ns: u64, burst: u64) -> Rates {
    let each = Rate { interval_ns, burst };
    Rates { each, all: Rate { interval_ns: interval_ns / 2, burst: burst * 2 } }
}

/// For classes with a handler of their own. Connections come many at a time when a program starts.
const OF_A_CLASS: Rates = rates(100_000, 1024);
/// For all other datagrams.
const OTHERS: Rates = rates(500_000, 64);

/// Sources are distinguished by a hash of their address with a secret key: two sources may share an allowance by
/// chance, but no source can choose an address that shares another's.
const SOURCES: usize = 256;

/// Called with each datagram that arrives: the path back to the sender, and the payload.
pub type ManagementHandler = Arc<dyn Fn(&Path, &[u8]) + Send + Sync>;

/// The management queue pair of a device.
pub(crate) struct Management {
    /// The key of the hash of sources.
    key: u64,
    handlers: RwLock<Handlers>,
    rx_queue: Mutex<RxQueue>,
    /// Whether datagrams wait for delivery, for a check without the lock. Changed under it.
    any: AtomicBool,
    next_psn: AtomicU32,
    /// Datagrams that were delivered, and those that were malformed, without a handler or too many.
    pub received: AtomicU64,
    pub dropped: AtomicU64,
}

/// The handlers of datagrams.
#[derive(Default)]
struct Handlers {
    /// Handlers of one class each.
    by_class: SmallVec<[(u8, ManagementHandler); 1]>,
    /// The handler of all other classes.
    rest: Option<ManagementHandler>,
}

impl Handlers {
    /// The second byte of every management datagram is its class (IBTA volume 1, 13.4.3).
    fn of(&self, payload: &[u8]) -> Option<&ManagementHandler> {
        self.of_class(payload).or(self.rest.as_ref())
    }

    fn of_class(&self, payload: &[u8]) -> Option<&ManagementHandler> {
        let class = payload.get(1);
        self.by_class.iter().find(|(taken, _)| Some(taken) == class).map(|(_, handler)| handler)
    }

    /// The accepted rates of such datagrams, and the index of their allowance; `None` without a handler.
    fn rates(&self, payload: &[u8]) -> Option<(usize, Rates)> {
        match self.of_class(payload) {
            Some(_) => Some((0, OF_A_CLASS)),
            None => self.rest.as_ref().map(|_| (1, OTHERS)),
        }
    }
}

#[derive(Default)]
struct RxQueue {
    waiting: VecDeque<(Path, Vec<u8>)>,
    allowances: [Allowance; 2],
}

/// When each allowance will be whole again if no more datagrams come.
struct Allowance {
    all: Time,
    each: [Time; SOURCES],
}

impl Default for Allowance {
    fn default() -> Allowance {
        Allowance { all: Time(0), each: [Time(0); SOURCES] }
    }
}

impl Allowance {
    /// Takes one datagram out of both of its allowances, or out of none.
    fn take(&mut self, now: Time, rates: Rates, source: usize) -> bool {
        let after = |whole_at: Time, rate: Rate| {
            let after = whole_at.max(now).after_ns(rate.interval_ns);
            (after <= now.after_ns(rate.interval_ns * rate.burst)).then_some(after)
        };
        let each = &mut self.each[source];
        let (Some(of_source), Some(of_all)) = (after(*each, rates.each), after(self.all, rates.all)) else {
            return false;
        };
        (*each, self.all) = (of_source, of_all);
        true
    }
}

/// Whether a packet's destination is the management queue pair.
#[inline]
pub(crate) fn is_management(qpn: u32) -> bool {
    qpn & INDEX_MASK == MANAGEMENT_INDEX
}

impl Management {
    /// Without handlers. `key`, a secret, goes into the hash of sources.
    pub fn new(key: u64) -> Management {
        Management {
            key,
            handlers: RwLock::default(),
            rx_queue: Mutex::default(),
            any: AtomicBool::new(false),
            next_psn: AtomicU32::new(0),
            received: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Takes a packet to the management queue pair, for delivery when no locks are held.
    #[cold]
    pub fn take(&self, now: Time, instance: u8, meta: &RxMeta, packet: &Packet<'_>) {
        let taken = sender(instance, packet).is_some_and(|source_qpn| {
            let rates = self.handlers.read().rates(packet.payload);
            rates.is_some_and(|rates| self.admit(now, rates, return_path(meta, source_qpn), packet.payload))
        });
        let counter = if taken { &self.received } else { &self.dropped };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn admit(&self, now: Time, (index, rates): (usize, Rates), path: Path, payload: &[u8]) -> bool {
        let source = self.source(path.remote.ip());
        let mut rx_queue = self.rx_queue.lock();
        if !rx_queue.allowances[index].take(now, rates, source) {
            return false;
        }
        rx_queue.waiting.push_back((path, payload.to_vec()));
        self.any.store(true, Ordering::Release);
        true
    }

    /// The index of an address's allowance. A host may use any IPv6 address of its link's prefix.
    fn source(&self, address: IpAddr) -> usize {
        let mut hasher = DefaultHasher::new();
        self.key.hash(&mut hasher);
        match address {
            IpAddr::V4(v4) => v4.octets().hash(&mut hasher),
            IpAddr::V6(v6) => v6.segments()[..4].hash(&mut hasher),
        }
        hasher.finish() as usize % SOURCES
    }

    /// Delivers what has arrived. Without locks held: the handler may call verbs.
    #[inline]
    pub fn deliver(&self) {
        if self.any.load(Ordering::Acquire) {
            self.deliver_all();
        }
    }

    #[cold]
    fn deliver_all(&self) {
        let waiting = {
            let mut rx_queue = self.rx_queue.lock();
            self.any.store(false, Ordering::Release);
            std::mem::take(&mut rx_queue.waiting)
        };
        for (path, payload) in &waiting {
            // Without the lock: a handler may have itself replaced.
            let handler = self.handlers.read().of(payload).cloned();
            if let Some(handler) = handler {
                handler(path, payload);
            }
        }
    }

    /// Drops the handlers, when the device closes.
    pub fn clear(&self) {
        let handlers = std::mem::take(&mut *self.handlers.write());
        drop(handlers);
    }
}

/// The instance that a UDP port belongs to.
pub(crate) fn instance_of(port: u16) -> Result<u8, Error> {
    u8::try_from(port.wrapping_sub(ROCE_PORT)).map_err(|_| Error::Invalid("a path to no device's port"))
}

/// Writes a management datagram to the first of two instances, from the second.
pub(crate) fn write(
    tx: &mut TxBatch,
    path: &Path,
    psn: Psn,
    [to_instance, own_instance]: [u8; 2],
    payload: &[u8],
) -> Result<(), Error> {
    if !(1..=MANAGEMENT_BYTES_MAX).contains(&payload.len()) {
        return Err(Error::Invalid("a management datagram has 1 to 256 bytes"));
    }
    let (bth, ext) = headers(payload.len(), psn, to_instance, own_instance);
    let header_len = bth.opcode.info().header_len;
    if let Some(packet) = tx.push(path, header_len + payload.len() + usize::from(bth.pad)) {
        let (head, rest) = packet.split_at_mut(header_len);
        emit_headers(&bth, &ext, head).expect("the room is exactly the opcode's header length");
        let (data, pad) = rest.split_at_mut(payload.len());
        data.copy_from_slice(payload);
        pad.fill(0);
    }
    Ok(())
}

pub(crate) fn headers(payload_len: usize, psn: Psn, to_instance: u8, own_instance: u8) -> (Bth, Extensions) {
    let qpn = |instance: u8| u32::from(instance) << QPN_INSTANCE_SHIFT | MANAGEMENT_INDEX;
    let bth = Bth {
        opcode: Opcode::UdSendOnly,
        solicited: false,
        migrated: true,
        pad: (payload_len.wrapping_neg() & 3) as u8,
        pkey: FULL_MEMBER_OF_DEFAULT_PARTITION,
        fecn: false,
        becn: false,
        qpn: qpn(to_instance),
        ack_request: false,
        psn,
    };
    let deth = Deth { qkey: MANAGEMENT_QKEY, source_qpn: qpn(own_instance) };
    (bth, Extensions { deth: Some(deth), ..Extensions::default() })
}

/// The number of the sender's management queue pair, if the packet is a management datagram to this instance.
fn sender(instance: u8, packet: &Packet<'_>) -> Option<u32> {
    let to_instance = packet.bth.qpn >> QPN_INSTANCE_SHIFT;
    let deth = packet.ext.deth.filter(|_| packet.bth.opcode == Opcode::UdSendOnly)?;
    let good = (to_instance == u32::from(instance))
        && deth.qkey == MANAGEMENT_QKEY
        && is_management(deth.source_qpn)
        && (1..=MANAGEMENT_BYTES_MAX).contains(&packet.payload.len());
    good.then_some(deth.source_qpn)
}

/// The path back to the sender's instance.
fn return_path(meta: &RxMeta, source_qpn: u32) -> Path {
    let mut remote = meta.source;
    if let canonical @ IpAddr::V4(_) = remote.ip().to_canonical() {
        remote = SocketAddr::new(canonical, 0);
    }
    remote.set_port(port_of(source_qpn));
    Path { remote, source_gid_index: meta.gid_index, traffic_class: 0, hop_limit: 0, flow_label: 0 }
}
