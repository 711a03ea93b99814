//! The control thread: one TCP connection for each client, whose end ends the client. The kernel's keepalives tell a host
//! that has gone from a client that has nothing to say, or is stopped.

use std::cmp::Reverse;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::service::Service;
use crate::protocol::{Answer, Connect, Connected, DEPTH_MAX, REQUEST_BYTES_MAX, Request, VERSION};
use crate::tcp;

/// How often budgets and failures are looked at while there are clients.
const MONITOR_INTERVAL: Duration = Duration::from_millis(20);
/// How long a client may take for its request, and the engine for admitting it.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections at most that have not sent a request yet, or have not taken their last answer. One more takes the place of another one.
const PENDING_MAX: usize = 64;
/// The time until the next attempt to accept a connection, if there are no descriptors.
const ACCEPT_RETRY: Duration = Duration::from_millis(10);
/// Pages of a client's space at most, for each page of the pool.
const SPACE_FACTOR: u64 = 64;
/// Bytes of a client's name at most.
const NAME_BYTES_MAX: usize = 64;

/// A running control thread, which ends when this is dropped.
pub(crate) struct ControlThread {
    address: SocketAddr,
    stop: Arc<rustix::fd::OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ControlThread {
    pub fn start(listener: TcpListener, state: Arc<dyn Service>) -> io::Result<ControlThread> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let control = Control { listener, state, stop: stop.clone(), connections: Vec::new(), last_id: 0 };
        let thread = std::thread::Builder::new().name("memory-node".into()).spawn(move || control.run())?;
        Ok(ControlThread { address, stop, thread: Some(thread) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for ControlThread {
    fn drop(&mut self) {
        // It fails only if the counter is full, and the thread ends then, too.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported.
            let _ = thread.join();
        }
    }
}

/// A client's connection.
struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    phase: Phase,
    /// Bytes of answers for which the socket had no room.
    unsent: Vec<u8>,
}

enum Phase {
    /// The request has not come yet.
    Asked {
        bytes: Vec<u8>,
        since: Instant,
    },
    /// The engine makes the chains.
    Admitted {
        id: u64,
        answer: Receiver<Result<Connected, String>>,
        since: Instant,
    },
    Serving {
        id: u64,
    },
    /// Its last answer may be unsent.
    Closed {
        since: Instant,
    },
}

struct Control {
    listener: TcpListener,
    state: Arc<dyn Service>,
    stop: Arc<rustix::fd::OwnedFd>,
    connections: Vec<Connection>,
    /// The number of the last client that asked.
    last_id: u64,
}

impl Control {
    fn run(mut self) {
        loop {
            let timeout = (!self.connections.is_empty())
                .then(|| Timespec::try_from(MONITOR_INTERVAL))
                .and_then(Result::ok);
            let mut watched = vec![
                PollFd::new(&*self.stop, PollFlags::IN),
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            ];
            watched.extend(self.connections.iter().map(Connection::watched));
            // The only error is an interruption; then all are looked at.
            let _ = poll(&mut watched, timeout.as_ref());
            if watched[0].revents().contains(PollFlags::IN) {
                return;
            }
            drop(watched);
            self.accept();
            for connection in &mut self.connections {
                connection.advance(&*self.state, &mut self.last_id);
            }
            for expelled in self.state.monitor() {
                let serves = |connection: &&mut Connection| matches!(connection.phase, Phase::Serving { id } if id == expelled.id);
                if let Some(connection) = self.connections.iter_mut().find(serves) {
                    tracing::warn!(client = %connection.peer, reason = expelled.reason, "a client is disconnected");
                    connection.answer(&Answer::Ended(expelled.reason));
                    connection.end(&*self.state);
                }
            }
            self.connections.retain(|connection| !connection.has_ended());
        }
    }

    fn accept(&mut self) {
        loop {
            let (stream, peer) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if is_passing(&error) => return,
                Err(error) => {
                    // Without descriptors or memory, the connection stays in the queue, and `poll` returns at once.
                    tracing::warn!(%error, "a connection cannot be accepted");
                    return std::thread::sleep(ACCEPT_RETRY);
                }
            };
            if tcp::configure(&stream).is_err() {
                continue;
            }
            if let Some(place) = self.pending_to_drop() {
                self.connections.remove(place);
            }
            let phase = Phase::Asked { bytes: Vec::new(), since: Instant::now() };
            self.connections.push(Connection { stream, peer, phase, unsent: Vec::new() });
        }
    }

    /// The pending connection whose place another one takes, if all places are taken: the oldest one of the address that has most.
    fn pending_to_drop(&self) -> Option<usize> {
        let pending = || self.connections.iter().enumerate().filter(|(_, other)| other.is_pending());
        let count = |peer: SocketAddr| pending().filter(|(_, other)| other.peer.ip() == peer.ip()).count();
        let dropped = pending().min_by_key(|(_, other)| Reverse(count(other.peer)));
        dropped.filter(|_| pending().count() >= PENDING_MAX).map(|(place, _)| place)
    }
}

/// Whether there is no connection now, or one that has gone already.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted)
}

impl Connection {
    /// Whether it has not sent a request yet, or not taken its last answer.
    fn is_pending(&self) -> bool {
        matches!(self.phase, Phase::Asked { .. } | Phase::Closed { .. })
    }

    /// What the control thread waits for.
    fn watched(&self) -> PollFd<'_> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, !matches!(self.phase, Phase::Closed { .. }));
        flags.set(PollFlags::OUT, !self.unsent.is_empty());
        PollFd::new(&self.stream, flags)
    }

    /// Whether nothing is left to do. A client that does not read its last answer is not waited for.
    fn has_ended(&self) -> bool {
        let Phase::Closed { since } = self.phase else { return false };
        self.unsent.is_empty() || since.elapsed() > HANDSHAKE_TIMEOUT
    }

    fn advance(&mut self, state: &dyn Service, last_id: &mut u64) {
        self.send_unsent();
        match &mut self.phase {
            Phase::Asked { bytes, since } => {
                let is_late = since.elapsed() > HANDSHAKE_TIMEOUT;
                match tcp::read_line(&mut self.stream, bytes, REQUEST_BYTES_MAX) {
                    Ok(Some(line)) => self.handle_request(state, &line, last_id),
                    Ok(None) if !is_late => {}
                    _ => self.end(state),
                }
            }
            Phase::Admitted { id, answer, since } => {
                let (id, is_late) = (*id, since.elapsed() > HANDSHAKE_TIMEOUT);
                match answer.try_recv() {
                    Ok(Ok(connected)) => {
                        self.phase = Phase::Serving { id };
                        tracing::info!(client = %self.peer, id, "a client has connected");
                        self.answer(&Answer::Connected(Box::new(connected)));
                    }
                    Ok(Err(reason)) => self.refuse(state, reason),
                    Err(_) if is_late => self.refuse(state, "the memory node is busy".into()),
                    Err(_) => {}
                }
            }
            Phase::Serving { .. } => {
                let mut byte = [0; 64];
                match self.stream.read(&mut byte) {
                    Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                    // Clients say nothing more: the end, or something else that is none of the protocol.
                    _ => {
                        tracing::info!(client = %self.peer, "a client has gone");
                        self.end(state);
                    }
                }
            }
            Phase::Closed { .. } => {}
        }
    }

    fn handle_request(&mut self, state: &dyn Service, line: &[u8], last_id: &mut u64) {
        match serde_json::from_slice(line) {
            Ok(Request::Scheme) => self.answer_last(&Answer::Scheme(state.status().scheme)),
            Ok(Request::Status) => self.answer_last(&Answer::Status(state.status())),
            Ok(Request::Connect(connect)) => match self.check(state, &connect) {
                Ok(()) => {
                    let (sender, answer) = channel();
                    *last_id += 1;
                    self.phase = Phase::Admitted { id: *last_id, answer, since: Instant::now() };
                    state.admit(*last_id, connect, sender);
                }
                Err(reason) => self.refuse(state, reason),
            },
            Err(error) => self.refuse(state, format!("not a request: {error}")),
        }
    }

    fn check(&self, state: &dyn Service, connect: &Connect) -> Result<(), String> {
        let status = state.status();
        let space_max = status.page_count.saturating_mul(SPACE_FACTOR);
        if connect.version != VERSION {
            return Err(format!("the memory node speaks version {VERSION} of the protocol"));
        }
        if !(1..=space_max).contains(&connect.page_count) {
            return Err(format!(
                "a space has 1 to {space_max} pages of 4 KiB, {SPACE_FACTOR} times the memory of this node"
            ));
        }
        if connect.scheme != status.scheme || connect.ends.len() != status.scheme.connection_count() {
            return Err(format!("the memory node has scheme {}", status.scheme));
        }
        if !connect.depth.is_power_of_two() || connect.depth > DEPTH_MAX {
            return Err(format!("the depth is a power of two up to {DEPTH_MAX}"));
        }
        if connect.name.len() > NAME_BYTES_MAX || connect.name.contains(char::is_control) {
            return Err(format!("a name has at most {NAME_BYTES_MAX} bytes of text"));
        }
        // Otherwise a client could direct pages at somebody else.
        if connect.address.to_canonical() != self.peer.ip().to_canonical() {
            return Err(format!(
                "the client's NIC has address {}, but it connects from {}",
                connect.address,
                self.peer.ip()
            ));
        }
        Ok(())
    }

    fn refuse(&mut self, state: &dyn Service, reason: String) {
        tracing::info!(client = %self.peer, reason, "a client is refused");
        self.answer(&Answer::Refused(reason));
        self.end(state);
    }

    /// Answers a request that makes no client.
    fn answer_last(&mut self, answer: &Answer) {
        self.answer(answer);
        self.phase = Phase::Closed { since: Instant::now() };
    }

    /// Sends an answer, as far as the socket has room: the status of many clients is longer.
    fn answer(&mut self, answer: &Answer) {
        self.unsent.extend(serde_json::to_vec(answer).unwrap_or_default());
        self.unsent.push(b'\n');
        self.send_unsent();
    }

    fn send_unsent(&mut self) {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(count) if count > 0 => drop(self.unsent.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => {
                    self.unsent.clear();
                    // The socket is found closed next.
                    let _ = self.stream.shutdown(std::net::Shutdown::Both);
                }
            }
        }
    }

    fn end(&mut self, state: &dyn Service) {
        if let Phase::Admitted { id, .. } | Phase::Serving { id } = self.phase {
            state.remove(id);
        }
        self.phase = Phase::Closed { since: Instant::now() };
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::mpsc::Sender;

    use socket2::{Domain, Socket, Type};

    use super::super::service::Expelled;
    use super::*;
    use crate::status::NodeStatus;

    struct Nobody;

    impl Service for Nobody {
        fn admit(&self, _: u64, _: Box<Connect>, _: Sender<Result<Connected, String>>) {}

        fn remove(&self, _: u64) {}

        fn monitor(&self) -> Vec<Expelled> {
            Vec::new()
        }

        fn status(&self) -> NodeStatus {
            unreachable!("nobody asks")
        }
    }

    /// A control thread's state, and where it listens.
    fn control() -> (Control, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        (Control { listener, state: Arc::new(Nobody), stop, connections: Vec::new(), last_id: 0 }, address)
    }

    #[test]
    fn silent_connections_of_one_address_make_room_for_others() {
        let (mut control, address) = control();
        let mut connect = |from: [u8; 4]| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
            socket.connect(&address.into()).unwrap();
            control.accept();
            let pending = control.connections.iter().map(|connection| connection.peer);
            (socket, pending.collect::<Vec<_>>())
        };
        let (_first, _) = connect([127, 0, 0, 1]);
        let silent: Vec<_> = (0..2 * PENDING_MAX).map(|_| connect([127, 0, 0, 2])).collect();
        let (second, pending) = connect([127, 0, 0, 1]);
        assert_eq!(pending.len(), PENDING_MAX);
        let is_first = |peer: &&SocketAddr| peer.ip() == IpAddr::from([127, 0, 0, 1]);
        assert_eq!(pending.iter().filter(is_first).count(), 2, "those of others stay");
        assert!(pending.contains(&second.local_addr().unwrap().as_socket().unwrap()));
        let (newest, _) = silent.last().unwrap();
        assert!(pending.contains(&newest.local_addr().unwrap().as_socket().unwrap()), "the oldest ones go");
    }

    #[test]
    fn connections_that_do_not_take_their_last_answer_count() {
        let (mut control, address) = control();
        let mut clients = Vec::new();
        for _ in 0..PENDING_MAX + 1 {
            clients.push(TcpStream::connect(address).unwrap());
            control.accept();
            let connection = control.connections.last_mut().unwrap();
            (connection.phase, connection.unsent) = (Phase::Closed { since: Instant::now() }, vec![0]);
        }
        assert_eq!(control.connections.len(), PENDING_MAX);
    }

    #[test]
    fn an_answer_that_is_longer_than_the_sockets_buffers_arrives_as_a_whole() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, peer) = listener.accept().unwrap();
        tcp::configure(&stream).unwrap();
        let phase = Phase::Closed { since: Instant::now() };
        let mut connection = Connection { stream, peer, phase, unsent: Vec::new() };
        let answer = Answer::Refused("a".repeat(16 << 20));
        connection.answer(&answer);
        assert!(!connection.has_ended());
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            client.read_to_end(&mut bytes).unwrap();
            bytes
        });
        while !connection.has_ended() {
            let _ = poll(&mut [connection.watched()], None);
            connection.send_unsent();
        }
        drop(connection);
        let mut expected = serde_json::to_vec(&answer).unwrap();
        expected.push(b'\n');
        assert!(reader.join().unwrap() == expected);
    }
}
