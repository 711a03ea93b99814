//! The client library: regions of a memory node, by name, from Rust.
//!
//! ```no_run
//! use terrace_node::{Client, ClientConfig, ClientError};
//!
//! fn main() -> Result<(), ClientError> {
//!     let client = Client::connect(&ClientConfig::new("192.0.2.7".parse().unwrap()))?;
//!     let region = client.open("table")?;
//!     let buffer = client.buffer(4096)?;
//!     region.read(1 << 20, &buffer, 0, 4096, 1)?;
//!     let mut done = Vec::new();
//!     while done.is_empty() {
//!         client.poll(&mut done)?;
//!     }
//!     assert_eq!(done[0].tag, 1);
//!     Ok(())
//! }
//! ```
//!
//! Only [`Client::connect`] and [`Client::open`] block. [`Client::poll`] returns the completion of each access with its
//! tag. Completions may be out of order: an access to resident memory does not wait for earlier ones that the disk
//! serves. Accesses to the same bytes take effect in the order in which they were begun.

mod address;
mod error;
mod fetch;
mod io;
mod region;

use std::any::Any;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_access::proto::{Body, Found, Magic, Mode, NAME_BYTES_MAX, Open, Status};
use terrace_access::region::{Knowledge, Region as Extended};
use terrace_nic::{Buffer, Cq, CqInit, Device, Path, PortConfig, QpCap, QueuePair, SendWr, WcStatus, rc};
use terrace_sync::Mutex;

use crate::agent::Agent;
use crate::connections::{Connection, Role};
use crate::link::{Answer, LinkState};

use address::AddressRequests;
pub use address::{ADDRESS_REQUESTS_MAX, RegionAddress};
pub use error::ClientError;
use io::Io;
pub use region::{Region, RegionHandle, Span};

/// The timeout of `connect` and `open`.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// `ibv_access_flags` of buffers. The server WRITEs and READs them when it executes requests.
const BUFFER_ACCESS: u32 = 1 | 1 << 1 | REMOTE_READ;
/// `ibv_access_flags` of buffers that are only written from.
const REMOTE_READ: u32 = 1 << 2;

/// The address of a client's server, and the client's parameters.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The server's address.
    pub server: IpAddr,
    /// The instance index of the server's device: 0 for the first process that uses Terrace at that address.
    pub instance: u8,
    /// The configuration of the client's own port.
    pub port: PortConfig,
    /// The most accesses in flight.
    pub depth: u32,
    /// The most requests of [`Client::request_address`] in flight, up to [`ADDRESS_REQUESTS_MAX`]. Accesses have as many
    /// calls fewer in flight.
    pub address_requests: u16,
}

impl ClientConfig {
    /// A client of the first process at an address, with up to 256 accesses in flight, and no requests for addresses.
    pub fn new(server: IpAddr) -> ClientConfig {
        let address = server.is_loopback().then_some(server);
        ClientConfig {
            server,
            instance: 0,
            port: PortConfig { address, ..PortConfig::default() },
            depth: 256,
            address_requests: 0,
        }
    }
}

/// The completion of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The tag of the access.
    pub tag: u64,
    /// `Success`, or the reason of the failure.
    pub status: WcStatus,
}

/// What a client has requested of its server besides one-sided accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClientCounters {
    /// Requests to fetch or to write ranges that are not in the server's memory.
    pub requests: u64,
    /// The messages that carried them, as far as READs did not, and those that requested a grant.
    pub messages: u64,
    /// The answers to these messages: messages, and RDMA WRITEs with an immediate.
    pub answers: u64,
    /// Bytes of residency bitmaps.
    pub pulled_bytes: u64,
}

/// A connection to a memory node.
pub struct Client {
    device: Arc<Device>,
    agent: Arc<Agent>,
    /// The QPN of our end of the control queue pair.
    link: u32,
    cq: Arc<Cq>,
    /// The QPNs of our end of the queue pair for accesses, and of the server's end.
    qpns: (u32, u32),
    /// The path to the server.
    remote: Path,
    /// Whether there are queue pairs for fetches.
    has_fetches: Mutex<bool>,
    io: Mutex<Io>,
    address_requests: Mutex<AddressRequests>,
}

impl Client {
    /// Connects to a server.
    ///
    /// # Errors
    /// `Port` or `Nic` if no port can be opened; `Silent` if no server answers; `Refused` if the server refuses.
    pub fn connect(config: &ClientConfig) -> Result<Client, ClientError> {
        let device = Device::open(config.port.device().map_err(ClientError::Port)?)?;
        let client = Client::on_device(&device, config);
        if client.is_err() {
            device.close();
        }
        client
    }

    fn on_device(device: &Arc<Device>, config: &ClientConfig) -> Result<Client, ClientError> {
        let agent = Agent::attach(device, 0)?;
        let remote = path_to(device, config)?;
        let link = Connected { device, agent: &agent, link: agent.connect_to(device, remote)? };
        let calls_max = link.wait_until_connected()?;
        let depth = config.depth.max(1);
        let fetches_max = fetch::PAIR_COUNT as u32 * fetch::PAIR_DEPTH;
        let cq = device.create_cq(CqInit {
            depth: depth.saturating_add(fetches_max),
            channel: None,
            cookie: 0,
        })?;
        let (qp, qpns) = link.connect_pair(&cq, depth, remote)?;
        let link = link.link;
        let requests_max = config.address_requests.min(ADDRESS_REQUESTS_MAX).min(calls_max / 2);
        let io = Mutex::new(Io::new(qp, cq.clone(), link, depth, calls_max - requests_max));
        Ok(Client {
            device: device.clone(),
            agent,
            link,
            cq,
            qpns,
            remote,
            has_fetches: Mutex::new(false),
            io,
            address_requests: Mutex::new(AddressRequests::new(requests_max)),
        })
    }

    fn link(&self) -> Connected<'_> {
        Connected { device: &self.device, agent: &self.agent, link: self.link }
    }

    /// Opens a region of the server by its name.
    ///
    /// # Errors
    /// `NoRegion` if the server has no region of that name; `Lost` if the connection has ended.
    pub fn open(&self, name: &str) -> Result<Region<'_>, ClientError> {
        if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
            return Err(ClientError::NoRegion(name.chars().take(NAME_BYTES_MAX).collect()));
        }
        let found = match self.link().call(Body::Find(name)) {
            Ok(Answer::Found(found)) => found,
            Ok(_) => return Err(ClientError::Protocol),
            Err(ClientError::Refused(_)) => return Err(ClientError::NoRegion(name.into())),
            Err(error) => return Err(error),
        };
        let Found { rkey, region: description } = found;
        let known = match description.mode {
            Mode::Plain => Knowledge::Plain,
            Mode::OneSided | Mode::RpcOnly => Knowledge::Extended(Arc::new(Extended::new(rkey, description))),
        };
        if let Knowledge::Extended(region) = &known {
            self.request_grant(region)?;
        }
        Ok(Region::new(self, found, known))
    }

    /// The region of a handle. The handle must be of a region of this client; accesses to another client's fail.
    pub fn region(&self, handle: &RegionHandle) -> Region<'_> {
        Region::of_handle(self, handle.clone())
    }

    /// Requests the server's grant for a region, and starts to pull its residency bitmap.
    fn request_grant(&self, region: &Arc<Extended>) -> Result<(), ClientError> {
        let (rkey, region_id) = (region.rkey(), region.description().region_id);
        let (client_qpn, server_qpn) = self.qpns;
        let magic = Magic { client_qpn, server_qpn, rkey, region_id, on: false };
        let link = self.link();
        link.call(Body::Magic(magic))?;
        let mode = region.description().mode;
        if mode == Mode::OneSided {
            let Answer::Opened(tables) = link.call(Body::Open(Open { rkey, region_id }))? else {
                return Err(ClientError::Protocol);
            };
            self.io.lock().start_pulls(self.agent.pd(), region.clone(), tables.bitmap)?;
            self.connect_fetches()?;
        }
        self.io.lock().start(&self.agent, mode, server_qpn);
        Ok(())
    }

    /// Connects the queue pairs by which absent pages are fetched, once.
    fn connect_fetches(&self) -> Result<(), ClientError> {
        let mut has_fetches = self.has_fetches.lock();
        if *has_fetches {
            return Ok(());
        }
        let connect = |_| Ok(self.link().connect_pair(&self.cq, fetch::PAIR_DEPTH, self.remote)?.0);
        let qps = (0..fetch::PAIR_COUNT).map(connect).collect::<Result<_, ClientError>>()?;
        self.io.lock().start_fetches(qps);
        *has_fetches = true;
        Ok(())
    }

    /// Allocates and registers a buffer for accesses.
    ///
    /// # Errors
    /// `Nic` for a length of 0, or without memory.
    pub fn buffer(&self, len: usize) -> Result<Buffer, ClientError> {
        Ok(Buffer::new(self.agent.pd(), len, BUFFER_ACCESS)?)
    }

    /// Registers `len` bytes of the caller's memory at `addr`; see [`Buffer::over`]. Reads need writable memory.
    ///
    /// # Errors
    /// `Nic` for a length of 0, or if the device has no room for another registration.
    pub fn buffer_over(
        &self,
        addr: u64,
        len: usize,
        is_writable: bool,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Buffer, ClientError> {
        let access = if is_writable { BUFFER_ACCESS } else { REMOTE_READ };
        Ok(Buffer::over(self.agent.pd(), addr, len, owner, access)?)
    }

    /// Begins accesses, up to the first error.
    fn begin(
        &self,
        mut wrs: impl Iterator<Item = Result<SendWr, ClientError>>,
        known: &Knowledge,
    ) -> Result<(), ClientError> {
        let mut io = self.io.lock();
        let begun = wrs.try_for_each(|wr| io.begin(wr?, known).map_err(|_| ClientError::Full));
        io.advance(&self.device, &self.agent)?;
        begun
    }

    /// The counters so far.
    pub fn counters(&self) -> ClientCounters {
        self.io.lock().counters
    }

    /// Makes progress, appends the completions of accesses, and returns their number.
    ///
    /// # Errors
    /// `Nic` if completions were lost. The connection is unusable then.
    pub fn poll(&self, done: &mut Vec<Completion>) -> Result<usize, ClientError> {
        self.cq.advance();
        let mut io = self.io.lock();
        io.advance(&self.device, &self.agent)?;
        let before_count = done.len();
        done.extend(io.take_completed());
        Ok(done.len() - before_count)
    }
}

/// The connection of a client, for blocking requests.
struct Connected<'a> {
    device: &'a Arc<Device>,
    agent: &'a Arc<Agent>,
    link: u32,
}

impl Connected<'_> {
    /// Waits for the connection. Returns the most requests that the server accepts in flight.
    fn wait_until_connected(&self) -> Result<u16, ClientError> {
        self.wait(|| {
            let mut state = self.agent.lock();
            let connection = state.connections.get_to_post(self.link);
            let Some(Connection { role: Role::Client(link), .. }) = connection else {
                return Some(Err(ClientError::Lost));
            };
            match link.state {
                LinkState::Connecting { .. } => None,
                LinkState::Connected => Some(Ok(link.requests_max)),
                LinkState::Silent => Some(Err(ClientError::Silent(link.remote.remote))),
                LinkState::Refused(status) => Some(Err(ClientError::Refused(status))),
            }
        })
    }

    /// Connects a queue pair for up to `depth` work requests to one of the server's. Returns it, and the numbers of both.
    fn connect_pair(
        &self,
        cq: &Arc<Cq>,
        depth: u32,
        remote: Path,
    ) -> Result<(Arc<QueuePair>, (u32, u32)), ClientError> {
        let cap = QpCap {
            max_send_wr: depth,
            max_recv_wr: 0,
            max_send_sge: 1,
            max_recv_sge: 0,
            max_inline_data: 0,
        };
        // In the agent's protection domain, so that the server can access buffers over the control queue pair.
        let (qp, own) = rc::new_pair(self.agent.pd(), cq, cap)?;
        let Answer::Paired(peer) = self.call(Body::Pair(own))? else { return Err(ClientError::Protocol) };
        rc::initialize(&qp, 0)?;
        rc::connect(&qp, own, remote, peer, rc::TIMEOUT, rc::RNR_RETRIES)?;
        Ok((qp, (own.qpn, peer.qpn)))
    }

    /// Sends a request on the control queue pair, and waits for the answer.
    fn call(&self, body: Body<'_>) -> Result<Answer, ClientError> {
        let id = self.request(body)?;
        self.wait(|| self.take_answer(id))
    }

    /// Sends a request on the control queue pair. Returns its id.
    fn request(&self, body: Body<'_>) -> Result<u64, ClientError> {
        let mut state = self.agent.lock();
        let Some(Connection { control, role: Role::Client(link) }) = state.connections.get_to_post(self.link)
        else {
            return Err(ClientError::Lost);
        };
        let id = link.request(control, body);
        state.connections.post();
        Ok(id)
    }

    /// Takes the answer to a request, if it has arrived.
    fn take_answer(&self, id: u64) -> Option<Result<Answer, ClientError>> {
        let mut state = self.agent.lock();
        let Some(Connection { role: Role::Client(link), .. }) = state.connections.get_to_post(self.link)
        else {
            return Some(Err(ClientError::Lost));
        };
        match link.take_answer(id)? {
            Answer::Done(status) if status != Status::Ok => Some(Err(ClientError::Refused(status))),
            answer => Some(Ok(answer)),
        }
    }

    /// Makes progress until `poll` returns a result.
    fn wait<T>(&self, mut poll: impl FnMut() -> Option<Result<T, ClientError>>) -> Result<T, ClientError> {
        let started = Instant::now();
        loop {
            self.device.progress();
            if let Some(result) = poll() {
                return result;
            }
            if started.elapsed() > ANSWER_TIMEOUT {
                return Err(ClientError::Lost);
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.device.close();
    }
}

/// The path to the server.
fn path_to(device: &Device, config: &ClientConfig) -> Result<Path, ClientError> {
    let qpn = u32::from(config.instance) << terrace_nic::QPN_INSTANCE_SHIFT;
    rc::path_to(device, config.server, qpn)?.ok_or(ClientError::Family(config.server))
}
