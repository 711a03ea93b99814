//! Numbers and messages of NBD (`doc/proto.md` of the NBD project). All of them are big-endian.

/// "NBDMAGIC", the first bytes of a server.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT", before each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const REPLY_MAGIC: u32 = 0x6744_6698;

/// Handshake flags, of the server and of the client.
pub const FIXED_NEWSTYLE: u16 = 1;
pub const NO_ZEROES: u16 = 1 << 1;

pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;

pub const REP_ACK: u32 = 1;
pub const REP_SERVER: u32 = 2;
pub const REP_INFO: u32 = 3;
pub const REP_ERR_UNSUP: u32 = 1 << 31 | 1;
pub const REP_ERR_INVALID: u32 = 1 << 31 | 3;
pub const REP_ERR_UNKNOWN: u32 = 1 << 31 | 6;
pub const REP_ERR_TOO_BIG: u32 = 1 << 31 | 9;

pub const INFO_EXPORT: u16 = 0;
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags of the export: it has flags; FLUSH, FUA, TRIM and WRITE_ZEROES are known; a flush on one
/// connection holds for what was written on all of them.
pub const TRANSMISSION_FLAGS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 8;

/// Flags of commands.
pub const FLAG_FUA: u16 = 1;
pub const FLAG_NO_HOLE: u16 = 1 << 1;

pub const REQUEST_BYTES: usize = 28;
pub const REPLY_BYTES: usize = 16;
pub const OPTION_BYTES: usize = 16;

/// What a client has sent that ends its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The client's flags have bits that the server has not offered.
    #[error("unknown handshake flags {0:#x}")]
    HandshakeFlags(u32),
    /// An option or a request does not begin as it should.
    #[error("a message without its magic number")]
    Magic,
    /// More options than any client needs.
    #[error("too many options")]
    TooManyOptions,
    /// `NBD_OPT_EXPORT_NAME` has no other answer to a wrong name.
    #[error("an export that does not exist")]
    UnknownExport,
}

/// Why a request fails, as the client is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Read,
    Write,
    Disconnect,
    Flush,
    Trim,
    WriteZeroes,
    Unknown,
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub flags: u16,
    pub command: Command,
    /// The client's, which the reply repeats.
    pub cookie: u64,
    pub offset: u64,
    /// Bytes: at most `u32::MAX` of NBD.
    pub length: u64,
}

impl Header {
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Header, ProtocolError> {
        if be32(bytes, 0) != REQUEST_MAGIC {
            return Err(ProtocolError::Magic);
        }
        let command = match be16(bytes, 6) {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            6 => Command::WriteZeroes,
            _ => Command::Unknown,
        };
        Ok(Header {
            flags: be16(bytes, 4),
            command,
            cookie: be64(bytes, 8),
            offset: be64(bytes, 16),
            length: be32(bytes, 24).into(),
        })
    }
}

/// Appends a simple reply.
pub fn put_reply(out: &mut Vec<u8>, cookie: u64, error: Option<Errno>) {
    out.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&error.map_or(0, |error| error as u32).to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
}

/// Appends the reply to an option.
pub fn put_option_reply(out: &mut Vec<u8>, option: u32, reply: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&reply.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

pub fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes_at(bytes, at))
}

pub fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes_at(bytes, at))
}

pub fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes_at(bytes, at))
}
