//! The TCP connection between a client and a memory node.

use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

/// A peer's host counts as gone after this much silence.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(2);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
const KEEPALIVE_PROBES: u32 = 5;

/// Makes a connection nonblocking, and has the kernel send keepalives.
pub(crate) fn configure(stream: &TcpStream) -> io::Result<()> {
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_IDLE)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_PROBES);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// Reads a line, if it has come, without its end. What has come of it so far is in `bytes`.
///
/// # Errors
/// If the connection has ended, or the line is too long.
pub(crate) fn read_line(
    stream: &mut TcpStream,
    bytes: &mut Vec<u8>,
    bytes_max: usize,
) -> io::Result<Option<Vec<u8>>> {
    let mut chunk = [0; 4096];
    loop {
        if let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let rest = bytes.split_off(end + 1);
            bytes.truncate(end);
            return Ok(Some(std::mem::replace(bytes, rest)));
        }
        if bytes.len() > bytes_max {
            return Err(io::Error::new(ErrorKind::InvalidData, "the line is too long"));
        }
        match stream.read(&mut chunk) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => bytes.extend_from_slice(&chunk[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
