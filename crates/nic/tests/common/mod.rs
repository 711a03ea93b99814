//! Shared by the tests: nodes with a device, a protection domain, a completion queue and registered memory.
#![allow(dead_code)] // Every test file uses its own part of this.

pub mod cells;
#[path = "../../../memory/tests/common/finally.rs"]
pub mod finally;
#[path = "../../../memory/tests/common/pager.rs"]
pub mod pager;
#[path = "../../../memory/tests/common/units.rs"]
pub mod units;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use terrace_fabric::sim::SimConfig;
use terrace_nic::*;

pub const LOCAL_WRITE: u32 = 1;
pub const REMOTE_ALL: u32 = 1 | 2 | 4 | 8;
pub const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A network that loses, doubles, reorders, corrupts and delays.
pub fn bad_weather() -> SimConfig {
    SimConfig {
        loss: 0.02,
        duplicate: 0.02,
        corrupt: 0.01,
        reorder: 0.02,
        ecn_mark: 0.01,
        delay_ns: 1_000..20_000,
        mtu: 4096,
    }
}

/// Memory that the device may change at any time.
pub struct Memory(pub Box<[AtomicU8]>);

impl Memory {
    pub fn new(len: usize) -> Memory {
        Memory((0..len).map(|_| AtomicU8::new(0)).collect())
    }

    pub fn addr(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub fn fill(&self, start: usize, bytes: &[u8]) {
        bytes.iter().zip(&self.0[start..]).for_each(|(byte, cell)| cell.store(*byte, Ordering::SeqCst));
    }

    pub fn bytes(&self, start: usize, len: usize) -> Vec<u8> {
        self.0[start..start + len].iter().map(|cell| cell.load(Ordering::SeqCst)).collect()
    }

    pub fn u64_at(&self, start: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(start, 8).try_into().expect("eight bytes"))
    }
}

/// A device, and the objects that a test needs.
pub struct Node {
    pub device: Arc<Device>,
    pub pd: Arc<Pd>,
    pub cq: Arc<Cq>,
    pub memory: Memory,
    pub mr: Arc<Mr>,
}

impl Drop for Node {
    /// A peer's last response may still arrive: after deregistration, no device writes to the memory. Without
    /// deregistration the device would leak, for its queue pairs and it refer to each other.
    fn drop(&mut self) {
        self.device.close();
        if let Err(Error::Busy(_)) = self.mr.dereg() {
            std::mem::forget(std::mem::replace(&mut self.memory, Memory::new(0)));
        }
    }
}

impl Node {
    pub fn udp() -> Node {
        let port = PortConfig { address: Some(LOOPBACK), path: PathChoice::Udp, ..PortConfig::default() };
        Node::with(port.device().expect("a port on the loopback"), 1 << 20)
    }

    /// Reaches same-host peers without packets.
    pub fn local() -> Node {
        let port = PortConfig { address: Some(LOOPBACK), path: PathChoice::Local, ..PortConfig::default() };
        Node::with(port.device().expect("a port on the loopback"), 1 << 20)
    }

    pub fn with(config: DeviceConfig, memory_len: usize) -> Node {
        let device = Device::open(config).expect("a device");
        let pd = device.alloc_pd().expect("a protection domain");
        let cq = device.create_cq(CqInit { depth: 4096, channel: None, cookie: 7 }).expect("a queue");
        // The allocator gives addresses that are multiples of 8 for lengths like these; atomics need that.
        let memory = Memory::new(memory_len);
        let request = MrRequest {
            addr: memory.addr(),
            length: memory_len as u64,
            iova: memory.addr(),
            access: REMOTE_ALL,
            paging: None,
        };
        let mr = pd.reg_mr(request).expect("a region");
        Node { device, pd, cq, memory, mr }
    }

    pub fn init(&self, qp_type: QpType) -> QpInit {
        QpInit {
            qp_type,
            send_cq: self.cq.clone(),
            recv_cq: self.cq.clone(),
            srq: None,
            cap: QpCap {
                max_send_wr: 256,
                max_recv_wr: 256,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 256,
            },
            sq_sig_all: false,
            blocks_own_multicast: false,
            raises_events: true,
            cookie: 0,
        }
    }

    pub fn qp(&self, qp_type: QpType) -> Arc<QueuePair> {
        self.pd.create_qp(self.init(qp_type)).expect("a queue pair")
    }

    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.memory.addr() + offset, length, lkey: self.mr.lkey() }
    }

    pub fn recv(&self, wr_id: u64, offset: u64, length: u32) -> Result<RecvWr, Error> {
        Ok(RecvWr { wr_id, sges: SgeList::from_slice(&[self.sge(offset, length)]) })
    }

    /// A signaled work request over a part of the node's memory.
    pub fn wr(&self, wr_id: u64, op: SendOp, offset: u64, length: u32) -> SendWr {
        SendWr {
            wr_id,
            op,
            payload: Payload::Sges(SgeList::from_slice(&[self.sge(offset, length)])),
            flags: SendFlags::SIGNALED,
            target: None,
        }
    }

    pub fn av(&self) -> AddressVector {
        AddressVector { is_global: true, dgid: self.device.gids()[0].raw, port_num: 1, ..Default::default() }
    }

    /// Polls until there are `count` completions.
    pub fn completions(&self, count: usize) -> Vec<Wc> {
        poll_for(&self.cq, count)
    }

    pub fn completion(&self) -> Wc {
        self.completions(1)[0]
    }
}

pub fn poll_for(cq: &Cq, count: usize) -> Vec<Wc> {
    let mut done = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while done.len() < count {
        let wanted = count - done.len();
        cq.poll(wanted, &mut |wc| done.push(*wc)).expect("a healthy queue");
        assert!(Instant::now() < deadline, "{} of {count} completions: {done:?}", done.len());
    }
    done
}

/// Waits for a condition that another thread makes true.
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

pub struct Tuning {
    pub mtu: u32,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub max_rd_atomic: u8,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning { mtu: 1024, timeout: 14, retry_cnt: 7, rnr_retry: 7, max_rd_atomic: 16 }
    }
}

/// Brings a queue pair to RTS, connected to one of the node's.
pub fn connect(qp: &Arc<QueuePair>, node: &Node, peer_qpn: u32, tuning: &Tuning) {
    let device = qp.pd().device();
    // A requester needs timeouts and retries, a responder needs responder resources; an XRC end is one of the two.
    let (asks, answers) = match qp.qp_type() {
        QpType::Rc => (true, true),
        QpType::XrcSend => (true, false),
        QpType::XrcRecv => (false, true),
        QpType::Uc | QpType::Ud => (false, false),
    };
    let mut attr = QpAttr { state: QpState::Init, port_num: 1, access: REMOTE_ALL, ..QpAttr::default() };
    let identity = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    qp.modify(&attr, identity | QpAttrMask::ACCESS_FLAGS).expect("INIT");

    attr.state = QpState::Rtr;
    attr.path = Some(device.resolve(&node.av(), peer_qpn).expect("a path"));
    attr.dest_qpn = peer_qpn;
    attr.path_mtu = tuning.mtu;
    attr.max_dest_rd_atomic = 16;
    attr.min_rnr_timer = 1;
    let path = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    let responder = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
    let mask = QpAttrMask::STATE | path | if answers { responder } else { QpAttrMask::empty() };
    qp.modify(&attr, mask).expect("RTR");

    attr.state = QpState::Rts;
    attr.timeout = tuning.timeout;
    attr.retry_cnt = tuning.retry_cnt;
    attr.rnr_retry = tuning.rnr_retry;
    attr.max_rd_atomic = tuning.max_rd_atomic;
    let requester =
        QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY | QpAttrMask::MAX_QP_RD_ATOMIC;
    let target = if answers { QpAttrMask::TIMEOUT } else { QpAttrMask::empty() };
    let mask = QpAttrMask::STATE | QpAttrMask::SQ_PSN | if asks { requester } else { target };
    qp.modify(&attr, mask).expect("RTS");
}

/// Two connected queue pairs.
pub fn pair_on(a: &Node, b: &Node, qp_type: QpType, tuning: &Tuning) -> (Arc<QueuePair>, Arc<QueuePair>) {
    let (qa, qb) = (a.qp(qp_type), b.qp(qp_type));
    connect(&qa, b, qb.qpn(), tuning);
    connect(&qb, a, qa.qpn(), tuning);
    (qa, qb)
}

pub fn rc_pair(a: &Node, b: &Node) -> (Arc<QueuePair>, Arc<QueuePair>) {
    pair_on(a, b, QpType::Rc, &Tuning::default())
}

/// Brings a UD queue pair to RTS.
pub fn ready_datagrams(qp: &Arc<QueuePair>, qkey: u32) {
    let mut attr = QpAttr { state: QpState::Init, port_num: 1, qkey, ..QpAttr::default() };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::QKEY;
    qp.modify(&attr, mask).expect("INIT");
    attr.state = QpState::Rtr;
    qp.modify(&attr, QpAttrMask::STATE).expect("RTR");
    attr.state = QpState::Rts;
    qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::SQ_PSN).expect("RTS");
}

pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}
