//! The thread that sets connections up, learns of their ends, and of changes of files.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self as unix, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

use super::connection::{Connection, NewConnection, REQUESTS_MAX};
use super::holdings::Holder;
use super::identity::can_be;
use super::nodes::Nodes;
use super::state::State;
use crate::ends::{Domain, Ends, SERVED_ACCESS, address_of, gid_for, path_to};
use crate::proto::setup;
use crate::proto::{QueuePairs, SETUP_BYTES_MAX, SetupAnswer, SetupRequest};
use crate::rules::Identity;

/// The most connections, of all clients and of those of one holder.
const CONNECTIONS_MAX: usize = 1024;
const CONNECTIONS_PER_HOLDER_MAX: usize = 128;
/// The most sockets over which no setup has come yet, of all peers and of one address or user.
const UNSET_MAX: usize = 128;
const UNSET_PER_PEER_MAX: usize = 32;
/// The time in which a client sends its setup.
const SETUP_TIME: Duration = Duration::from_secs(5);
/// The interval of checks of leases.
const TICK: Duration = Duration::from_millis(250);
/// The pause after a client that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

const WAKE: u64 = 0;
const TCP: u64 = 1;
const UNIX: u64 = 2;
const CHANGES: u64 = 3;
const FIRST_SOCKET: u64 = 16;

/// A client's socket.
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(into),
            Stream::Unix(stream) => stream.read(into),
        }
    }

    fn send(&mut self, answer: &SetupAnswer) -> io::Result<()> {
        let bytes = setup::encode(answer);
        // Fits into the buffer of a new socket.
        match self {
            Stream::Tcp(stream) => stream.write_all(&bytes),
            Stream::Unix(stream) => stream.write_all(&bytes),
        }
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

/// Whom a socket belongs to.
struct Peer {
    name: String,
    /// Its address, if it is connected by TCP.
    address: Option<IpAddr>,
    /// The user of its process, if it is connected by the Unix socket.
    uid: Option<u32>,
    identity: Option<Identity>,
}

impl Peer {
    fn is_same(&self, other: &Peer) -> bool {
        (self.address, self.uid) == (other.address, other.uid)
    }
}

struct Socket {
    stream: Stream,
    peer: Peer,
    received: Vec<u8>,
    opened: Instant,
    /// The queue pair number of the connection, once there is one.
    qpn: Option<u32>,
}

/// The sockets of a server.
pub struct Listener {
    epoll: OwnedFd,
    tcp: TcpListener,
    unix: UnixListener,
    wake: Arc<OwnedFd>,
    sockets: HashMap<u64, Socket>,
    next_socket: u64,
    state: Arc<State>,
}

/// The abstract name of the socket for clients of the same host.
pub fn local_name(address: SocketAddr) -> io::Result<unix::SocketAddr> {
    unix::SocketAddr::from_abstract_name(format!("terrace-export/{address}"))
}

/// The listening sockets: TCP, and that for clients of the same host, which listens first: a client of this host that has found
/// none would be refused by TCP.
pub fn bind(address: SocketAddr) -> io::Result<(TcpListener, UnixListener)> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    let tcp = TcpListener::from(socket);
    let unix = UnixListener::bind_addr(&local_name(tcp.local_addr()?)?)?;
    rustix::net::listen(&tcp, CONNECTIONS_MAX as i32)?;
    tcp.set_nonblocking(true)?;
    unix.set_nonblocking(true)?;
    Ok((tcp, unix))
}

impl Listener {
    /// Nothing is accepted before [`Listener::run`].
    pub fn new(state: Arc<State>, tcp: TcpListener, unix: UnixListener) -> io::Result<Listener> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let add =
            |fd: BorrowedFd<'_>, token| epoll::add(&epoll, fd, EventData::new_u64(token), EventFlags::IN);
        add(wake.as_fd(), WAKE)?;
        add(tcp.as_fd(), TCP)?;
        add(unix.as_fd(), UNIX)?;
        add(state.watches.descriptor(), CHANGES)?;
        Ok(Listener { epoll, tcp, unix, wake, sockets: HashMap::new(), next_socket: FIRST_SOCKET, state })
    }

    /// Ends [`Listener::run`] when written to.
    pub fn wake_descriptor(&self) -> Arc<OwnedFd> {
        self.wake.clone()
    }

    /// Serves the sockets until woken.
    pub fn run(mut self) {
        let mut ticked = Instant::now();
        let timeout = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        loop {
            let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 64];
            let count = match epoll::wait(&self.epoll, &mut events, Some(&timeout)) {
                Ok(count) => count,
                Err(Errno::INTR) => 0,
                Err(error) => {
                    tracing::error!(%error, "the export accepts no clients any more");
                    return;
                }
            };
            for event in &events[..count] {
                match event.data.u64() {
                    WAKE => return,
                    TCP => self.accept_tcp(),
                    UNIX => self.accept_unix(),
                    CHANGES => self.state.handle_changes(),
                    socket => self.read(socket),
                }
            }
            let elapsed = ticked.elapsed();
            if elapsed >= TICK {
                ticked = Instant::now();
                self.tick(elapsed);
            }
        }
    }

    /// Ends connections whose leases have ended, and closes the sockets of those that have ended, so long after the last time.
    fn tick(&mut self, elapsed: Duration) {
        // A check that comes so late tells that this process was stopped.
        let was_stopped = elapsed >= self.state.lease / 2;
        let connections = self.state.connections();
        // The thread that receives may wait for a disk for longer than a lease.
        let is_receiver_blocked = !connections.is_empty() && !self.state.device.probe_receive();
        for connection in connections {
            // The client may have sent what this process has not received.
            if was_stopped {
                connection.renew_lease();
            } else if is_receiver_blocked {
                connection.extend_lease(elapsed);
            } else if connection.check_lease(self.state.lease) {
                self.state.end(&connection, "its lease has ended");
            }
        }
        self.state.release_ended_locks();
        self.state.watches.end_idle();
        self.state.lock_history.forget_old();
        self.state.files.forget_deleted();
        let ended = self.state.drain_ended();
        self.sockets.retain(|_, socket| match socket.qpn {
            Some(qpn) => !ended.contains(&qpn),
            None => socket.opened.elapsed() < SETUP_TIME,
        });
    }

    fn accept_tcp(&mut self) {
        let (stream, address) = match self.tcp.accept() {
            Ok(accepted) => accepted,
            Err(error) => return pause_out_of_resources(&error),
        };
        let ip = address.ip().to_canonical();
        // Who comes from this host is one of its users, and only the Unix socket tells which one. Where that cannot be told now,
        // the client connects again.
        let Ok(may_be_local) = may_be_local(address) else { return };
        let identity = if may_be_local { None } else { self.state.rules.remote(ip) };
        self.add(
            Stream::Tcp(stream),
            Peer { name: address.to_string(), address: Some(ip), uid: None, identity },
        );
    }

    fn accept_unix(&mut self) {
        let stream = match self.unix.accept() {
            Ok((stream, _)) => stream,
            Err(error) => return pause_out_of_resources(&error),
        };
        // Not by rustix, for which a process of another PID namespace, whose number is 0 here, is an error.
        let Ok(user) = getsockopt(&stream, PeerCredentials) else { return };
        let (uid, gid) = (user.uid(), user.gid());
        let name = match user.pid() {
            0 => format!("uid {uid}, a process of another PID namespace"),
            pid => format!("uid {uid}, process {pid}"),
        };
        // The user database may give the user groups that the process has given up. Without the answer the client connects again.
        let Ok(groups) = terrace_files::peer_groups(stream.as_fd()) else { return };
        let identity = self.state.rules.local(uid, gid, groups);
        self.add(Stream::Unix(stream), Peer { name, address: None, uid: Some(uid), identity });
    }

    fn add(&mut self, stream: Stream, peer: Peer) {
        let unset: Vec<_> = self.sockets.values().filter(|socket| socket.qpn.is_none()).collect();
        let of_peer = unset.iter().filter(|socket| socket.peer.is_same(&peer)).count();
        let is_full = unset.len() >= UNSET_MAX || of_peer >= UNSET_PER_PEER_MAX;
        let is_nonblocking = match &stream {
            Stream::Tcp(stream) => stream.set_nonblocking(true),
            Stream::Unix(stream) => stream.set_nonblocking(true),
        };
        if is_full || is_nonblocking.is_err() {
            return;
        }
        let token = self.next_socket;
        self.next_socket += 1;
        let flags = EventFlags::IN | EventFlags::RDHUP;
        if epoll::add(&self.epoll, stream.as_fd(), EventData::new_u64(token), flags).is_ok() {
            let socket = Socket { stream, peer, received: Vec::new(), opened: Instant::now(), qpn: None };
            self.sockets.insert(token, socket);
        }
    }

    /// Handles bytes of a socket, or its end.
    fn read(&mut self, token: u64) {
        let Some(socket) = self.sockets.get_mut(&token) else { return };
        let mut bytes = [0; SETUP_BYTES_MAX];
        let is_over = match socket.stream.read(&mut bytes) {
            Ok(0) => true,
            Ok(count) => {
                socket.received.extend_from_slice(&bytes[..count]);
                // Nothing comes behind the setup.
                socket.qpn.is_some() || socket.received.len() > SETUP_BYTES_MAX
            }
            Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        };
        if is_over {
            self.remove(token);
        } else if socket.received.len() >= setup_bytes() && socket.qpn.is_none() {
            self.set_up(token);
        }
    }

    /// Closes a socket, and ends its connection.
    fn remove(&mut self, token: u64) {
        let Some(socket) = self.sockets.remove(&token) else { return };
        if let Some(connection) = socket.qpn.and_then(|qpn| self.state.connection(qpn)) {
            self.state.end(&connection, "its socket was closed");
        }
    }

    fn set_up(&mut self, token: u64) {
        let Some(socket) = self.sockets.get(&token) else { return };
        let answer = match setup::decode::<SetupRequest>(&socket.received) {
            Ok(request) => self.connect(&socket.peer, &request),
            Err(error) => {
                tracing::debug!(%error, client = %socket.peer.name, "an invalid setup");
                self.remove(token);
                return;
            }
        };
        let Some(socket) = self.sockets.get_mut(&token) else { return };
        let sent = match answer {
            Ok((qpn, answer)) => {
                socket.qpn = Some(qpn);
                socket.stream.send(&answer)
            }
            Err(errno) => {
                tracing::debug!(%errno, client = %socket.peer.name, "a client is refused");
                // The client reads the answer, and closes the socket.
                socket.stream.send(&refusal(errno))
            }
        };
        if sent.is_err() {
            self.remove(token);
        }
    }

    /// Connects our ends to a client's.
    fn connect(&self, peer: &Peer, request: &SetupRequest) -> Result<(u32, SetupAnswer), Errno> {
        let identity = peer.identity.as_ref().filter(|identity| can_be(identity)).ok_or(Errno::ACCESS)?;
        let gid = request.ends.gid;
        let address = address_of(gid);
        // By TCP the client has shown that it is at its address. Packets to another one would be another's.
        if peer.address.is_some_and(|known| known != address) {
            return Err(Errno::ADDRNOTAVAIL);
        }
        // A client that the Unix socket has connected is on this host, and so are its packets.
        if peer.address.is_none() && UdpSocket::bind((address, 0)).is_err() {
            return Err(Errno::ADDRNOTAVAIL);
        }
        // A client has one connection, and none while an earlier one is not closed, or a request of it is carried out. It tries again.
        if self.state.end_earlier(request.client, identity, &gid) {
            return Err(Errno::USERS);
        }
        let holder = match peer.address {
            Some(_) => Holder::Host(gid),
            None => Holder::User(identity.uid),
        };
        let connections = self.state.connections();
        let of_holder = connections.iter().filter(|connection| connection.holder == holder).count();
        if connections.len() >= CONNECTIONS_MAX || of_holder >= CONNECTIONS_PER_HOLDER_MAX {
            return Err(Errno::USERS);
        }
        let (connection, ends) = self.open(peer, identity, holder, request).map_err(|error| {
            tracing::debug!(%error, client = %peer.name, "a client cannot be connected");
            Errno::NOMEM
        })?;
        let answer = SetupAnswer {
            errno: 0,
            ends,
            requests_max: REQUESTS_MAX as u16,
            lease_ms: self.state.lease.as_millis() as u32,
            root: self.state.root_id,
            is_read_only: identity.is_read_only,
            boot: self.state.boot,
            instance: self.state.lock_history.instance,
        };
        let qpn = connection.qpn;
        tracing::debug!(client = %peer.name, uid = identity.uid, qpn, "a client has connected");
        self.state.add_connection(connection);
        Ok((qpn, answer))
    }

    fn open(
        &self,
        peer: &Peer,
        identity: &Identity,
        holder: Holder,
        request: &SetupRequest,
    ) -> Result<(Arc<Connection>, QueuePairs), terrace_nic::Error> {
        let (device, cq) = (&self.state.device, &self.state.cq);
        let QueuePairs { gid, control, data, append } = request.ends;
        let path = path_to(device, gid, control.qpn)?;
        let no_address = terrace_nic::Error::Invalid("no local address of the client's family");
        let own_gid = gid_for(device, address_of(gid)).ok_or(no_address)?;
        // A domain for each client: the keys of others are unknown over its queue pairs.
        let domain = Domain::new(device)?;
        let ends = Ends::new(&domain.pd, cq, cq, 0)?;
        let connected = ends
            .control
            .serve(path, control)
            .and_then(|()| ends.data.connect(path, data, SERVED_ACCESS))
            .and_then(|()| ends.append.connect(path, append, SERVED_ACCESS));
        if let Err(error) = connected {
            ends.close();
            // Its buffer belongs to the domain.
            drop(ends);
            return Err(error);
        }
        let described = ends.describe(own_gid);
        let nodes = Nodes::new(self.state.looked_up.clone(), holder);
        let (identity, peer, domain) = (identity.clone(), peer.name.clone(), Arc::new(domain));
        Ok((
            Connection::new(NewConnection {
                identity,
                client: request.client,
                peer,
                holder,
                domain,
                gid,
                path,
                nodes,
                ends,
            }),
            described,
        ))
    }
}

/// Whether the system lacks descriptors or memory, for now.
fn is_out_of_resources(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM))
}

/// A client that is not accepted for lack of them is reported again at once, for as long as it waits: the thread pauses instead of
/// spinning.
fn pause_out_of_resources(error: &io::Error) {
    if is_out_of_resources(error) {
        std::thread::sleep(ACCEPT_PAUSE);
    }
}

/// Whether a peer's address is one of this host, as far as is known: only an address of this host can be bound.
///
/// # Errors
/// If the system lacks descriptors or memory for the trial.
fn may_be_local(peer: SocketAddr) -> io::Result<bool> {
    let address = match peer.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(v4.into(), 0),
        IpAddr::V6(_) => {
            // With the scope of a link-local address.
            let mut address = peer;
            address.set_port(0);
            address
        }
    };
    match UdpSocket::bind(address) {
        Err(error) if is_out_of_resources(&error) => Err(error),
        Err(error) => Ok(error.kind() != io::ErrorKind::AddrNotAvailable),
        Ok(_) => Ok(true),
    }
}

/// Bytes of a setup.
fn setup_bytes() -> usize {
    let endpoint = terrace_node::Endpoint { qpn: 0, psn: 0, mtu_bytes: 4096 };
    let ends = QueuePairs { gid: [0; 16], control: endpoint, data: endpoint, append: endpoint };
    setup::encode(&SetupRequest { ends, client: 0 }).len()
}

fn refusal(errno: Errno) -> SetupAnswer {
    let endpoint = terrace_node::Endpoint { qpn: 0, psn: 0, mtu_bytes: 4096 };
    SetupAnswer {
        errno: errno.raw_os_error() as u16,
        ends: QueuePairs { gid: [0; 16], control: endpoint, data: endpoint, append: endpoint },
        requests_max: 0,
        lease_ms: 0,
        root: Default::default(),
        is_read_only: false,
        boot: 0,
        instance: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_are_local_and_others_are_not() {
        for local in ["127.0.0.1:9", "127.3.2.1:9", "[::ffff:127.0.0.1]:9"] {
            assert!(may_be_local(local.parse().unwrap()).unwrap(), "{local}");
        }
        // An address of the documentation.
        assert!(!may_be_local("192.0.2.77:9".parse().unwrap()).unwrap());
    }

    #[test]
    fn a_server_that_accepts_tcp_accepts_clients_of_its_host() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for _ in 0..200 {
            std::thread::scope(|scope| {
                let bound = scope.spawn(|| bind(free).unwrap());
                while TcpStream::connect(free).is_err() {}
                UnixStream::connect_addr(&local_name(free).unwrap()).unwrap();
                bound.join().unwrap();
            });
        }
    }
}
