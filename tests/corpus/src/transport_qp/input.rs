//! The fuzzer's input, and its translation to work requests, attributes and packets. Numbers that a queue pair compares
//! with its own are drawn near those, because they would not match otherwise.

use std::net::IpAddr;

use arbitrary::Arbitrary;
use smallvec::SmallVec;
use terrace_transport::{
    BindWindow, Datagram, Payload, QpAttr, QpAttrMask, QpCap, QpConfig, QpState, QpType, RecvWr, SendFlags,
    SendOp, SendWr, Sge, SgeList, Target,
};
use terrace_wire::{
    Aeth, AppendEth, AppendFlags, AtomicEth, Bth, Deth, Extensions, Feth, NakCode, Opcode, Psn, Reth,
    Syndrome, emit_headers,
};

use crate::support::path_to;

/// Bytes of the queue pair's memory.
pub const MEMORY_LEN: u64 = 16 << 10;
/// Keys of a region with all access, a region without access, and a window. Other keys are unknown.
pub const KEYS: u32 = 4;

pub const TYPES: [QpType; 5] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend, QpType::XrcRecv];

/// The only shared receive queue of XRC.
pub const SRQN: u32 = 0x33;
const STATES: [QpState; 7] =
    [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Err];
const MTUS: [u32; 5] = [256, 512, 1024, 2048, 4096];

#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Setup {
    qp_type: u8,
    state: u8,
    signal_all: bool,
    pub shared_receives: bool,
    window: u16,
    caps: u8,
    attributes: Attributes,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Attributes {
    mtu: u8,
    access: u16,
    rq_psn: u8,
    sq_psn: u8,
    rd_atomic: u8,
    dest_rd_atomic: u8,
    retries: u8,
    timeout: u8,
}

#[derive(Arbitrary, Clone, Debug)]
pub enum Step {
    Packet(PacketStep),
    /// Raw bytes.
    Raw {
        bytes: Vec<u8>,
        foreign: bool,
    },
    Send(SendStep),
    Receive {
        memory: [Piece; 2],
        count: u8,
    },
    Modify {
        to: u8,
        wrong_current: bool,
        without_state: bool,
        extra: u32,
        missing: u32,
        attributes: Attributes,
    },
    Transmit {
        room: u8,
        hold: bool,
    },
    Wait {
        ns: u32,
    },
    /// The time advances to the next timer.
    WaitForTimer,
    /// Unreliable services pause after each later packet.
    Pause {
        ns: u16,
    },
    /// A region is deregistered, or registered again.
    Region {
        key: u8,
        present: bool,
    },
    /// Only this part of the memory is absent afterwards. With an odd length APPENDs end later.
    Absent {
        addr: u16,
        length: u16,
        faulting: bool,
        slots: u8,
    },
    /// An access to absent memory ends, and the queue pair may be woken.
    Complete {
        index: u8,
        outcome: u8,
        wakes: bool,
    },
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Piece {
    addr: u16,
    length: u16,
    key: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct SendStep {
    op: u8,
    flags: u8,
    inline: bool,
    memory: [Piece; 2],
    count: u8,
    va: u16,
    key: u8,
    value: u8,
    without_address: bool,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct PacketStep {
    opcode: u8,
    /// Offset from the expected PSN, or from the next one to send.
    psn_offset: i8,
    flags: u8,
    syndrome: u8,
    va: u16,
    key: u8,
    len: u16,
    payload: PayloadLen,
    value: u8,
    foreign: bool,
    congested: bool,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum PayloadLen {
    Mtu,
    Empty,
    Any(u16),
    /// The length that the header declares, within a packet.
    AsAnnounced,
}

impl Setup {
    pub fn config(&self) -> QpConfig {
        let size = u32::from(self.caps % 16) + 1;
        QpConfig {
            qpn: 0x11,
            qp_type: TYPES[usize::from(self.qp_type) % TYPES.len()],
            cap: QpCap {
                max_send_wr: size,
                max_recv_wr: size,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 64,
            },
            sq_sig_all: self.signal_all,
            has_srq: self.shared_receives,
            window_bytes: self.window.into(),
            rd_atomic_limit: 8,
            mtu_limit: 4096,
        }
    }

    pub fn state(&self) -> QpState {
        state(self.state)
    }

    pub fn attr(&self, peer: IpAddr) -> QpAttr {
        self.attributes.attr(peer)
    }
}

pub fn state(selector: u8) -> QpState {
    STATES[usize::from(selector) % STATES.len()]
}

impl Attributes {
    pub fn attr(&self, peer: IpAddr) -> QpAttr {
        QpAttr {
            path_mtu: MTUS[usize::from(self.mtu) % 5],
            qkey: 5,
            // These PSNs are near the wrap.
            rq_psn: 0xff_ff80 + u32::from(self.rq_psn),
            sq_psn: 0xff_ff80 + u32::from(self.sq_psn),
            dest_qpn: 0x22,
            access: u32::from(!self.access) & 0x3ff,
            path: Some(path_to(peer)),
            max_rd_atomic: self.rd_atomic % 9,
            max_dest_rd_atomic: self.dest_rd_atomic % 9,
            min_rnr_timer: self.timeout >> 3,
            port_num: 1,
            timeout: self.timeout & 31,
            retry_cnt: self.retries & 7,
            rnr_retry: self.retries >> 3 & 7,
            ..QpAttr::default()
        }
    }
}

/// Returns the mask of a `modify`: the required attributes, with some added and some removed.
pub fn modify_mask(needed: QpAttrMask, extra: u32, missing: u32) -> QpAttrMask {
    // Most masks have none added or removed.
    let some =
        |bits: u32| if bits & 1 == 0 { QpAttrMask::empty() } else { QpAttrMask::from_bits_truncate(bits) };
    (needed | some(extra)).difference(some(missing))
}

fn memory(pieces: &[Piece; 2], count: u8) -> SgeList {
    let sge = |piece: &Piece| Sge {
        addr: u64::from(piece.addr) % MEMORY_LEN,
        length: u32::from(piece.length % 5000),
        lkey: u32::from(piece.key) % KEYS,
    };
    pieces.iter().take(usize::from(count % 4)).map(sge).collect()
}

pub fn receive(wr_id: u64, pieces: &[Piece; 2], count: u8) -> RecvWr {
    RecvWr { wr_id, sges: memory(pieces, count) }
}

impl SendStep {
    pub fn request(&self, wr_id: u64, peer: IpAddr) -> SendWr {
        let (va, rkey) = (u64::from(self.va), u32::from(self.key) % KEYS);
        let value = u64::from(self.value);
        let op = match self.op % 15 {
            0 => SendOp::Send,
            1 => SendOp::SendImm(7),
            2 => SendOp::SendInvalidate(rkey),
            3 => SendOp::Write { va, rkey },
            4 => SendOp::WriteImm { va, rkey, imm: 7 },
            5..=7 => SendOp::Read { va, rkey },
            8 => SendOp::CompareSwap { va, rkey, compare: value, swap: 1 },
            9 => SendOp::FetchAdd { va, rkey, add: value },
            10 => SendOp::AtomicWrite { va, rkey },
            11 => {
                SendOp::Flush { va, rkey, length: value as u32, placement: self.value, selectivity: self.key }
            }
            12 => SendOp::LocalInvalidate(rkey),
            13 => SendOp::BindWindow(BindWindow {
                window_rkey: rkey,
                new_rkey: rkey,
                region_lkey: 1,
                addr: va,
                length: value,
                access: 0,
            }),
            _ => SendOp::Append { rkey, commit: value & 1 == 1 },
        };
        let payload = if self.inline {
            Payload::Inline(SmallVec::from_elem(self.value, usize::from(self.value % 80)))
        } else {
            Payload::Sges(memory(&self.memory, self.count))
        };
        let datagram = Datagram { path: path_to(peer), qpn: 0x22, qkey: 5 };
        // These are the existing queue, another one, and a number too large for the header.
        let target = match self.value % 4 {
            0 | 1 => Target::Datagram(Box::new(datagram)),
            2 => Target::SharedQueue(SRQN + u32::from(self.key % 2)),
            _ => Target::SharedQueue(0x100_0000),
        };
        SendWr {
            wr_id,
            op,
            payload,
            flags: SendFlags::from_bits_truncate(self.flags.into()),
            target: (!self.without_address).then_some(target),
        }
    }
}

impl PacketStep {
    pub fn is_foreign(&self) -> bool {
        self.foreign
    }

    pub fn traffic_class(&self) -> u8 {
        if self.congested { 3 } else { 0 }
    }

    /// Returns the bytes of the packet, for a queue pair at these PSNs.
    pub fn bytes(&self, expected: u32, next: u32, mtu: u32) -> Vec<u8> {
        let opcodes = Opcode::all();
        let count = opcodes.len();
        let opcode = Opcode::all().nth(usize::from(self.opcode) % count).expect("within the table");
        let info = opcode.info();
        let is_answer = info.headers.contains(terrace_wire::Headers::AETH) || self.flags & 0x80 != 0;
        let base = Psn::new(if is_answer { next } else { expected });
        let payload_len = match self.payload {
            _ if !info.payload => 0,
            PayloadLen::Mtu => mtu,
            PayloadLen::Empty => 0,
            PayloadLen::Any(len) => u32::from(len) % 4200,
            PayloadLen::AsAnnounced => u32::from(self.len).min(mtu),
        };
        let pad = payload_len.wrapping_neg() & 3;
        let bth = Bth {
            opcode,
            solicited: self.flags & 1 != 0,
            migrated: true,
            pad: pad as u8,
            pkey: if self.flags & 2 != 0 && self.value == 0 { 1 } else { 0xffff },
            fecn: false,
            becn: false,
            qpn: 0x11,
            ack_request: self.flags & 4 == 0,
            psn: Psn::new(base.get().wrapping_add_signed(self.psn_offset.into())),
        };
        let mut bytes = vec![0; info.header_len];
        emit_headers(&bth, &self.extensions(), &mut bytes).expect("all extensions are there");
        bytes.resize(info.header_len + (payload_len + pad) as usize, 0);
        bytes[info.header_len..][..payload_len as usize].fill(self.value);
        bytes
    }

    fn extensions(&self) -> Extensions {
        let (va, rkey, value) = (u64::from(self.va), u32::from(self.key) % KEYS, u64::from(self.value));
        let code = self.syndrome & 0x1f;
        let syndrome = match self.syndrome >> 5 {
            0..=3 => Syndrome::Ack { credits: code },
            4 => Syndrome::RnrNak { timer: code },
            _ => Syndrome::Nak(match code % 5 {
                0 => NakCode::PsnSequence,
                1 => NakCode::InvalidRequest,
                2 => NakCode::RemoteAccess,
                3 => NakCode::RemoteOperation,
                _ => NakCode::InvalidRdRequest,
            }),
        };
        let length = if self.flags & 8 != 0 && value == 0xff { u32::MAX } else { self.len.into() };
        Extensions {
            reth: Some(Reth { va, rkey, length }),
            aeth: Some(Aeth { syndrome, msn: 0 }),
            atomic: Some(AtomicEth { va, rkey, swap_or_add: value, compare: value }),
            atomic_ack: Some(value),
            imm: Some(7),
            ieth: Some(rkey),
            deth: Some(Deth { qkey: if self.flags & 16 != 0 { 6 } else { 5 }, source_qpn: 0x22 }),
            feth: Some(Feth { placement: self.value & 0xf, selectivity: self.value >> 4 & 3 }),
            xrc_srqn: Some(SRQN + u32::from(self.value == 0)),
            append: Some(AppendEth {
                rkey,
                length,
                flags: AppendFlags::from_bits_retain((value & 3).saturating_sub(1) as u32),
            }),
        }
    }
}
