//! The setup of a connection, over a stream socket.

use std::io::{self, Read};

use terrace_node::Endpoint;

use super::VERSION;
use super::codec::{DecodeError, Reader, Wire, refuse, wire_enum, wire_struct};
use super::types::FileId;

/// Most bytes of a setup message.
pub const SETUP_BYTES_MAX: usize = 256;
/// The first bytes of a setup message.
const MAGIC: [u8; 4] = *b"TRXP";

wire_enum! {
    /// A queue pair for one-sided accesses.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    Link {
        /// For READs, WRITEs and commits.
        Data = 1,
        /// For APPENDs, which may not be repeated when another access fails.
        Append = 2,
    }
}

/// Queue pair number, first PSN and path MTU of one end.
impl Wire for Endpoint {
    fn put(&self, out: &mut Vec<u8>) {
        self.qpn.put(out);
        self.psn.put(out);
        self.mtu_bytes.put(out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Endpoint, DecodeError> {
        let (qpn, psn, mtu_bytes) = (u32::take(reader)?, u32::take(reader)?, u16::take(reader)?);
        if qpn >> 24 != 0 || psn >> 24 != 0 {
            return refuse("queue pair number or PSN", qpn.max(psn).into());
        }
        if ![256, 512, 1024, 2048, 4096].contains(&mtu_bytes) {
            return refuse("path MTU", mtu_bytes.into());
        }
        Ok(Endpoint { qpn, psn, mtu_bytes })
    }
}

wire_struct! {
    /// One end of a connection's queue pairs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    QueuePairs {
        /// The GID: an IPv6 address, or an IPv4 address mapped into one.
        gid: [u8; 16],
        /// For messages.
        control: Endpoint,
        /// [`Link::Data`].
        data: Endpoint,
        /// [`Link::Append`].
        append: Endpoint,
    }
}

wire_struct! {
    /// What a client sends first.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    SetupRequest {
        /// The client's end.
        ends: QueuePairs,
        /// A random number that the client sends with each of its connections, and nobody else knows: it may reclaim the locks
        /// of an earlier one.
        client: u64,
    }
}

wire_struct! {
    /// The server's answer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    SetupAnswer {
        /// 0, or the Linux error number that says why there is no connection; the other fields mean nothing then.
        errno: u16,
        /// The server's end.
        ends: QueuePairs,
        /// The most requests in flight.
        requests_max: u16,
        /// A client that sends nothing for so many milliseconds loses its connection.
        lease_ms: u32,
        /// The exported directory.
        root: FileId,
        /// Whether the client may change nothing.
        is_read_only: bool,
        /// Says which run of the server's host this is: in another one, what was not committed may be lost.
        boot: u64,
        /// Says which server process this is: in another one no lock is held.
        instance: u64,
    }
}

/// The bytes of a setup message: magic, version, 3 reserved bytes, length (u32), fields.
pub fn encode(message: &impl Wire) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend([VERSION, 0, 0, 0, 0, 0, 0, 0]);
    message.put(&mut bytes);
    let len = (bytes.len() as u32).to_le_bytes();
    bytes[8..12].copy_from_slice(&len);
    bytes
}

/// Receives a setup message. The caller has set a timeout on the stream.
///
/// # Errors
/// The stream's; `InvalidData` for another protocol, another version, or an invalid message.
pub fn receive<T: Wire>(stream: &mut impl Read) -> io::Result<T> {
    let mut head = [0; 12];
    stream.read_exact(&mut head)?;
    let len = check_head(&head).map_err(invalid)?;
    let mut body = vec![0; len - head.len()];
    stream.read_exact(&mut body)?;
    decode_body(&body).map_err(invalid)
}

/// Decodes a setup message that is all there.
///
/// # Errors
/// If the bytes are not such a message.
pub fn decode<T: Wire>(bytes: &[u8]) -> Result<T, DecodeError> {
    let head = bytes.first_chunk().ok_or(DecodeError::TooShort { at: 0, needed: 12, got: bytes.len() })?;
    let len = check_head(head)?;
    if len != bytes.len() {
        return refuse("length", len as u64);
    }
    decode_body(&bytes[12..])
}

fn decode_body<T: Wire>(body: &[u8]) -> Result<T, DecodeError> {
    let mut reader = Reader::new(body);
    let message = T::take(&mut reader)?;
    reader.end()?;
    Ok(message)
}

/// The length of the message with this head.
fn check_head(head: &[u8; 12]) -> Result<usize, DecodeError> {
    let mut reader = Reader::new(head);
    let magic = <[u8; 4]>::take(&mut reader)?;
    if magic != MAGIC {
        return refuse("protocol", u32::from_be_bytes(magic).into());
    }
    let version = u8::take(&mut reader)?;
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    reader.zeros(3)?;
    let len = u32::take(&mut reader)? as usize;
    match (head.len()..=SETUP_BYTES_MAX).contains(&len) {
        true => Ok(len),
        false => refuse("length", len as u64),
    }
}

fn invalid(error: DecodeError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
