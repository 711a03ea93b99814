//! A client's connection to one memory node.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use terrace_nic::{Device, Error, rc};

use super::baseline::Baseline;
use super::chains::Chains;
use super::connect_error::ConnectError;
use super::pool::PoolState;
use super::transport::{Asked, Call, Transport};
use crate::protocol::{ANSWER_BYTES_MAX, Answer, ChainEnd, Connect, Connected, Request, VERSION};
use crate::scheme::Scheme;
use crate::status::NodeStatus;
use crate::tcp;

/// How long a node may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the TCP connection is checked while a reply is late.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// A connected node.
pub(super) struct Link {
    pub address: SocketAddr,
    stream: TcpStream,
    /// What has come of the node's next line.
    line: Vec<u8>,
    checked_at: Instant,
    pub transport: Box<dyn Transport>,
    pub budget_pages: u64,
    /// Which entries of the table have a page.
    mapped: Vec<u64>,
    /// How many have, or are being given one.
    pub mapped_pages: u64,
    pub pool: PoolState,
    /// Whether it does not answer and is waited for.
    is_silent: bool,
    /// Why the node is lost.
    pub lost: Option<String>,
    /// Why it cannot be used again although it answers.
    refusal: Option<String>,
    pub counts: LinkCounts,
}

/// What has happened to a node of a client.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinkCounts {
    pub losses: u64,
    pub rejoins: u64,
    /// Pages that were copied to it after it has joined again.
    pub copied_pages: u64,
}

impl Link {
    /// Connects to a node. The link has no map of pages yet.
    pub fn connect(address: SocketAddr, asked: &Asked<'_>) -> Result<Link, ConnectError> {
        let scheme = scheme_of(address)?;
        let mut transport: Box<dyn Transport> = match scheme {
            Scheme::Odrp => Box::new(Chains::new(asked)?),
            _ => Box::new(Baseline::new(scheme, asked)?),
        };
        match introduce(address, asked, scheme, transport.as_mut()) {
            Ok((stream, line, budget_pages)) => Ok(Link {
                address,
                stream,
                line,
                checked_at: Instant::now(),
                transport,
                budget_pages,
                mapped: Vec::new(),
                mapped_pages: 0,
                pool: PoolState::default(),
                is_silent: false,
                lost: None,
                refusal: None,
                counts: LinkCounts::default(),
            }),
            Err(error) => {
                transport.abandon();
                Err(error)
            }
        }
    }

    /// Allocates the map of pages.
    ///
    /// # Errors
    /// `Nic` with ENOMEM.
    pub fn allocate_map(&mut self, entries: u64) -> Result<(), ConnectError> {
        let words = entries.div_ceil(64) as usize;
        self.mapped.try_reserve_exact(words).map_err(|_| Error::NoMemory("a map of pages"))?;
        self.mapped.resize(words, 0);
        Ok(())
    }

    /// Takes the map and the counts of a lost link, in whose place this one is. All pages there are gone.
    pub fn replace(&mut self, lost: &mut Link) {
        self.mapped = std::mem::take(&mut lost.mapped);
        self.mapped.fill(0);
        self.counts = lost.counts;
        self.counts.rejoins += 1;
    }

    /// Notes why the lost node cannot be used again, and warns if the reason is another one than before.
    pub fn note_refusal(&mut self, reason: Option<String>) {
        if let Some(reason) = reason.as_ref().filter(|reason| Some(*reason) != self.refusal.as_ref()) {
            tracing::warn!(node = %self.address, reason, "a lost memory node cannot be used again");
        }
        self.refusal = reason;
    }

    /// Why the node is lost, and cannot be used again.
    pub fn loss(&self) -> Option<String> {
        let (lost, refusal) = (self.lost.as_ref()?, self.refusal.as_ref());
        Some(refusal.map_or_else(|| lost.clone(), |refusal| format!("{lost}; now {refusal}")))
    }

    /// Whether the node has a page for this entry.
    pub fn is_mapped(&self, index: u64) -> bool {
        self.mapped[(index / 64) as usize] & 1 << (index % 64) != 0
    }

    pub fn set_mapped(&mut self, index: u64, is_mapped: bool) {
        let word = &mut self.mapped[(index / 64) as usize];
        let bit = 1 << (index % 64);
        *word = if is_mapped { *word | bit } else { *word & !bit };
    }

    /// Whether a store of a new page may find a page there: the client is within its budget, and the pool was not empty a short
    /// time ago.
    pub fn may_have_page(&self, now: Instant) -> bool {
        self.mapped_pages < self.budget_pages && self.pool.may_have_page(now)
    }

    /// Whether a copy that can wait may find a page there. A pool that stays empty is tried more and more rarely.
    pub fn may_be_probed(&self, now: Instant) -> bool {
        self.mapped_pages < self.budget_pages && self.pool.may_be_probed(now)
    }

    /// Whether a page that has another copy is stored there, too. A full node is left to the refill.
    pub fn has_room(&self) -> bool {
        self.mapped_pages < self.budget_pages && !self.pool.was_empty()
    }

    /// How long the oldest operation has taken; `None` if there is none, or the node is lost.
    pub fn lateness(&self, now: Instant) -> Option<Duration> {
        let oldest = self.transport.oldest().filter(|_| self.lost.is_none())?;
        Some(now.saturating_duration_since(oldest))
    }

    /// Notes whether the node does not answer and is waited for, and warns if that is new.
    pub fn set_silent(&mut self, is_silent: bool, timeout: Duration) {
        let was_silent = std::mem::replace(&mut self.is_silent, is_silent);
        if is_silent && !was_silent {
            let timeout_s = timeout.as_secs();
            tracing::warn!(node = %self.address, timeout_s, "a memory node does not answer; it may have the only copies of pages, and is waited for");
        }
    }

    /// Why the node has closed the connection, if so. It is asked from time to time while a reply is late.
    pub fn late_end(&mut self, late: Duration, now: Instant) -> Option<String> {
        if late < CHECK_INTERVAL || now.saturating_duration_since(self.checked_at) < CHECK_INTERVAL {
            return None;
        }
        self.checked_at = now;
        self.ended()
    }

    /// Why the node has closed the connection, if so.
    pub fn ended(&mut self) -> Option<String> {
        match tcp::read_line(&mut self.stream, &mut self.line, ANSWER_BYTES_MAX) {
            Ok(None) => None,
            Ok(Some(line)) => Some(match serde_json::from_slice(&line) {
                Ok(Answer::Ended(reason)) => reason,
                _ => "it says something that is none of the protocol".into(),
            }),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Some("it has ended".into()),
            Err(error) => Some(error.to_string()),
        }
    }

    /// Notes that the node is lost, and returns the calls in flight. A node that goes on all the same frees the client's pages.
    pub fn give_up(&mut self, reason: &str) -> Vec<Call> {
        (self.lost, self.mapped_pages) = (Some(reason.into()), 0);
        self.counts.losses += 1;
        // It fails if the node has closed the connection.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.transport.abandon()
    }
}

/// Has a node admit a client, and connects the client's ends. Returns the TCP connection, what has come of the node's next
/// line, and the budget in pages.
fn introduce(
    address: SocketAddr,
    asked: &Asked<'_>,
    scheme: Scheme,
    transport: &mut dyn Transport,
) -> Result<(TcpStream, Vec<u8>, u64), ConnectError> {
    let own = own_address(asked.device, address)?;
    let mut stream = dial(address, Some(own))?;
    let connect = Connect {
        version: VERSION,
        name: asked.name.into(),
        page_count: asked.entries,
        depth: asked.depth,
        address: own,
        mtu_bytes: asked.device.port_attributes().active_mtu as u16,
        scheme,
        ends: transport.endpoints().into_iter().map(ChainEnd::of).collect(),
    };
    let mut line = Vec::new();
    let answer = ask(&mut stream, address, &Request::Connect(Box::new(connect)), &mut line)?;
    let connected = match answer {
        Answer::Connected(connected) => *connected,
        Answer::Refused(reason) => return Err(ConnectError::Refused(address, reason)),
        Answer::Ended(_) | Answer::Scheme(_) | Answer::Status(_) => {
            return Err(ConnectError::Protocol(address));
        }
    };
    let Connected { address: nic, mtu_bytes, ends, budget_pages, grant } = connected;
    if ends.len() != scheme.connection_count() {
        return Err(ConnectError::Protocol(address));
    }
    let mut peers = Vec::with_capacity(ends.len());
    for end in ends {
        let path = rc::path_to(asked.device, nic, end.qpn)?.ok_or(ConnectError::Family(address))?;
        peers.push((path, end.endpoint(mtu_bytes)));
    }
    transport.connect(&peers, grant)?;
    Ok((stream, line, budget_pages))
}

/// The address of the device that reaches a node.
fn own_address(device: &Device, node: SocketAddr) -> Result<IpAddr, ConnectError> {
    let family = |gid: &&terrace_nic::Gid| gid.addr.is_ipv4() == node.is_ipv4();
    device.gids().iter().find(family).map(|gid| gid.addr).ok_or(ConnectError::Family(node))
}

/// Opens a TCP connection from this address.
fn dial(to: SocketAddr, from: Option<IpAddr>) -> Result<TcpStream, ConnectError> {
    let unreachable = |error| ConnectError::Unreachable(to, error);
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).map_err(unreachable)?;
    if let Some(from) = from {
        socket.bind(&SocketAddr::new(from, 0).into()).map_err(unreachable)?;
    }
    socket.connect_timeout(&to.into(), ANSWER_TIMEOUT).map_err(unreachable)?;
    let stream = TcpStream::from(socket);
    tcp::configure(&stream).map_err(unreachable)?;
    Ok(stream)
}

/// Sends a request, and waits for the answer.
fn ask(
    stream: &mut TcpStream,
    address: SocketAddr,
    request: &Request,
    line: &mut Vec<u8>,
) -> Result<Answer, ConnectError> {
    let unreachable = |error| ConnectError::Unreachable(address, error);
    let mut bytes = serde_json::to_vec(request).map_err(|_| ConnectError::Protocol(address))?;
    bytes.push(b'\n');
    // A request fits into any socket's buffer.
    stream.write_all(&bytes).map_err(unreachable)?;
    let started = Instant::now();
    loop {
        match tcp::read_line(stream, line, ANSWER_BYTES_MAX) {
            Ok(Some(answer)) => {
                return serde_json::from_slice(&answer).map_err(|_| ConnectError::Protocol(address));
            }
            Ok(None) if started.elapsed() < ANSWER_TIMEOUT => std::thread::sleep(CHECK_INTERVAL),
            Ok(None) => return Err(unreachable(ErrorKind::TimedOut.into())),
            Err(error) => return Err(unreachable(error)),
        }
    }
}

/// Asks a memory node for its scheme. Its status would be longer, by a line for each of its clients.
fn scheme_of(address: SocketAddr) -> Result<Scheme, ConnectError> {
    let mut stream = dial(address, None)?;
    match ask(&mut stream, address, &Request::Scheme, &mut Vec::new())? {
        Answer::Scheme(scheme) => Ok(scheme),
        _ => Err(ConnectError::Protocol(address)),
    }
}

/// Asks a memory node how its pages are used.
///
/// # Errors
/// `Unreachable` if it does not answer, `Protocol` if it is none.
pub fn node_status(address: SocketAddr) -> Result<NodeStatus, ConnectError> {
    let mut stream = dial(address, None)?;
    match ask(&mut stream, address, &Request::Status, &mut Vec::new())? {
        Answer::Status(status) => Ok(status),
        _ => Err(ConnectError::Protocol(address)),
    }
}
