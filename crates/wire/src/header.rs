//! One type per header. Values wider than their field on the wire are truncated when they are written;
//! each field's comment gives its width.

use bitflags::bitflags;

use crate::opcode::{BTH_LEN, CNP_RESERVED_LEN, Headers, Opcode};
use crate::packet::{EmitError, ParseError};
use crate::psn::Psn;

/// Removes `N` bytes from the beginning of `rest`.
#[inline]
fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], ParseError> {
    let (head, tail) = rest.split_first_chunk::<N>().ok_or(ParseError::Truncated)?;
    *rest = tail;
    Ok(*head)
}

/// Writes `N` bytes to the beginning of `out` and advances it.
#[inline]
fn put<const N: usize>(out: &mut &mut [u8], bytes: [u8; N]) -> Result<(), EmitError> {
    let (head, tail) = std::mem::take(out).split_first_chunk_mut::<N>().ok_or(EmitError::BufferTooShort)?;
    *head = bytes;
    *out = tail;
    Ok(())
}

/// The big-endian word in the `index`th 4 bytes.
fn word<const N: usize>(bytes: &[u8; N], index: usize) -> u32 {
    let at = index * 4;
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The big-endian double word that begins at the `index`th 4 bytes.
fn double_word<const N: usize>(bytes: &[u8; N], index: usize) -> u64 {
    u64::from(word(bytes, index)) << 32 | u64::from(word(bytes, index + 1))
}

/// Joins 4-byte words into a header's bytes.
fn from_words<const WORDS: usize, const BYTES: usize>(words: [u32; WORDS]) -> [u8; BYTES] {
    const { assert!(WORDS * 4 == BYTES) };
    let mut bytes = [0; BYTES];
    for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_be_bytes());
    }
    bytes
}

/// Base transport header (IBTA volume 1, 9.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bth {
    /// Operation and position of the packet.
    pub opcode: Opcode,
    /// Whether the receiver's completion counts as solicited.
    pub solicited: bool,
    /// The migration state bit. Unused without path migration; RoCEv2 peers ignore it.
    pub migrated: bool,
    /// Bytes of padding behind the payload, 0 to 3.
    pub pad: u8,
    /// Partition key.
    pub pkey: u16,
    /// Forward congestion notification bit of InfiniBand; RoCEv2 marks the IP header instead.
    pub fecn: bool,
    /// Backward congestion notification; set in a congestion notification packet.
    pub becn: bool,
    /// Destination queue pair number, 24 bits.
    pub qpn: u32,
    /// Whether the sender requests an acknowledgement.
    pub ack_request: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    #[inline(always)]
    pub(crate) fn parse(rest: &mut &[u8]) -> Result<Bth, ParseError> {
        let bytes: [u8; BTH_LEN] = take(rest)?;
        let flags = bytes[1];
        // 9.2: the only version of the transport header is 0.
        if flags & 0x0f != 0 {
            return Err(ParseError::TransportVersion(flags & 0x0f));
        }
        let psn = word(&bytes, 2);
        Ok(Bth {
            opcode: Opcode::from_byte(bytes[0]).ok_or(ParseError::UnknownOpcode(bytes[0]))?,
            solicited: flags & 0x80 != 0,
            migrated: flags & 0x40 != 0,
            pad: flags >> 4 & 3,
            pkey: u16::from_be_bytes([bytes[2], bytes[3]]),
            fecn: bytes[4] & 0x80 != 0,
            becn: bytes[4] & 0x40 != 0,
            qpn: word(&bytes, 1) & 0xff_ffff,
            ack_request: psn >> 31 != 0,
            psn: Psn::new(psn),
        })
    }

    #[inline(always)]
    pub(crate) fn emit(&self, out: &mut &mut [u8]) -> Result<(), EmitError> {
        let flags =
            u32::from(self.solicited) << 7 | u32::from(self.migrated) << 6 | u32::from(self.pad & 3) << 4;
        let words = [
            u32::from(self.opcode as u8) << 24 | flags << 16 | u32::from(self.pkey),
            u32::from(self.fecn) << 31 | u32::from(self.becn) << 30 | self.qpn & 0xff_ffff,
            u32::from(self.ack_request) << 31 | self.psn.get(),
        ];
        put::<BTH_LEN>(out, from_words(words))
    }
}

/// RDMA extended transport header (IBTA volume 1, 9.3): the remote memory range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// Remote address.
    pub va: u64,
    /// Key of the remote memory.
    pub rkey: u32,
    /// Length of the whole message in bytes.
    pub length: u32,
}

impl Reth {
    /// The header of a packet that nobody has verified, for a guess at what it will access. `None` if it has none
    /// directly behind the base transport header.
    #[inline]
    pub fn of_unverified(packet: &[u8]) -> Option<Reth> {
        let headers = Opcode::from_byte(*packet.first()?)?.info().headers;
        let is_next = headers.contains(Headers::RETH)
            && !headers.intersects(Headers::DETH | Headers::XRCETH | Headers::FETH);
        let mut rest = packet.get(BTH_LEN..).filter(|_| is_next)?;
        Reth::parse(&mut rest).ok()
    }

    #[inline]
    fn parse(rest: &mut &[u8]) -> Result<Reth, ParseError> {
        let bytes: [u8; 16] = take(rest)?;
        Ok(Reth { va: double_word(&bytes, 0), rkey: word(&bytes, 2), length: word(&bytes, 3) })
    }

    fn emit(&self, out: &mut &mut [u8]) -> Result<(), EmitError> {
        put::<16>(out, from_words([(self.va >> 32) as u32, self.va as u32, self.rkey, self.length]))
    }
}

/// Reasons of a NAK (IBTA volume 1, 9.7.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum NakCode {
    /// A packet is missing; the requester retransmits from it.
    PsnSequence = 0,
    /// The request is invalid for this queue pair or region.
    InvalidRequest = 1,
    /// The key, the range or the access rights are wrong.
    RemoteAccess = 2,
    /// The responder failed.
    RemoteOperation = 3,
    /// Invalid reliable datagram request. The code is assigned by the standard.
    InvalidRdRequest = 4,
}

impl NakCode {
    const ALL: [NakCode; 5] = [
        NakCode::PsnSequence,
        NakCode::InvalidRequest,
        NakCode::RemoteAccess,
        NakCode::RemoteOperation,
        NakCode::InvalidRdRequest,
    ];
}

/// The syndrome of an acknowledgement (IBTA volume 1, 9.7.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Syndrome {
    /// Positive acknowledgement.
    Ack {
        /// Coded count of posted receives, 5 bits; 31 = not counted.
        credits: u8,
    },
    /// The receiver is not ready.
    RnrNak {
        /// Coded time to wait, 5 bits (IBTA volume 1, 9.7.5).
        timer: u8,
    },
    /// Negative acknowledgement.
    Nak(NakCode),
}

impl Syndrome {
    fn from_byte(byte: u8) -> Result<Syndrome, ParseError> {
        let value = byte & 0x1f;
        let nak = || NakCode::ALL.get(usize::from(value)).copied().map(Syndrome::Nak);
        match byte >> 5 {
            0 => Ok(Syndrome::Ack { credits: value }),
            1 => Ok(Syndrome::RnrNak { timer: value }),
            3 => nak().ok_or(ParseError::ReservedSyndrome(byte)),
            _ => Err(ParseError::ReservedSyndrome(byte)),
        }
    }

    /// The byte on the wire.
    pub const fn to_byte(self) -> u8 {
        match self {
            Syndrome::Ack { credits } => credits & 0x1f,
            Syndrome::RnrNak { timer } => 0x20 | timer & 0x1f,
            Syndrome::Nak(code) => 0x60 | code as u8,
        }
    }
}

/// Acknowledge extended transport header (IBTA volume 1, 9.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// Kind of acknowledgement.
    pub syndrome: Syndrome,
    /// Message sequence number, 24 bits.
    pub msn: u32,
}

impl Aeth {
    #[inline]
    fn parse(rest: &mut &[u8]) -> Result<Aeth, ParseError> {
        let bytes: [u8; 4] = take(rest)?;
        Ok(Aeth { syndrome: Syndrome::from_byte(bytes[0])?, msn: word(&bytes, 0) & 0xff_ffff })
    }

    fn emit(&self, out: &mut &mut [u8]) -> Result<(), EmitError> {
        put(out, (u32::from(self.syndrome.to_byte()) << 24 | self.msn & 0xff_ffff).to_be_bytes())
    }
}

/// Atomic extended transport header (IBTA volume 1, 9.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// Remote address; the operation only succeeds if it is a multiple of 8.
    pub va: u64,
    /// Key of the remote memory.
    pub rkey: u32,
    /// The value to swap in, or to add.
    pub swap_or_add: u64,
    /// The value to compare with; unused by fetch and add; of a masked one, the highest bits of the fields.
    pub compare: u64,
}

impl AtomicEth {
    #[inline]
    fn parse(rest: &mut &[u8]) -> Result<AtomicEth, ParseError> {
        let bytes: [u8; 28] = take(rest)?;
        Ok(AtomicEth {
            va: double_word(&bytes, 0),
            rkey: word(&bytes, 2),
            swap_or_add: double_word(&bytes, 3),
            compare: double_word(&bytes, 5),
        })
    }

    fn emit(&self, out: &mut &mut [u8]) -> Result<(), EmitError> {
        let words = [
            (self.va >> 32) as u32,
            self.va as u32,
            self.rkey,
            (self.swap_or_add >> 32) as u32,
            self.swap_or_add as u32,
            (self.compare >> 32) as u32,
            self.compare as u32,
        ];
        put::<28>(out, from_words(words))
    }
}

/// Datagram extended transport header (IBTA volume 1, 9.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// Queue key; the receiver's must be equal.
    pub qkey: u32,
    /// Queue pair number of the sender, 24 bits.
    pub source_qpn: u32,
}

impl Deth {
    #[inline]
    fn parse(rest: &mut &[u8]) -> Result<Deth, ParseError> {
        let bytes: [u8; 8] = take(rest)?;
        Ok(Deth { qkey: word(&bytes, 0), source_qpn: word(&bytes, 1) & 0xff_ffff })
    }

    fn emit(&self, out: &mut &mut [u8]) -> Result<(), EmitError> {
        put::<8>(out, from_words([self.qkey, self.source_qpn & 0xff_ffff]))
    }
}

/// FLUSH extended transport header (annex A19): placement and range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feth {
    /// Placement type, 4 bits: 1 = globally visible, 2 = persistent.
    pub placement: u8,
    /// Selectivity level, 2 bits: 0 = the range in the RETH, 1 = the whole region.
    pub selectivity: u8,
}

impl Feth {
    #[inline]
    fn parse(rest: &mut &[u8]) -> Result<Feth, ParseError> {
        let bytes: [u8; 4] = take(rest)?;
        Ok(Feth { placement: bytes[3] & 0x0f, selectivity: bytes[3] >> 4 & 3 })
    }

    fn emit(&self, out: &mut &mut [u8]) -> Result<(), EmitError> {
        put(out, [0, 0, 0, (self.selectivity & 3) << 4 | self.placement & 0x0f])
    }
}

bitflags! {
    /// What an APPEND requests beyond its data.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AppendFlags: u32 {
        /// The record and everything before it are persistent before the answer leaves.
        const COMMIT = 1;
    }
}

/// APPEND extended transport header: Terrace's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendEth {
    /// Key of the remote region.
    pub rkey: u32,
    /// Length of the whole record in bytes.
    pub length: u32,
    /// Flags. A parsed header may have unknown ones: its receiver cannot do what they request, and refuses it.
    pub flags: AppendFlags,
}

impl AppendEth {
    #[inline]
    fn parse(rest: &mut &[u8]) -> Result<AppendEth, ParseError> {
        let bytes: [u8; 12] = take(rest)?;
        let flags = AppendFlags::from_bits_retain(word(&bytes, 2));
        Ok(AppendEth { rkey: word(&bytes, 0), length: word(&bytes, 1), flags })
    }

    fn emit(&self, out: &mut &mut [u8]) -> Result<(), EmitError> {
        put::<12>(out, from_words([self.rkey, self.length, self.flags.bits()]))
    }
}

/// Largest shared receive queue number in an XRC extended transport header.
pub const XRC_SRQN_MAX: u32 = 0xff_ffff;

/// XRC extended transport header (annex A14): 8 reserved bits and the number of a shared receive queue.
fn parse_xrceth(rest: &mut &[u8]) -> Result<u32, ParseError> {
    Ok(u32::from_be_bytes(take(rest)?) & XRC_SRQN_MAX)
}

/// The headers behind the base transport header. A parsed packet has exactly those of its opcode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// RDMA extended transport header.
    pub reth: Option<Reth>,
    /// Acknowledge extended transport header.
    pub aeth: Option<Aeth>,
    /// Atomic extended transport header.
    pub atomic: Option<AtomicEth>,
    /// The memory's value before an atomic operation; for an APPEND the region's end before it.
    pub atomic_ack: Option<u64>,
    /// Immediate data in network order: `u32::from_ne_bytes` of its 4 bytes on the wire, as `ibv_wc` has it.
    pub imm: Option<u32>,
    /// The key to invalidate.
    pub ieth: Option<u32>,
    /// Datagram extended transport header.
    pub deth: Option<Deth>,
    /// FLUSH extended transport header.
    pub feth: Option<Feth>,
    /// XRC extended transport header: the number of the request's shared receive queue, 24 bits.
    pub xrc_srqn: Option<u32>,
    /// APPEND extended transport header.
    pub append: Option<AppendEth>,
}

impl Extensions {
    /// Reads the headers in `headers`, in the order of its bits. The others are not changed.
    #[inline(never)]
    pub(crate) fn read(&mut self, headers: Headers, rest: &mut &[u8]) -> Result<(), ParseError> {
        if headers.contains(Headers::DETH) {
            self.deth = Some(Deth::parse(rest)?);
        }
        if headers.contains(Headers::XRCETH) {
            self.xrc_srqn = Some(parse_xrceth(rest)?);
        }
        if headers.contains(Headers::FETH) {
            self.feth = Some(Feth::parse(rest)?);
        }
        if headers.contains(Headers::RETH) {
            self.reth = Some(Reth::parse(rest)?);
        }
        if headers.contains(Headers::ATOMIC_ETH) {
            self.atomic = Some(AtomicEth::parse(rest)?);
        }
        if headers.contains(Headers::AETH) {
            self.aeth = Some(Aeth::parse(rest)?);
        }
        if headers.contains(Headers::ATOMIC_ACK_ETH) {
            self.atomic_ack = Some(u64::from_be_bytes(take(rest)?));
        }
        if headers.contains(Headers::IMM) {
            self.imm = Some(u32::from_ne_bytes(take(rest)?));
        }
        if headers.contains(Headers::IETH) {
            self.ieth = Some(u32::from_be_bytes(take(rest)?));
        }
        if headers.contains(Headers::CNP_RESERVED) {
            take::<CNP_RESERVED_LEN>(rest)?;
        }
        if headers.contains(Headers::APPEND_ETH) {
            self.append = Some(AppendEth::parse(rest)?);
        }
        Ok(())
    }

    /// Writes the headers in `headers`, in the order of its bits.
    #[inline(always)]
    pub(crate) fn emit(&self, headers: Headers, out: &mut &mut [u8]) -> Result<(), EmitError> {
        if headers.is_empty() { Ok(()) } else { self.emit_some(headers, out) }
    }

    #[inline(never)]
    fn emit_some(&self, headers: Headers, out: &mut &mut [u8]) -> Result<(), EmitError> {
        if headers.contains(Headers::DETH) {
            self.deth.ok_or(EmitError::MissingHeader(Headers::DETH))?.emit(out)?;
        }
        if headers.contains(Headers::XRCETH) {
            let number = self.xrc_srqn.ok_or(EmitError::MissingHeader(Headers::XRCETH))?;
            put(out, (number & XRC_SRQN_MAX).to_be_bytes())?;
        }
        if headers.contains(Headers::FETH) {
            self.feth.ok_or(EmitError::MissingHeader(Headers::FETH))?.emit(out)?;
        }
        if headers.contains(Headers::RETH) {
            self.reth.ok_or(EmitError::MissingHeader(Headers::RETH))?.emit(out)?;
        }
        if headers.contains(Headers::ATOMIC_ETH) {
            self.atomic.ok_or(EmitError::MissingHeader(Headers::ATOMIC_ETH))?.emit(out)?;
        }
        if headers.contains(Headers::AETH) {
            self.aeth.ok_or(EmitError::MissingHeader(Headers::AETH))?.emit(out)?;
        }
        if headers.contains(Headers::ATOMIC_ACK_ETH) {
            let original = self.atomic_ack.ok_or(EmitError::MissingHeader(Headers::ATOMIC_ACK_ETH))?;
            put(out, original.to_be_bytes())?;
        }
        if headers.contains(Headers::IMM) {
            put(out, self.imm.ok_or(EmitError::MissingHeader(Headers::IMM))?.to_ne_bytes())?;
        }
        if headers.contains(Headers::IETH) {
            put(out, self.ieth.ok_or(EmitError::MissingHeader(Headers::IETH))?.to_be_bytes())?;
        }
        if headers.contains(Headers::CNP_RESERVED) {
            put(out, [0; CNP_RESERVED_LEN])?;
        }
        if headers.contains(Headers::APPEND_ETH) {
            self.append.ok_or(EmitError::MissingHeader(Headers::APPEND_ETH))?.emit(out)?;
        }
        Ok(())
    }
}
