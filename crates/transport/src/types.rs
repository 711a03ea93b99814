//! The types of the verbs: work requests, completions, attributes. Numeric values are those of
//! `infiniband/verbs.h`, so that the C ABI converts them without tables.

use std::sync::Arc;

use bitflags::bitflags;
use smallvec::SmallVec;
use terrace_wire::{Path, Service};

/// A scatter/gather element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Address within the region of `lkey`.
    pub addr: u64,
    /// Length in bytes. Zero means 2^31 bytes in the specification; here it means zero, as in every provider.
    pub length: u32,
    /// Local key.
    pub lkey: u32,
}

/// Longest message of a connected queue pair, in bytes (IBTA volume 1, C9-94).
pub const MESSAGE_LEN_MAX: u32 = 1 << 31;
/// Operand length of an atomic operation in bytes, and length of the offset that answers an APPEND.
pub const ATOMIC_LEN: u32 = 8;

/// A scatter/gather list.
pub type SgeList = SmallVec<[Sge; 1]>;

/// Data that was copied when it was posted.
pub type InlineData = SmallVec<[u8; 16]>;

/// Unregistered bytes that a service within the process sends.
pub trait ByteSource: Send + Sync + std::fmt::Debug {
    /// Copies `out.len()` bytes from `offset` on; false if they are not available, which fails the work request. The
    /// same bytes may be requested again.
    fn copy(&self, offset: u64, out: &mut [u8]) -> bool;
}

impl ByteSource for Vec<u8> {
    fn copy(&self, offset: u64, out: &mut [u8]) -> bool {
        let part = usize::try_from(offset).ok().and_then(|start| self.get(start..)?.get(..out.len()));
        part.map(|part| out.copy_from_slice(part)).is_some()
    }
}

/// A part of a [`ByteSource`].
#[derive(Clone, Debug)]
pub struct Provided {
    /// Where the bytes are.
    pub source: Arc<dyn ByteSource>,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl PartialEq for Provided {
    fn eq(&self, other: &Provided) -> bool {
        Arc::ptr_eq(&self.source, &other.source) && (self.offset, self.len) == (other.offset, other.len)
    }
}

impl Eq for Provided {}

/// Masks of a masked compare and swap, and where its result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masked {
    /// Memory for the value before the operation.
    pub result: Sge,
    /// The bits to compare.
    pub compare_mask: u64,
    /// The bits to store.
    pub swap_mask: u64,
}

/// Bytes of the masks in the packet of a masked compare and swap.
pub(crate) const MASK_BYTES: usize = 16;

impl Masked {
    /// The masks as the packet has them: of the compared bits, then of the stored ones, each big-endian.
    pub(crate) fn wire_masks(&self) -> [u8; MASK_BYTES] {
        (u128::from(self.compare_mask) << 64 | u128::from(self.swap_mask)).to_be_bytes()
    }
}

/// The data of a send work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// One element, as most requests have. Gathered when a packet is built, and again when it is retransmitted.
    Sge(Sge),
    /// A list, gathered likewise.
    Sges(SgeList),
    /// Copied when posted.
    Inline(InlineData),
    /// Copied when a packet is built, and again when it is retransmitted.
    Provided(Box<Provided>),
    /// Of a masked compare and swap. Its packet carries the masks.
    Masked(Box<Masked>),
}

impl Payload {
    /// Total length in bytes.
    #[inline(always)]
    pub fn len(&self) -> u64 {
        match self {
            Payload::Sge(sge) => sge.length.into(),
            Payload::Sges(sges) => sges.iter().map(|sge| u64::from(sge.length)).sum(),
            Payload::Inline(bytes) => bytes.len() as u64,
            Payload::Provided(provided) => provided.len.into(),
            Payload::Masked(masked) => masked.result.length.into(),
        }
    }

    /// The registered memory; `None` if the bytes come from elsewhere.
    #[inline(always)]
    pub fn sges(&self) -> Option<&[Sge]> {
        match self {
            Payload::Sge(sge) => Some(std::slice::from_ref(sge)),
            Payload::Sges(sges) => Some(sges),
            Payload::Masked(masked) => Some(std::slice::from_ref(&masked.result)),
            Payload::Inline(_) | Payload::Provided(_) => None,
        }
    }

    /// Whether there is no data.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Parameters of a bind (IBTA volume 1, 10.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindWindow {
    /// The window's current key.
    pub window_rkey: u32,
    /// The new key; for type 1, chosen by the caller of the verb beforehand.
    pub new_rkey: u32,
    /// Key of the underlying region.
    pub region_lkey: u32,
    /// First byte.
    pub addr: u64,
    /// Length in bytes; 0 unbinds.
    pub length: u64,
    /// `ibv_access_flags` granted to the peer.
    pub access: u32,
}

/// The operation of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// SEND.
    Send,
    /// SEND with immediate data, in network byte order as the program gave it.
    SendImm(u32),
    /// SEND that invalidates a key at the peer.
    SendInvalidate(u32),
    /// RDMA WRITE.
    Write { va: u64, rkey: u32 },
    /// RDMA WRITE with immediate data.
    WriteImm { va: u64, rkey: u32, imm: u32 },
    /// RDMA READ.
    Read { va: u64, rkey: u32 },
    /// Compare and swap of 8 bytes.
    CompareSwap { va: u64, rkey: u32, compare: u64, swap: u64 },
    /// Fetch and add of 8 bytes.
    FetchAdd { va: u64, rkey: u32, add: u64 },
    /// ATOMIC WRITE of 8 bytes.
    AtomicWrite { va: u64, rkey: u32 },
    /// FLUSH of `length` bytes; `placement` and `selectivity` are the FETH's fields.
    Flush { va: u64, rkey: u32, length: u32, placement: u8, selectivity: u8 },
    /// APPEND to a region: Terrace's own. With `commit`, the record and all before it are persistent before the peer
    /// answers. The payload is the record, and behind it one element of 8 bytes for the record's offset.
    Append { rkey: u32, commit: bool },
    /// Invalidates a local key.
    LocalInvalidate(u32),
    /// Binds a type 2 window (or, on behalf of `ibv_bind_mw`, a type 1 window).
    BindWindow(BindWindow),
    /// Compare and swap of the bits in the masks of [`Payload::Masked`], for peers that are Terrace.
    MaskedCompareSwap { va: u64, rkey: u32, compare: u64, swap: u64 },
    /// Fetch and add of fields, of which `boundary` has the highest bits, for peers that are Terrace.
    MaskedFetchAdd { va: u64, rkey: u32, add: u64, boundary: u64 },
    /// Does nothing, and completes in its turn.
    Nop,
}

bitflags! {
    /// `ibv_send_flags`, and `terrace_send_flags` of `terrace.h`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        const FENCE = 1;
        const SIGNALED = 1 << 1;
        const SOLICITED = 1 << 2;
        const INLINE = 1 << 3;
        /// A later request is posted soon whose answer acknowledges this one, too: this one requests an ACK only if no answer to an
        /// earlier one is due. For protocols above the queue pair.
        const ANSWERED_LATER = 1 << 27;
        /// The peer's device has to answer: packets carry the request, even where the peer's memory is accessible without them. For protocols
        /// above the queue pair.
        const BY_PACKETS = 1 << 26;
        /// The flags that programs do not have.
        const OF_PROTOCOLS = SendFlags::ANSWERED_LATER.bits() | SendFlags::BY_PACKETS.bits();
        /// The request follows all earlier ones.
        const ORDER_BEFORE = 1 << 28;
        /// All later requests follow this one.
        const ORDER_AFTER = 1 << 29;
    }
}

/// One end of a reliable connection, as the peer has to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Queue pair number.
    pub qpn: u32,
    /// PSN of its first request.
    pub psn: u32,
    /// Path MTU in bytes.
    pub mtu_bytes: u16,
}

/// Destination of a UD send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    pub path: Path,
    pub qpn: u32,
    pub qkey: u32,
}

/// Destination of a send, where the queue pair alone does not determine it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// UD: any queue pair.
    Datagram(Box<Datagram>),
    /// XRC: number of a shared receive queue behind the connected queue pair.
    SharedQueue(u32),
}

/// A send work request: small, with what few requests have behind pointers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendWr {
    pub wr_id: u64,
    pub op: SendOp,
    pub payload: Payload,
    pub flags: SendFlags,
    /// For UD and XRC only.
    pub target: Option<Target>,
}

impl SendWr {
    /// A work request with one element and no target.
    #[inline]
    pub fn with_sge(wr_id: u64, op: SendOp, sge: Sge, flags: SendFlags) -> SendWr {
        SendWr { wr_id, op, payload: Payload::Sge(sge), flags, target: None }
    }

    /// Takes the request; what stays has neither data nor target.
    #[inline]
    pub fn take(&mut self) -> SendWr {
        let payload = std::mem::replace(&mut self.payload, Payload::Inline(InlineData::new()));
        SendWr { wr_id: self.wr_id, op: self.op, payload, flags: self.flags, target: self.target.take() }
    }
}

/// A receive work request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecvWr {
    pub wr_id: u64,
    pub sges: SgeList,
}

/// `ibv_wc_status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum WcStatus {
    #[default]
    Success = 0,
    LocalLength = 1,
    LocalQpOperation = 2,
    LocalProtection = 4,
    Flushed = 5,
    WindowBind = 6,
    BadResponse = 7,
    LocalAccess = 8,
    RemoteInvalidRequest = 9,
    RemoteAccess = 10,
    RemoteOperation = 11,
    RetryExceeded = 12,
    RnrRetryExceeded = 13,
    RemoteAborted = 16,
    Fatal = 19,
    General = 21,
}

/// `ibv_wc_opcode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum WcOpcode {
    #[default]
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompSwap = 3,
    FetchAdd = 4,
    BindMw = 5,
    LocalInv = 6,
    Flush = 8,
    AtomicWrite = 9,
    Recv = 128,
    RecvRdmaWithImm = 129,
    /// `IBV_WC_DRIVER1`, which verbs leaves to providers.
    Append = 135,
    /// `IBV_WC_DRIVER2`: NOP, and WAIT and ENABLE of a work queue in memory.
    Nop = 136,
}

bitflags! {
    /// `ibv_wc_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct WcFlags: u32 {
        const GRH = 1;
        const WITH_IMM = 1 << 1;
        const WITH_INV = 1 << 3;
    }
}

/// A work completion. The fields that are 0 on success come last, to be stored with few instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Wc {
    pub wr_id: u64,
    pub opcode: WcOpcode,
    /// Bytes received, read or appended; undefined for SEND and WRITE.
    pub byte_len: u32,
    pub qpn: u32,
    /// UD: the GRH kind for UCX: 2 for IPv4, otherwise 0.
    pub sl: u8,
    /// For a receive: whether the sender set the solicited event bit. Errors count as solicited.
    pub solicited: bool,
    pub status: WcStatus,
    /// The cause, for a status that several causes share; the wire's syndrome where there was one.
    pub vendor_err: u32,
    /// Immediate data in network byte order, or the invalidated rkey.
    pub imm: u32,
    /// UD: the sender's queue pair.
    pub src_qp: u32,
    /// XRC: number of the shared receive queue of this receive.
    pub srqn: u32,
    pub flags: WcFlags,
}

/// Kind of queue pair; values of `ibv_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum QpType {
    Rc = 2,
    Uc = 3,
    Ud = 4,
    /// The initiator of an extended reliable connection: it sends requests.
    XrcSend = 9,
    /// The target of one: it receives requests, each for the shared receive queue that it names.
    XrcRecv = 10,
}

impl QpType {
    /// The transport service of this queue pair.
    pub fn service(self) -> Service {
        match self {
            QpType::Rc => Service::Rc,
            QpType::Uc => Service::Uc,
            QpType::Ud => Service::Ud,
            QpType::XrcSend | QpType::XrcRecv => Service::Xrc,
        }
    }

    /// Whether requests are acknowledged, and retransmitted when they are not.
    pub fn is_reliable(self) -> bool {
        self.service().is_reliable()
    }

    /// Whether it has a receive queue, its own or a shared one.
    pub fn has_receives(self) -> bool {
        !matches!(self, QpType::XrcSend | QpType::XrcRecv)
    }
}

/// `ibv_qp_state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum QpState {
    #[default]
    Reset = 0,
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Sqd = 4,
    Sqe = 5,
    Err = 6,
}

bitflags! {
    /// `ibv_qp_attr_mask`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct QpAttrMask: u32 {
        const STATE = 1;
        const CUR_STATE = 1 << 1;
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        const ACCESS_FLAGS = 1 << 3;
        const PKEY_INDEX = 1 << 4;
        const PORT = 1 << 5;
        const QKEY = 1 << 6;
        const AV = 1 << 7;
        const PATH_MTU = 1 << 8;
        const TIMEOUT = 1 << 9;
        const RETRY_CNT = 1 << 10;
        const RNR_RETRY = 1 << 11;
        const RQ_PSN = 1 << 12;
        const MAX_QP_RD_ATOMIC = 1 << 13;
        const ALT_PATH = 1 << 14;
        const MIN_RNR_TIMER = 1 << 15;
        const SQ_PSN = 1 << 16;
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        const PATH_MIG_STATE = 1 << 18;
        const CAP = 1 << 19;
        const DEST_QPN = 1 << 20;
        const RATE_LIMIT = 1 << 25;
    }
}

/// Sizes of a queue pair's queues; `ibv_qp_cap`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// A retry count without limit, for queue pairs whose owners find dead peers by other means. The verbs have none.
pub const RETRY_CNT_INFINITE: u8 = u8::MAX;

/// Attributes of a queue pair that `modify_qp` sets and `query_qp` returns. Attributes that the transport does not use
/// (alternate path, service level, the address vector in its C form) stay with the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAttr {
    pub state: QpState,
    pub cur_state: QpState,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096.
    pub path_mtu: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qpn: u32,
    /// `ibv_access_flags`: what the peer may do through this queue pair.
    pub access: u32,
    /// The primary path; `None` until RTR.
    pub path: Option<Path>,
    pub pkey_index: u16,
    pub en_sqd_async_notify: bool,
    pub sq_draining: bool,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    /// Index into the RNR timer table.
    pub min_rnr_timer: u8,
    pub port_num: u8,
    /// Local ACK timeout exponent: 4.096 µs * 2^timeout; 0 means never.
    pub timeout: u8,
    /// Retries while the peer does not answer: 0 to 7, or [`RETRY_CNT_INFINITE`].
    pub retry_cnt: u8,
    /// 7 means infinite.
    pub rnr_retry: u8,
    pub rate_limit: u32,
}

impl Default for QpAttr {
    fn default() -> Self {
        QpAttr {
            state: QpState::Reset,
            cur_state: QpState::Reset,
            path_mtu: 1024,
            qkey: 0,
            rq_psn: 0,
            sq_psn: 0,
            dest_qpn: 0,
            access: 0,
            path: None,
            pkey_index: 0,
            en_sqd_async_notify: false,
            sq_draining: false,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            port_num: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            rate_limit: 0,
        }
    }
}

/// Creation parameters of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    pub qpn: u32,
    pub qp_type: QpType,
    pub cap: QpCap,
    /// Whether every send work request is signaled.
    pub sq_sig_all: bool,
    /// Whether receives come from the host, by `Host::take_shared_receive`: from a shared receive queue, or one in memory.
    pub has_srq: bool,
    /// Most bytes that may be unacknowledged, or requested and not yet received, at a time.
    pub window_bytes: u32,
    /// Largest `max_rd_atomic` and `max_dest_rd_atomic`.
    pub rd_atomic_limit: u8,
    /// Largest path MTU in bytes that the port can carry.
    pub mtu_limit: u32,
}

/// Why a post was refused; the C ABI converts it to an errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    #[error("the queue is full (ENOMEM)")]
    QueueFull,
    #[error("the queue pair's state does not take work requests (EINVAL)")]
    BadState,
    #[error("more scatter/gather elements than the queue was created with (EINVAL)")]
    TooManySges,
    #[error("more inline data than the queue was created with (EINVAL)")]
    TooMuchInline,
    #[error("the operation does not exist on this kind of queue pair (EINVAL)")]
    BadOpcode,
    #[error("the message is longer than the queue pair can carry (EINVAL)")]
    TooLong,
    #[error("the request does not say whom it is for (EINVAL)")]
    NoTarget,
}

/// Why `modify_qp` was refused; EINVAL at the C ABI, and the text goes to the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModifyError {
    #[error("no transition from {from:?} to {to:?} for {qp_type:?}")]
    NoTransition { qp_type: QpType, from: QpState, to: QpState },
    #[error("attributes missing for {from:?} to {to:?}: {missing:?}")]
    Missing { from: QpState, to: QpState, missing: QpAttrMask },
    #[error("attributes not allowed for {from:?} to {to:?}: {extra:?}")]
    NotAllowed { from: QpState, to: QpState, extra: QpAttrMask },
    #[error("the current state is {actual:?}, not {claimed:?}")]
    WrongCurrentState { actual: QpState, claimed: QpState },
    #[error("{field} is {value}: {allowed}")]
    OutOfRange { field: &'static str, value: u64, allowed: &'static str },
}

/// An asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpEvent {
    /// `IBV_EVENT_QP_FATAL`.
    Fatal,
    /// `IBV_EVENT_QP_REQ_ERR`.
    RequestError,
    /// `IBV_EVENT_QP_ACCESS_ERR`.
    AccessError,
    /// `IBV_EVENT_COMM_EST`.
    CommunicationEstablished,
    /// `IBV_EVENT_SQ_DRAINED`.
    SqDrained,
    /// `IBV_EVENT_QP_LAST_WQE_REACHED`.
    LastWqeReached,
}

/// Counters of a queue pair since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCounters {
    pub tx_packets: u64,
    pub tx_bytes: u64,
    pub rx_packets: u64,
    pub rx_bytes: u64,
    /// Packets retransmitted by go-back-N.
    pub retransmits: u64,
    /// Expirations of the local ACK timer.
    pub timeouts: u64,
    pub rnr_naks_sent: u64,
    pub rnr_naks_received: u64,
    pub sequence_naks_sent: u64,
    pub sequence_naks_received: u64,
    /// NAKs for invalid requests, remote access and remote operation errors.
    pub error_naks_sent: u64,
    pub error_naks_received: u64,
    /// Duplicate requests and responses.
    pub duplicates: u64,
    /// Dropped packets: wrong state, wrong address, unexpected response, and the like.
    pub dropped: u64,
    /// The peer's requests (whole messages) that were executed or are pending.
    pub requests: u64,
    /// READs, and parts of long ones, whose memory was absent and had to be fetched.
    pub fetches: u64,
    /// Packets of WRITEs, atomics and flushes that the host executed because their memory was absent.
    pub puts: u64,
    /// Congestion notification packets received, and sent.
    pub cnps_received: u64,
    pub cnps_sent: u64,
    /// Work requests that were executed without packets, and their bytes.
    pub direct: u64,
    pub direct_bytes: u64,
    /// Runs of packets that were sent, and received, as one.
    pub runs_sent: u64,
    pub runs_received: u64,
}
