//! A simulated network. The seed and the order of calls determine its behaviour: its only clock is
//! [`SimNet::advance_to`], and it has no descriptors to poll.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use terrace_sync::Mutex;
use terrace_wire::icrc::{self, Flow};
use terrace_wire::{ROCE_PORT, RxMeta};

use crate::corrupt::corrupt;
use crate::counters::add;
use crate::fault::{Faults, Injector, marked};
use crate::{Gid, Port, PortCounters, RxBatch, TxBatch};

/// Faults and delays of a simulated network.
#[derive(Clone, Debug, PartialEq)]
pub struct SimConfig {
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet arrives twice.
    pub duplicate: f64,
    /// Probability that a bit of a packet is flipped, so that its ICRC is wrong.
    pub corrupt: f64,
    /// Probability that a packet is reordered: it is delayed by up to ten times the longest delay, so that later
    /// packets overtake it.
    pub reorder: f64,
    /// Probability that a packet is marked with "congestion experienced".
    pub ecn_mark: f64,
    /// Delay of packets, in nanoseconds. Packets stay in order unless they are reordered.
    pub delay_ns: Range<u64>,
    /// Largest path MTU in bytes.
    pub mtu: u32,
}

impl Default for SimConfig {
    /// A network without faults: every packet arrives after 1 to 2 microseconds.
    fn default() -> SimConfig {
        SimConfig {
            loss: 0.0,
            duplicate: 0.0,
            corrupt: 0.0,
            reorder: 0.0,
            ecn_mark: 0.0,
            delay_ns: 1000..2000,
            mtu: 4096,
        }
    }
}

impl SimConfig {
    fn faults(&self) -> Faults {
        Faults {
            loss: self.loss,
            duplicate: self.duplicate,
            corrupt: self.corrupt,
            reorder: self.reorder,
            ecn_mark: self.ecn_mark,
            delay_ns: self.delay_ns.clone(),
            reorder_ns_max: self.delay_ns.end.saturating_mul(10),
        }
    }
}

/// A simulated network. Clones are handles to the same network.
#[derive(Clone, Debug)]
pub struct SimNet {
    world: Arc<Mutex<World>>,
}

/// A port in a simulated network. It leaves the network when it is dropped.
#[derive(Debug)]
pub struct SimPort {
    world: Arc<Mutex<World>>,
    gids: Vec<Gid>,
    instance: u8,
    mtu: u32,
    counters: Arc<PortCounters>,
}

#[derive(Debug)]
struct World {
    config: SimConfig,
    injector: Injector,
    now_ns: u64,
    /// Arrival time of the latest packet that was not reordered, by source and destination.
    in_order_ns: BTreeMap<(SocketAddr, SocketAddr), u64>,
    in_flight: BinaryHeap<Reverse<InFlight>>,
    sent_total: u64,
    /// Packets that have arrived and are not yet received, by address.
    receive_queues: BTreeMap<SocketAddr, VecDeque<InFlight>>,
    /// The members of multicast groups, by the addresses of their queues.
    groups: BTreeMap<IpAddr, BTreeSet<SocketAddr>>,
}

/// A packet in flight. The fields before the addresses give the order of arrival and are never all equal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct InFlight {
    at_ns: u64,
    number: u64,
    source: SocketAddr,
    destination: SocketAddr,
    traffic_class: u8,
    /// From the BTH to the ICRC.
    bytes: Vec<u8>,
}

impl SimNet {
    /// A network whose faults are drawn from the seed.
    pub fn new(seed: u64, config: SimConfig) -> SimNet {
        let world = World {
            injector: Injector::new(config.faults(), seed),
            config,
            now_ns: 0,
            in_order_ns: BTreeMap::new(),
            in_flight: BinaryHeap::new(),
            sent_total: 0,
            receive_queues: BTreeMap::new(),
            groups: BTreeMap::new(),
        };
        SimNet { world: Arc::new(Mutex::new(world)) }
    }

    /// A new port with this address and its first free instance index.
    ///
    /// # Panics
    /// If all 256 instance indexes of the address are in use.
    pub fn port(&self, addr: IpAddr) -> SimPort {
        self.port_with_gids(&[addr])
    }

    /// A new port with several addresses. The first one determines the free instance index.
    ///
    /// # Panics
    /// If there is no address, or all 256 instance indexes of the first are in use.
    pub fn port_with_gids(&self, addrs: &[IpAddr]) -> SimPort {
        let gids: Vec<Gid> = addrs.iter().map(|addr| Gid::new(*addr, "sim0", 0)).collect();
        let mut world = self.world.lock();
        let instance = (0..=u8::MAX)
            .find(|instance| !world.receive_queues.contains_key(&socket_addr(addrs[0], *instance)))
            .expect("a free instance index of the simulated address");
        for addr in addrs {
            world.receive_queues.entry(socket_addr(*addr, instance)).or_default();
        }
        let mtu = world.config.mtu;
        SimPort { world: Arc::clone(&self.world), gids, instance, mtu, counters: Arc::default() }
    }

    /// Changes the faults and delays of packets sent after this call, and the MTU of ports created after it.
    pub fn set_config(&self, config: SimConfig) {
        let mut world = self.world.lock();
        world.injector.faults = config.faults();
        world.config = config;
    }

    /// The time in nanoseconds since the network was created.
    pub fn now(&self) -> u64 {
        self.world.lock().now_ns
    }

    /// Arrival time of the next packet; `None` if none is in flight.
    pub fn next_delivery(&self) -> Option<u64> {
        self.world.lock().in_flight.peek().map(|Reverse(packet)| packet.at_ns)
    }

    /// Advances the time, never backwards, and delivers the packets that arrive by then.
    pub fn advance_to(&self, now_ns: u64) {
        let mut world = self.world.lock();
        world.now_ns = world.now_ns.max(now_ns);
        world.deliver();
    }
}

fn socket_addr(addr: IpAddr, instance: u8) -> SocketAddr {
    SocketAddr::new(addr, ROCE_PORT + u16::from(instance))
}

impl World {
    /// Sends a packet with its ICRC.
    fn send(&mut self, flow: Flow, traffic_class: u8, sealed: &[u8]) {
        let in_order_ns = self.in_order_ns.entry((flow.source, flow.destination)).or_default();
        for delivery in self.injector.deliveries(self.now_ns, in_order_ns) {
            let mut bytes = sealed.to_vec();
            if let Some(bit) = delivery.corrupt_bit {
                corrupt(&flow, &mut bytes, bit);
            }
            self.sent_total += 1;
            self.in_flight.push(Reverse(InFlight {
                at_ns: delivery.at_ns,
                number: self.sent_total,
                source: flow.source,
                destination: flow.destination,
                traffic_class: if delivery.mark { marked(traffic_class) } else { traffic_class },
                bytes,
            }));
        }
    }

    /// Queues arrived packets at their ports, those to a group at all of its members. Packets to unknown addresses are
    /// dropped.
    fn deliver(&mut self) {
        while self.in_flight.peek().is_some_and(|Reverse(packet)| packet.at_ns <= self.now_ns) {
            let Some(Reverse(packet)) = self.in_flight.pop() else { return };
            for member in self.groups.get(&packet.destination.ip()).into_iter().flatten() {
                if let Some(queue) = self.receive_queues.get_mut(member) {
                    queue.push_back(packet.clone());
                }
            }
            if let Some(queue) = self.receive_queues.get_mut(&packet.destination) {
                queue.push_back(packet);
            }
        }
    }
}

impl SimPort {
    fn transmit_first_run(&self, world: &mut World, tx: &mut TxBatch) {
        let Some((run, bytes)) = tx.first() else { return };
        let count = run.count;
        let Some(gid) = self.gids.get(usize::from(run.path.source_gid_index)) else {
            add(&self.counters.tx.send_errors, count as u64);
            tx.advance(count);
            return;
        };
        let flow = Flow { source: socket_addr(gid.addr, self.instance), destination: run.path.remote };
        for (packet, index) in bytes.chunks_mut(run.segment).zip(0u16..) {
            icrc::seal(&flow, packet, index);
            if let Some(bit) = run.corrupt_bit {
                corrupt(&flow, packet, bit);
            }
            world.send(flow, run.path.traffic_class, packet);
        }
        add(&self.counters.tx.calls, 1);
        add(&self.counters.tx.packets, count as u64);
        add(&self.counters.tx.bytes, run.len() as u64);
        tx.advance(count);
    }

    /// The queue for packets to a group.
    fn member_for(&self, group: IpAddr) -> Option<SocketAddr> {
        let gid = self.gids.iter().find(|gid| gid.addr.is_ipv4() == group.is_ipv4())?;
        Some(socket_addr(gid.addr, self.instance))
    }
}

impl Port for SimPort {
    fn gids(&self) -> &[Gid] {
        &self.gids
    }

    fn instance(&self) -> u8 {
        self.instance
    }

    fn mtu_limit(&self) -> u32 {
        self.mtu
    }

    /// The usual value of a real port. No packet is ever dropped for lack of space.
    fn receive_buffer_bytes(&self) -> usize {
        16 << 20
    }

    fn counters(&self) -> &PortCounters {
        &self.counters
    }

    /// A simulated network never blocks, so the result is always true.
    fn transmit(&self, tx: &mut TxBatch) -> bool {
        let mut world = self.world.lock();
        while !tx.is_empty() {
            self.transmit_first_run(&mut world, tx);
        }
        world.deliver();
        true
    }

    fn receive(&self, rx: &mut RxBatch) -> usize {
        rx.begin(&self.counters);
        let mut world = self.world.lock();
        let mut received = 0;
        for (gid, gid_index) in self.gids.iter().zip(0u8..) {
            let address = socket_addr(gid.addr, self.instance);
            let Some(queue) = world.receive_queues.get_mut(&address) else { continue };
            while let Some(room) = rx.free_buffer() {
                let Some(packet) = queue.pop_front() else { break };
                let len = packet.bytes.len().min(room.len());
                room[..len].copy_from_slice(&packet.bytes[..len]);
                let meta = RxMeta {
                    source: packet.source,
                    destination: packet.destination.ip(),
                    gid_index,
                    traffic_class: packet.traffic_class,
                };
                rx.commit(meta, packet.destination.port(), len, len);
                received += 1;
            }
        }
        if received > 0 {
            add(&self.counters.rx.calls, 1);
        }
        received
    }

    /// There are none: [`SimNet::next_delivery`] returns when a packet arrives.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Does nothing: in a simulation every GID is active from the start.
    fn activate(&self, _gid_index: u8) {}

    fn join(&self, group: IpAddr) -> io::Result<()> {
        let member = self.member_for(group).ok_or(io::ErrorKind::AddrNotAvailable)?;
        self.world.lock().groups.entry(group).or_default().insert(member);
        Ok(())
    }

    fn leave(&self, group: IpAddr) {
        let Some(member) = self.member_for(group) else { return };
        if let Some(members) = self.world.lock().groups.get_mut(&group) {
            members.remove(&member);
        }
    }
}

impl Drop for SimPort {
    fn drop(&mut self) {
        let mut world = self.world.lock();
        for gid in &self.gids {
            let address = socket_addr(gid.addr, self.instance);
            world.receive_queues.remove(&address);
            for members in world.groups.values_mut() {
                members.remove(&address);
            }
        }
    }
}
