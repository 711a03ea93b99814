//! The socket over which a connection is set up.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::proto::setup;
use crate::proto::{SetupAnswer, SetupRequest};
use crate::server::local_name;

/// A socket to a server, by which each end learns of the other's end.
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    /// Connects to a server: by a Unix socket if it is on this host, so that it learns the user of this process.
    pub fn connect(server: SocketAddr, own: IpAddr, timeout: Duration) -> io::Result<Stream> {
        let stream = connect_by(server, timeout, || connect_tcp(server, own, timeout))?;
        match &stream {
            Stream::Tcp(stream) => stream.set_read_timeout(Some(timeout))?,
            Stream::Unix(stream) => stream.set_read_timeout(Some(timeout))?,
        }
        Ok(stream)
    }

    /// Sends the setup.
    pub fn send(&mut self, request: &SetupRequest) -> io::Result<()> {
        let bytes = setup::encode(request);
        // Fits into the buffer of a new socket.
        match self {
            Stream::Tcp(stream) => stream.write_all(&bytes),
            Stream::Unix(stream) => stream.write_all(&bytes),
        }
    }

    /// Receives the answer.
    pub fn receive(&mut self) -> io::Result<SetupAnswer> {
        match self {
            Stream::Tcp(stream) => setup::receive(stream),
            Stream::Unix(stream) => setup::receive(stream),
        }
    }

    /// Whether the server is on this host.
    pub fn is_local(&self) -> bool {
        matches!(self, Stream::Unix(_))
    }

    /// Whether the server has sent something or closed its end, or does so within this time. It sends nothing after its answer.
    pub fn is_readable_within(&self, timeout: Duration) -> bool {
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut fds = [PollFd::new(self, PollFlags::IN | PollFlags::RDHUP)];
        matches!(poll(&mut fds, Some(&timeout)), Ok(1..))
    }

    /// Ends it for both ends.
    pub fn shut_down(&self) {
        // It may have ended already.
        let _ = match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Connects by a Unix socket if the server is on this host and has one, and by TCP if not.
fn connect_by(
    server: SocketAddr,
    timeout: Duration,
    connect_tcp: impl FnOnce() -> io::Result<TcpStream>,
) -> io::Result<Stream> {
    if let Some(stream) = connect_unix(server, timeout)? {
        return Ok(Stream::Unix(stream));
    }
    let tcp = connect_tcp()?;
    // A server may have started in between. It listens at its Unix socket first, and refuses clients of its host that come by TCP.
    Ok(connect_unix(server, timeout)?.map_or(Stream::Tcp(tcp), Stream::Unix))
}

/// Connects to the socket for clients of the same host, if the server is on this host and has one. Another failure does not lead to
/// TCP, where the server takes the client for another user.
fn connect_unix(server: SocketAddr, timeout: Duration) -> io::Result<Option<UnixStream>> {
    // Only an address of this host can be bound.
    if UdpSocket::bind((server.ip(), 0)).is_err() {
        return Ok(None);
    }
    let any: IpAddr = match server.ip() {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    for ip in [server.ip(), any] {
        match connect_abstract(SocketAddr::new(ip, server.port()), timeout) {
            Ok(stream) => return Ok(Some(stream)),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Connects to the socket for clients of the same host. A server that is stopped accepts nobody, and its queue may be full.
fn connect_abstract(server: SocketAddr, timeout: Duration) -> io::Result<UnixStream> {
    let name = local_name(server)?;
    let path = [b"\0", name.as_abstract_name().unwrap_or_default()].concat();
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Of `connect(2)`, too.
    socket.set_write_timeout(Some(timeout))?;
    socket.connect(&SockAddr::unix(OsStr::from_bytes(&path))?)?;
    Ok(socket.into())
}

/// Connects by TCP from the NIC's address: the server accepts packets of no other.
fn connect_tcp(server: SocketAddr, own: IpAddr, timeout: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(server), Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(own, 0).into())?;
    socket.connect_timeout(&server.into(), timeout)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_server_that_accepts_nobody_is_waited_for_until_the_timeout() {
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = tcp.local_addr().unwrap();
        let name = local_name(server).unwrap();
        let unix = UnixListener::bind_addr(&name).unwrap();
        rustix::net::listen(&unix, 0).unwrap();
        let _queued = UnixStream::connect_addr(&name).unwrap();
        let connected = Stream::connect(server, server.ip(), Duration::from_millis(100));
        assert_eq!(connected.err().map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
    }

    #[test]
    fn a_server_of_this_host_that_starts_meanwhile_is_not_connected_by_tcp() {
        // Nothing listens there.
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let mut started = None;
        let connected = connect_by(free, Duration::from_secs(5), || {
            started = Some((UnixListener::bind_addr(&local_name(free)?)?, TcpListener::bind(free)?));
            TcpStream::connect(free)
        });
        assert!(connected.unwrap().is_local());
    }
}
