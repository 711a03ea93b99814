//! Table of the base transport header's opcodes and the headers of each (IBTA volume 1, 9.2 and 9.3;
//! annex A14 for the extended reliable connection; annex A17 for the congestion notification packet; annex A19 for
//! FLUSH and ATOMIC WRITE). APPEND is Terrace's own: 9.2 leaves the opcodes from 0xc0 on to manufacturers.

use bitflags::bitflags;

bitflags! {
    /// The extension headers of a packet, in the wire order of their bits.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Headers: u16 {
        /// Datagram extended transport header, 8 bytes.
        const DETH = 1 << 0;
        /// XRC extended transport header, 4 bytes.
        const XRCETH = 1 << 1;
        /// FLUSH extended transport header, 4 bytes.
        const FETH = 1 << 2;
        /// RDMA extended transport header, 16 bytes.
        const RETH = 1 << 3;
        /// Atomic extended transport header, 28 bytes.
        const ATOMIC_ETH = 1 << 4;
        /// Acknowledge extended transport header, 4 bytes.
        const AETH = 1 << 5;
        /// Atomic acknowledge extended transport header, 8 bytes.
        const ATOMIC_ACK_ETH = 1 << 6;
        /// Immediate data, 4 bytes.
        const IMM = 1 << 7;
        /// Invalidate extended transport header, 4 bytes.
        const IETH = 1 << 8;
        /// The 16 reserved bytes of a congestion notification packet: zero when sent, ignored when received.
        const CNP_RESERVED = 1 << 9;
        /// APPEND extended transport header, 12 bytes.
        const APPEND_ETH = 1 << 10;
    }
}

/// Length of the base transport header in bytes.
pub(crate) const BTH_LEN: usize = 12;
/// Length of the reserved part of a congestion notification packet in bytes (annex A17).
pub(crate) const CNP_RESERVED_LEN: usize = 16;

impl Headers {
    /// Length of these headers together, in bytes.
    pub const fn wire_len(self) -> usize {
        const LENGTHS: [(Headers, usize); 11] = [
            (Headers::DETH, 8),
            (Headers::XRCETH, 4),
            (Headers::FETH, 4),
            (Headers::RETH, 16),
            (Headers::ATOMIC_ETH, 28),
            (Headers::AETH, 4),
            (Headers::ATOMIC_ACK_ETH, 8),
            (Headers::IMM, 4),
            (Headers::IETH, 4),
            (Headers::CNP_RESERVED, CNP_RESERVED_LEN),
            (Headers::APPEND_ETH, 12),
        ];
        let mut sum = 0;
        let mut i = 0;
        while i < LENGTHS.len() {
            if self.contains(LENGTHS[i].0) {
                sum += LENGTHS[i].1;
            }
            i += 1;
        }
        sum
    }
}

/// The transport service of an opcode: its upper three bits, except in a manufacturer's opcodes (0xc0 to 0xff).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification, which belongs to no queue pair's service.
    Cnp,
    /// Extended reliable connection: a reliable connection each of whose requests names its shared receive queue
    /// (annex A14).
    Xrc,
}

impl Service {
    /// Whether requests are acknowledged.
    pub const fn is_reliable(self) -> bool {
        matches!(self, Service::Rc | Service::Xrc)
    }
}

/// The operation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// The request of an RDMA READ.
    ReadRequest,
    /// Data of an RDMA READ; without data it answers FLUSH and ATOMIC WRITE.
    ReadResponse,
    /// A positive or negative acknowledgement.
    Acknowledge,
    /// The answer to an atomic operation or an APPEND.
    AtomicAcknowledge,
    /// Compare and swap.
    CompareSwap,
    /// Fetch and add.
    FetchAdd,
    /// FLUSH.
    Flush,
    /// ATOMIC WRITE.
    AtomicWrite,
    /// Congestion notification.
    Cnp,
    /// APPEND: writes at the end of a region, which grows.
    Append,
    /// Compare and swap of the bits in masks (a manufacturer's operation).
    MaskedCompareSwap,
    /// Fetch and add of fields (a manufacturer's operation).
    MaskedFetchAdd,
}

/// Position of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Position {
    /// First of several.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several.
    Last,
    /// The whole message.
    Only,
}

impl Position {
    /// Whether the packet begins a message.
    pub const fn is_first(self) -> bool {
        matches!(self, Position::First | Position::Only)
    }

    /// Whether the packet ends a message.
    pub const fn is_last(self) -> bool {
        matches!(self, Position::Last | Position::Only)
    }
}

/// The last header of a message's last packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trailer {
    /// No trailer.
    None,
    /// Immediate data for the receiver's completion.
    Immediate,
    /// A key that the receiver invalidates.
    Invalidate,
}

/// Properties of an opcode.
#[derive(Clone, Copy, Debug)]
pub struct OpcodeInfo {
    /// The opcode.
    pub opcode: Opcode,
    /// Its name in logs and traces.
    pub name: &'static str,
    /// Its transport service.
    pub service: Service,
    /// Its operation.
    pub operation: Operation,
    /// Its position in the message.
    pub position: Position,
    /// Its trailer.
    pub trailer: Trailer,
    /// The extension headers behind the base transport header.
    pub headers: Headers,
    /// Length of the base transport header and the extension headers together, in bytes.
    pub header_len: usize,
    /// Whether data may follow the headers.
    pub payload: bool,
}

/// Declares the opcodes and their table, one row each, so that neither can lack an entry.
macro_rules! opcodes {
    ($($(#[doc = $doc:literal])* $variant:ident = $byte:literal, $name:literal,
        $service:ident $operation:ident $position:ident $trailer:ident, [$($header:ident)*], $payload:literal;)*) => {
        /// An opcode of the base transport header. The value is the byte on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Opcode {
            $($(#[doc = $doc])* #[doc = concat!("`", $name, "`")] $variant = $byte,)*
        }

        /// One row per opcode, by ascending byte.
        static TABLE: &[OpcodeInfo] = &OPCODES;

        const OPCODES: [OpcodeInfo; [$($byte),*].len()] = [$({
            let headers = Headers::empty()$(.union(Headers::$header))*;
            OpcodeInfo {
                opcode: Opcode::$variant,
                name: $name,
                service: Service::$service,
                operation: Operation::$operation,
                position: Position::$position,
                trailer: Trailer::$trailer,
                headers,
                header_len: BTH_LEN + headers.wire_len(),
                payload: $payload,
            }
        }),*];
    };
}

opcodes! {
    RcSendFirst = 0x00, "RC_SEND_FIRST", Rc Send First None, [], true;
    RcSendMiddle = 0x01, "RC_SEND_MIDDLE", Rc Send Middle None, [], true;
    RcSendLast = 0x02, "RC_SEND_LAST", Rc Send Last None, [], true;
    RcSendLastImm = 0x03, "RC_SEND_LAST_IMM", Rc Send Last Immediate, [IMM], true;
    RcSendOnly = 0x04, "RC_SEND_ONLY", Rc Send Only None, [], true;
    RcSendOnlyImm = 0x05, "RC_SEND_ONLY_IMM", Rc Send Only Immediate, [IMM], true;
    RcWriteFirst = 0x06, "RC_WRITE_FIRST", Rc Write First None, [RETH], true;
    RcWriteMiddle = 0x07, "RC_WRITE_MIDDLE", Rc Write Middle None, [], true;
    RcWriteLast = 0x08, "RC_WRITE_LAST", Rc Write Last None, [], true;
    RcWriteLastImm = 0x09, "RC_WRITE_LAST_IMM", Rc Write Last Immediate, [IMM], true;
    RcWriteOnly = 0x0a, "RC_WRITE_ONLY", Rc Write Only None, [RETH], true;
    RcWriteOnlyImm = 0x0b, "RC_WRITE_ONLY_IMM", Rc Write Only Immediate, [RETH IMM], true;
    RcReadRequest = 0x0c, "RC_READ_REQUEST", Rc ReadRequest Only None, [RETH], false;
    RcReadResponseFirst = 0x0d, "RC_READ_RESPONSE_FIRST", Rc ReadResponse First None, [AETH], true;
    RcReadResponseMiddle = 0x0e, "RC_READ_RESPONSE_MIDDLE", Rc ReadResponse Middle None, [], true;
    RcReadResponseLast = 0x0f, "RC_READ_RESPONSE_LAST", Rc ReadResponse Last None, [AETH], true;
    RcReadResponseOnly = 0x10, "RC_READ_RESPONSE_ONLY", Rc ReadResponse Only None, [AETH], true;
    RcAcknowledge = 0x11, "RC_ACKNOWLEDGE", Rc Acknowledge Only None, [AETH], false;
    RcAtomicAcknowledge = 0x12, "RC_ATOMIC_ACKNOWLEDGE", Rc AtomicAcknowledge Only None, [AETH ATOMIC_ACK_ETH], false;
    RcCompareSwap = 0x13, "RC_COMPARE_SWAP", Rc CompareSwap Only None, [ATOMIC_ETH], false;
    RcFetchAdd = 0x14, "RC_FETCH_ADD", Rc FetchAdd Only None, [ATOMIC_ETH], false;
    RcSendLastInvalidate = 0x16, "RC_SEND_LAST_INVALIDATE", Rc Send Last Invalidate, [IETH], true;
    RcSendOnlyInvalidate = 0x17, "RC_SEND_ONLY_INVALIDATE", Rc Send Only Invalidate, [IETH], true;
    RcFlush = 0x1c, "RC_FLUSH", Rc Flush Only None, [FETH RETH], false;
    /// The 8 bytes to write are the payload.
    RcAtomicWrite = 0x1d, "RC_ATOMIC_WRITE", Rc AtomicWrite Only None, [RETH], true;
    UcSendFirst = 0x20, "UC_SEND_FIRST", Uc Send First None, [], true;
    UcSendMiddle = 0x21, "UC_SEND_MIDDLE", Uc Send Middle None, [], true;
    UcSendLast = 0x22, "UC_SEND_LAST", Uc Send Last None, [], true;
    UcSendLastImm = 0x23, "UC_SEND_LAST_IMM", Uc Send Last Immediate, [IMM], true;
    UcSendOnly = 0x24, "UC_SEND_ONLY", Uc Send Only None, [], true;
    UcSendOnlyImm = 0x25, "UC_SEND_ONLY_IMM", Uc Send Only Immediate, [IMM], true;
    UcWriteFirst = 0x26, "UC_WRITE_FIRST", Uc Write First None, [RETH], true;
    UcWriteMiddle = 0x27, "UC_WRITE_MIDDLE", Uc Write Middle None, [], true;
    UcWriteLast = 0x28, "UC_WRITE_LAST", Uc Write Last None, [], true;
    UcWriteLastImm = 0x29, "UC_WRITE_LAST_IMM", Uc Write Last Immediate, [IMM], true;
    UcWriteOnly = 0x2a, "UC_WRITE_ONLY", Uc Write Only None, [RETH], true;
    UcWriteOnlyImm = 0x2b, "UC_WRITE_ONLY_IMM", Uc Write Only Immediate, [RETH IMM], true;
    UdSendOnly = 0x64, "UD_SEND_ONLY", Ud Send Only None, [DETH], true;
    UdSendOnlyImm = 0x65, "UD_SEND_ONLY_IMM", Ud Send Only Immediate, [DETH IMM], true;
    Cnp = 0x81, "CNP", Cnp Cnp Only None, [CNP_RESERVED], false;
    XrcSendFirst = 0xa0, "XRC_SEND_FIRST", Xrc Send First None, [XRCETH], true;
    XrcSendMiddle = 0xa1, "XRC_SEND_MIDDLE", Xrc Send Middle None, [XRCETH], true;
    XrcSendLast = 0xa2, "XRC_SEND_LAST", Xrc Send Last None, [XRCETH], true;
    XrcSendLastImm = 0xa3, "XRC_SEND_LAST_IMM", Xrc Send Last Immediate, [XRCETH IMM], true;
    XrcSendOnly = 0xa4, "XRC_SEND_ONLY", Xrc Send Only None, [XRCETH], true;
    XrcSendOnlyImm = 0xa5, "XRC_SEND_ONLY_IMM", Xrc Send Only Immediate, [XRCETH IMM], true;
    XrcWriteFirst = 0xa6, "XRC_WRITE_FIRST", Xrc Write First None, [XRCETH RETH], true;
    XrcWriteMiddle = 0xa7, "XRC_WRITE_MIDDLE", Xrc Write Middle None, [XRCETH], true;
    XrcWriteLast = 0xa8, "XRC_WRITE_LAST", Xrc Write Last None, [XRCETH], true;
    XrcWriteLastImm = 0xa9, "XRC_WRITE_LAST_IMM", Xrc Write Last Immediate, [XRCETH IMM], true;
    XrcWriteOnly = 0xaa, "XRC_WRITE_ONLY", Xrc Write Only None, [XRCETH RETH], true;
    XrcWriteOnlyImm = 0xab, "XRC_WRITE_ONLY_IMM", Xrc Write Only Immediate, [XRCETH RETH IMM], true;
    XrcReadRequest = 0xac, "XRC_READ_REQUEST", Xrc ReadRequest Only None, [XRCETH RETH], false;
    XrcReadResponseFirst = 0xad, "XRC_READ_RESPONSE_FIRST", Xrc ReadResponse First None, [AETH], true;
    XrcReadResponseMiddle = 0xae, "XRC_READ_RESPONSE_MIDDLE", Xrc ReadResponse Middle None, [], true;
    XrcReadResponseLast = 0xaf, "XRC_READ_RESPONSE_LAST", Xrc ReadResponse Last None, [AETH], true;
    XrcReadResponseOnly = 0xb0, "XRC_READ_RESPONSE_ONLY", Xrc ReadResponse Only None, [AETH], true;
    XrcAcknowledge = 0xb1, "XRC_ACKNOWLEDGE", Xrc Acknowledge Only None, [AETH], false;
    XrcAtomicAcknowledge = 0xb2, "XRC_ATOMIC_ACKNOWLEDGE", Xrc AtomicAcknowledge Only None, [AETH ATOMIC_ACK_ETH], false;
    XrcCompareSwap = 0xb3, "XRC_COMPARE_SWAP", Xrc CompareSwap Only None, [XRCETH ATOMIC_ETH], false;
    XrcFetchAdd = 0xb4, "XRC_FETCH_ADD", Xrc FetchAdd Only None, [XRCETH ATOMIC_ETH], false;
    XrcSendLastInvalidate = 0xb6, "XRC_SEND_LAST_INVALIDATE", Xrc Send Last Invalidate, [XRCETH IETH], true;
    XrcSendOnlyInvalidate = 0xb7, "XRC_SEND_ONLY_INVALIDATE", Xrc Send Only Invalidate, [XRCETH IETH], true;
    RcAppendFirst = 0xc0, "RC_APPEND_FIRST", Rc Append First None, [APPEND_ETH], true;
    RcAppendMiddle = 0xc1, "RC_APPEND_MIDDLE", Rc Append Middle None, [], true;
    RcAppendLast = 0xc2, "RC_APPEND_LAST", Rc Append Last None, [], true;
    RcAppendOnly = 0xc4, "RC_APPEND_ONLY", Rc Append Only None, [APPEND_ETH], true;
    /// Terrace's own. The masks, of the compared and of the stored bits, are the payload.
    RcMaskedCompareSwap = 0xd0, "RC_MASKED_COMPARE_SWAP", Rc MaskedCompareSwap Only None, [ATOMIC_ETH], true;
    /// Terrace's own. The highest bits of the fields are in the place of the value to compare.
    RcMaskedFetchAdd = 0xd1, "RC_MASKED_FETCH_ADD", Rc MaskedFetchAdd Only None, [ATOMIC_ETH], false;
}

/// Length of the longest headers of any opcode, in bytes.
pub const MAX_HEADER_LEN: usize = {
    let mut longest = 0;
    let mut i = 0;
    while i < OPCODES.len() {
        if OPCODES[i].header_len > longest {
            longest = OPCODES[i].header_len;
        }
        i += 1;
    }
    longest
};

/// Marks a missing opcode in the two tables below.
const NONE: u8 = u8::MAX;

/// Row of the table by opcode byte.
static ROW_BY_BYTE: [u8; 256] = {
    let mut rows = [NONE; 256];
    let mut i = 0;
    while i < OPCODES.len() {
        rows[OPCODES[i].opcode as usize] = i as u8;
        i += 1;
    }
    rows
};

/// Row of the table by service, operation, position and trailer.
static ROW_BY_MEANING: [[[[u8; 3]; 4]; 14]; 5] = {
    let mut rows = [[[[NONE; 3]; 4]; 14]; 5];
    let mut i = 0;
    while i < OPCODES.len() {
        let info = OPCODES[i];
        rows[info.service as usize][info.operation as usize][info.position as usize][info.trailer as usize] =
            i as u8;
        i += 1;
    }
    rows
};

impl Opcode {
    /// All supported opcodes, by ascending byte.
    pub fn all() -> impl ExactSizeIterator<Item = Opcode> {
        TABLE.iter().map(|info| info.opcode)
    }

    /// The opcode of a byte on the wire; `None` for unsupported ones (reliable datagram, RESYNC,
    /// other manufacturers' and reserved ones).
    #[inline]
    pub fn from_byte(byte: u8) -> Option<Opcode> {
        TABLE.get(usize::from(ROW_BY_BYTE[usize::from(byte)])).map(|info| info.opcode)
    }

    /// The properties of this opcode.
    #[inline]
    pub fn info(self) -> &'static OpcodeInfo {
        &TABLE[usize::from(ROW_BY_BYTE[usize::from(self as u8)])]
    }

    /// The opcode of a packet at `position` of a message; `None` where the combination does not exist, such as
    /// immediate data in the middle of a message.
    pub fn for_message(
        service: Service,
        operation: Operation,
        position: Position,
        trailer: Trailer,
    ) -> Option<Opcode> {
        let row = ROW_BY_MEANING[service as usize][operation as usize][position as usize][trailer as usize];
        TABLE.get(usize::from(row)).map(|info| info.opcode)
    }
}
