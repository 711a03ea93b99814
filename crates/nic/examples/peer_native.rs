//! Terrace without the C ABI as a peer of `make bench-peers`: the functions of `bench/peers/peer.h`, over this crate.
//! It is linked with `bench/peers/peer.c`, so that the same code measures it and the other peers.
//!
//! `bench/peers/peer_verbs.c` does the same over the C ABI.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_nic::*;

const MIB: u64 = 1 << 20;
const BYTES_MAX: usize = 1 << 20;
const DEPTH_MAX: usize = 16;
const RECEIVES: usize = 2 * DEPTH_MAX;
const RECEIVE_STRIDE: usize = BYTES_MAX + 65 * 64;
const CONNECTION_BYTES: usize = DEPTH_MAX * BYTES_MAX + RECEIVES * RECEIVE_STRIDE;
const OP_GET: c_uint = 0;
const OP_PUT: c_uint = 1;
const OP_MESSAGE: c_uint = 2;
const OP_ATOMIC: c_uint = 3;
const SEND_ID: u64 = 1 << 16;
/// A peer's access rights to the target's region, as `IBV_ACCESS_*`.
const REMOTE_ALL: u32 = 1 | 2 | 4 | 8;

/// `enum memory`, from C: may hold any number.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Memory(c_uint);

impl Memory {
    const PRIVATE: Memory = Memory(0);
}

/// `struct options`.
#[repr(C)]
pub struct Options {
    socket_path: *const c_char,
    flavour: *const c_char,
    region: u64,
    memory: Memory,
    connections: c_uint,
}

/// `struct connection`.
#[repr(C)]
pub struct Connection {
    index: c_uint,
    buffer: *mut c_char,
    own: *mut c_void,
    received: *const c_char,
    idle: c_uint,
}

/// `struct peer`.
#[repr(C)]
pub struct Peer {
    name: *const c_char,
    has_target: bool,
    has_region: bool,
}

// SAFETY: the name is a constant.
unsafe impl Sync for Peer {}

#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
pub static peer: Peer = Peer { name: c"native".as_ptr(), has_target: true, has_region: true };

unsafe extern "C" {
    static options: Options;
    static mut connections: [Connection; 2];
    fn send_block(socket: c_int, block: *const c_void, size: usize);
    fn receive_block(socket: c_int, block: *mut c_void, capacity: usize) -> usize;
    fn map_memory(size: u64, memory: Memory, fd: *mut c_int) -> *mut c_char;
    fn fill_region(region: *mut c_char);
}

/// The addresses that each end sends to the other for each connection.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PeerInfo {
    qpn: u32,
    rkey: u32,
    base: u64,
}

struct Link {
    cq: Arc<Cq>,
    qp: Arc<QueuePair>,
    buffer: u64,
    lkey: u32,
    other: PeerInfo,
    /// The slots of messages without an answer, in order.
    unanswered: [c_uint; DEPTH_MAX],
    first: usize,
    count: usize,
    /// Receives that answers have consumed. They are posted again after the next messages, which do not wait for it.
    consumed: SmallVec<[u64; RECEIVES]>,
    /// Whether one-sided operations use native calls if possible.
    calls: bool,
    /// The slots of operations that calls have executed since the last `peer_reap`.
    done: SmallVec<[c_uint; DEPTH_MAX]>,
    _mr: Arc<Mr>,
}

/// The target's region, as a file in memory.
struct RegionFile {
    file: OwnedFd,
    range: HostRange,
}

impl Backings for RegionFile {
    fn find(&self, range: HostRange, _writable: bool) -> io::Result<Option<BackedBy>> {
        let is_inside =
            range.addr >= self.range.addr && range.addr + range.len <= self.range.addr + self.range.len;
        let backed = || Ok(BackedBy { file: self.file.try_clone()?, offset: 0, range: self.range });
        is_inside.then(backed).transpose()
    }
}

fn settings() -> &'static Options {
    // SAFETY: written by main() before any of these functions is called, and never again.
    unsafe { &options }
}

/// `local`, `udp`, or `calls`: local, without work requests.
fn flavour() -> &'static CStr {
    // SAFETY: a string of the command line, or "".
    unsafe { CStr::from_ptr(settings().flavour) }
}

#[unsafe(no_mangle)]
pub extern "C" fn peer_lacks(op: c_uint, size: usize) -> *const c_char {
    if op == OP_ATOMIC && size != 8 { c"atomics are of 8 bytes".as_ptr() } else { ptr::null() }
}

#[unsafe(no_mangle)]
pub extern "C" fn peer_offset_count(size: usize) -> u64 {
    settings().region / size as u64
}

#[unsafe(no_mangle)]
pub extern "C" fn peer_prepare(_size: usize) {}

#[unsafe(no_mangle)]
pub extern "C" fn peer_target_polls(op: c_uint) -> bool {
    op == OP_MESSAGE
}

fn open_device() -> Arc<Device> {
    let path = if flavour() == c"udp" { PathChoice::Udp } else { PathChoice::Local };
    let port = PortConfig { address: Some(IpAddr::V4(Ipv4Addr::LOCALHOST)), path, ..PortConfig::default() };
    Device::open(port.device().expect("a port on the loopback")).expect("a device")
}

fn register(pd: &Arc<Pd>, addr: u64, length: u64, access: u32) -> Arc<Mr> {
    pd.reg_mr(MrRequest { addr, length, iova: addr, access, paging: None }).expect("a region")
}

fn open_link(device: &Arc<Device>, pd: &Arc<Pd>, connection: &mut Connection) {
    let cq =
        device.create_cq(CqInit { depth: 4 * RECEIVES as u32, channel: None, cookie: 0 }).expect("a queue");
    let queue_len = 2 * RECEIVES as u32;
    let init = QpInit {
        qp_type: QpType::Rc,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        cap: QpCap {
            max_send_wr: queue_len,
            max_recv_wr: queue_len,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        },
        sq_sig_all: true,
        blocks_own_multicast: false,
        raises_events: true,
        cookie: 0,
    };
    let qp = pd.create_qp(init).expect("a queue pair");
    let mr = register(pd, connection.buffer as u64, CONNECTION_BYTES as u64, 1);
    let link = Link {
        cq,
        qp,
        buffer: connection.buffer as u64,
        lkey: mr.lkey(),
        other: PeerInfo::default(),
        unanswered: [0; DEPTH_MAX],
        first: 0,
        count: 0,
        consumed: SmallVec::new(),
        calls: flavour() == c"calls",
        done: SmallVec::new(),
        _mr: mr,
    };
    connection.own = Box::into_raw(Box::new(link)).cast();
}

fn connect(qp: &Arc<QueuePair>, device: &Arc<Device>, dest_qpn: u32) {
    let mut attr = QpAttr { state: QpState::Init, port_num: 1, access: REMOTE_ALL, ..QpAttr::default() };
    let identity = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    qp.modify(&attr, identity | QpAttrMask::ACCESS_FLAGS).expect("INIT");
    let (is_global, dgid) = (true, device.gids()[0].raw);
    let av = AddressVector { is_global, dgid, port_num: 1, hop_limit: 64, ..AddressVector::default() };
    attr.state = QpState::Rtr;
    attr.path = Some(device.resolve(&av, dest_qpn).expect("a path"));
    attr.dest_qpn = dest_qpn;
    attr.path_mtu = 4096;
    attr.max_dest_rd_atomic = DEPTH_MAX as u8;
    attr.min_rnr_timer = 1;
    let path = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    let responder = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
    qp.modify(&attr, QpAttrMask::STATE | path | responder).expect("RTR");
    attr.state = QpState::Rts;
    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.max_rd_atomic = DEPTH_MAX as u8;
    let requester =
        QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY | QpAttrMask::MAX_QP_RD_ATOMIC;
    qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::SQ_PSN | requester).expect("RTS");
}

fn open_end(control: c_int, region_len: Option<u64>) {
    let device = open_device();
    let pd = device.alloc_pd().expect("a protection domain");
    let region = region_len.map(|len| open_region(&device, &pd, len));
    for index in 0..settings().connections as usize {
        // SAFETY: main() has opened this many connections, and is the only thread.
        let connection = unsafe { &mut *(&raw mut connections).cast::<Connection>().add(index) };
        open_link(&device, &pd, connection);
        let link = link_of(connection);
        let (rkey, base) = region.as_ref().map_or((0, 0), |mr| (mr.rkey(), mr.addr()));
        let own = PeerInfo { qpn: link.qp.qpn(), rkey, base };
        let (own, other) = ((&raw const own).cast(), (&raw mut link.other).cast());
        // SAFETY: blocks of this length; both ends send before they receive, and the socket keeps blocks apart.
        unsafe {
            send_block(control, own, size_of::<PeerInfo>());
            assert_eq!(receive_block(control, other, size_of::<PeerInfo>()), size_of::<PeerInfo>());
        }
        connect(&link.qp, &device, link.other.qpn);
        (0..RECEIVES).for_each(|index| link.post_receive(index));
    }
    // Kept until the process ends.
    std::mem::forget((device, pd, region));
}

fn open_region(device: &Arc<Device>, pd: &Arc<Pd>, len: u64) -> Arc<Mr> {
    assert!(len.is_multiple_of(MIB));
    let mut fd = -1;
    // SAFETY: a new mapping of this length, which stays until the process ends.
    let memory = unsafe { map_memory(len, settings().memory, &raw mut fd) };
    // SAFETY: it is as long as `options.region`.
    unsafe { fill_region(memory) };
    if settings().memory != Memory::PRIVATE {
        // SAFETY: map_memory() has just made the descriptor, and no code closes it.
        let file = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().expect("a descriptor");
        device.set_backings(Arc::new(RegionFile { file, range: HostRange { addr: memory as u64, len } }));
    }
    register(pd, memory as u64, len, REMOTE_ALL)
}

#[unsafe(no_mangle)]
pub extern "C" fn peer_open_target(control: c_int) {
    open_end(control, Some(settings().region));
}

#[unsafe(no_mangle)]
pub extern "C" fn peer_open_client(control: c_int) {
    open_end(control, None);
}

/// A work request that has completed.
struct Done {
    id: u64,
    /// Length of a received message.
    byte_len: u32,
    /// Whether it is a received message.
    is_receive: bool,
}

fn link_of(connection: &Connection) -> &'static mut Link {
    // SAFETY: open_link() made it, it is never freed, and a connection belongs to one thread at a time.
    unsafe { &mut *connection.own.cast() }
}

impl Link {
    /// The address of an operation's data: as `operation_buffer()` in peer.h.
    fn operation_buffer(&self, slot: c_uint, size: usize) -> u64 {
        self.buffer + u64::from(slot) * size.max(64) as u64
    }

    fn receive_buffer(&self, index: usize) -> u64 {
        self.buffer + (DEPTH_MAX * BYTES_MAX + index * RECEIVE_STRIDE) as u64
    }

    fn post_receive(&self, index: usize) {
        let sge = Sge { addr: self.receive_buffer(index), length: BYTES_MAX as u32, lkey: self.lkey };
        let wr = RecvWr { wr_id: index as u64, sges: SgeList::from_slice(&[sge]) };
        self.qp.post_recv([Ok(wr)]).expect("posted");
    }

    fn post(&self, wr_id: u64, op: SendOp, addr: u64, size: usize) {
        let sge = Sge { addr, length: size as u32, lkey: self.lkey };
        self.qp.post_send([Ok(SendWr::with_sge(wr_id, op, sge, SendFlags::SIGNALED))]).expect("posted");
    }

    /// Executes an operation by a native call ([`QueuePair::read_now`] and others) in place of a work request.
    fn call(&mut self, op: c_uint, slot: c_uint, va: u64, size: usize) -> bool {
        let (data, rkey) = (self.operation_buffer(slot, size), self.other.rkey);
        // SAFETY: a slot of the connection's buffer, which no other code uses until the operation is reported as done.
        let data = unsafe { std::slice::from_raw_parts_mut(data as *mut u8, size) };
        let is_done = match op {
            OP_GET => self.qp.read_now(rkey, va, data),
            OP_PUT => self.qp.write_now(rkey, va, data),
            OP_ATOMIC => self
                .qp
                .atomic_now(rkey, va, AtomicOp::FetchAdd { add: 1 })
                .map(|before| before.inspect(|before| data.copy_from_slice(&before.to_ne_bytes())).is_some()),
            _ => Ok(false),
        };
        let is_done = is_done.expect("a queue pair");
        if is_done {
            self.done.push(slot);
        }
        is_done
    }

    /// Calls `take` for each completion and returns their count.
    fn poll(&self, mut take: impl FnMut(&Wc)) -> usize {
        self.cq
            .poll(DEPTH_MAX, &mut |wc| {
                assert_eq!(wc.status, WcStatus::Success);
                take(wc);
            })
            .expect("no overrun")
    }

    /// Appends the completions of messages.
    #[inline]
    fn poll_messages(&self, done: &mut SmallVec<[Done; DEPTH_MAX]>) {
        self.poll(|wc| {
            done.push(Done { id: wc.wr_id, byte_len: wc.byte_len, is_receive: wc.opcode == WcOpcode::Recv });
        });
    }
}

/// # Safety
/// `connection` is one that was opened, and belongs to the calling thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peer_post(
    connection: *mut Connection,
    op: c_uint,
    slot: c_uint,
    offset: u64,
    size: usize,
) {
    // SAFETY: as promised.
    let link = link_of(unsafe { &*connection });
    let (va, rkey) = (link.other.base + offset, link.other.rkey);
    let data = link.operation_buffer(slot, size);
    // Before the two processes have connected, the call returns without effect, and a work request executes the operation.
    if link.calls && link.call(op, slot, va, size) {
        return;
    }
    match op {
        OP_GET => link.post(slot.into(), SendOp::Read { va, rkey }, data, size),
        OP_PUT => link.post(slot.into(), SendOp::Write { va, rkey }, data, size),
        OP_ATOMIC => link.post(slot.into(), SendOp::FetchAdd { va, rkey, add: 1 }, data, size),
        _ => {
            link.unanswered[(link.first + link.count) % DEPTH_MAX] = slot;
            link.count += 1;
            link.post(SEND_ID, SendOp::Send, data, size);
            if let Some(index) = link.consumed.pop() {
                link.post_receive(index as usize);
            }
        }
    }
}

/// # Safety
/// As for [`peer_post`]; `slots` has space for `DEPTH_MAX` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn peer_reap(
    connection: *mut Connection,
    op: c_uint,
    _size: usize,
    slots: *mut c_uint,
) -> c_uint {
    // SAFETY: as promised.
    let connection = unsafe { &mut *connection };
    let link = link_of(connection);
    // SAFETY: as promised.
    let slots = unsafe { std::slice::from_raw_parts_mut(slots, DEPTH_MAX) };
    let mut count = 0;
    if op != OP_MESSAGE {
        for slot in link.done.drain(..) {
            slots[count] = slot;
            count += 1;
        }
        if count > 0 {
            return count as c_uint;
        }
        link.poll(|wc| {
            // The last message may complete while other operations are measured.
            if wc.wr_id != SEND_ID {
                slots[count] = wc.wr_id as c_uint;
                count += 1;
            }
        });
        return count as c_uint;
    }
    let mut done = SmallVec::new();
    link.poll_messages(&mut done);
    for &Done { id, is_receive, .. } in &done {
        if is_receive {
            connection.received = link.receive_buffer(id as usize) as *const c_char;
            slots[count] = link.unanswered[link.first];
            count += 1;
            link.first = (link.first + 1) % DEPTH_MAX;
            link.count -= 1;
            link.consumed.push(id);
        }
    }
    count as c_uint
}

/// Sends each message back from its receive buffer. Answers come first. A receive is posted again after its answer was
/// sent.
#[unsafe(no_mangle)]
pub extern "C" fn peer_progress(_op: c_uint, _size: usize, connection_count: c_uint) -> bool {
    let mut worked = false;
    for index in 0..connection_count as usize {
        // SAFETY: opened before; the target has one thread.
        let link = link_of(unsafe { &*(&raw const connections).cast::<Connection>().add(index) });
        let mut done = SmallVec::new();
        link.poll_messages(&mut done);
        worked |= !done.is_empty();
        for &Done { id, byte_len, .. } in done.iter().filter(|done| done.is_receive) {
            link.post(id, SendOp::Send, link.receive_buffer(id as usize), byte_len as usize);
        }
        done.iter().filter(|done| !done.is_receive).for_each(|done| link.post_receive(done.id as usize));
    }
    worked
}
