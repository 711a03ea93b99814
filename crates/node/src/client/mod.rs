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
//! Only [`Client::connect`] and [`Client::open`] block. [`Client::poll`] returns the completion of an access, with its
//! tag, as soon as it has ended: an access whose bytes the server has in memory does not wait for earlier ones that
//! come from the disk. The effects of accesses on the same bytes are in the order in which the accesses were begun.

mod error;
mod io;
mod region;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_access::proto::{Body, Found, Magic, Mode, NAME_BYTES_MAX, Open, Status};
use terrace_access::region::{Knowledge, Region as Extended};
use terrace_nic::{AddressVector, Buffer, Cq, CqInit, Device, Path, PortConfig, QpCap, SendWr, WcStatus};
use terrace_sync::Mutex;

use crate::agent::Agent;
use crate::control;
use crate::link::{Answer, LinkState};
use crate::parties::{Party, Role};

pub use error::ClientError;
use io::Io;
pub use region::{Region, Span};

/// How long `connect` and `open` wait for an answer on a connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// `ibv_access_flags` of buffers: the server writes into them and READs from them when it carries out requests.
const BUFFER_ACCESS: u32 = 1 | 1 << 1 | 1 << 2;

/// The address of a client's server, and the client's parameters.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The server's address.
    pub server: IpAddr,
    /// The server's slot: 0 for the first process that uses Terrace at that address.
    pub slot: u8,
    /// How to open the client's own port.
    pub port: PortConfig,
    /// Accesses that may be in flight at a time.
    pub depth: u32,
}

impl ClientConfig {
    /// A client of the first process at an address, with up to 256 accesses in flight.
    pub fn new(server: IpAddr) -> ClientConfig {
        let address = server.is_loopback().then_some(server);
        ClientConfig { server, slot: 0, port: PortConfig { address, ..PortConfig::default() }, depth: 256 }
    }
}

/// An access that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The tag that it was begun with.
    pub tag: u64,
    /// `Success`, or the reason of the failure.
    pub status: WcStatus,
}

/// A connection to a memory node.
pub struct Client {
    device: Arc<Device>,
    agent: Arc<Agent>,
    /// The number of our end of the control queue pair.
    link: u32,
    cq: Arc<Cq>,
    /// The numbers of our end of the queue pair and of the server's.
    pair: (u32, u32),
    io: Mutex<Io>,
}

impl Client {
    /// Connects to a server.
    ///
    /// # Errors
    /// `Port` or `Nic` when there is no port or no memory for one; `Silent` when no server answers; `Refused` when the
    /// server refuses.
    pub fn connect(config: &ClientConfig) -> Result<Client, ClientError> {
        let device = Device::open(config.port.device().map_err(ClientError::Port)?)?;
        let made = Client::on_device(&device, config);
        if made.is_err() {
            device.close();
        }
        made
    }

    fn on_device(device: &Arc<Device>, config: &ClientConfig) -> Result<Client, ClientError> {
        let agent = Agent::attach(device, 0)?;
        let remote = path_to(device, config)?;
        let link = Connected { device, agent: &agent, link: agent.connect_to(device, remote)? };
        let calls_max = link.wait_until_connected()?;
        // In the agent's protection domain, so that the server can reach buffers over the control queue pair.
        let pd = agent.pd();
        let depth = config.depth.max(1);
        let cq = device.create_cq(CqInit { depth, channel: None, cookie: 0 })?;
        let cap = QpCap {
            max_send_wr: depth,
            max_recv_wr: 0,
            max_send_sge: 1,
            max_recv_sge: 0,
            max_inline_data: 0,
        };
        let (qp, own) = control::new_pair(pd, &cq, cap)?;
        let Answer::Paired(peer) = link.ask(Body::Pair(own))? else { return Err(ClientError::Nonsense) };
        control::prepare(&qp, 0)?;
        control::connect(&qp, own, remote, peer, control::RNR_RETRIES)?;
        let (link, pair) = (link.link, (own.qpn, peer.qpn));
        let io = Mutex::new(Io::new(qp, cq.clone(), link, depth, calls_max));
        Ok(Client { device: device.clone(), agent, link, cq, pair, io })
    }

    fn link(&self) -> Connected<'_> {
        Connected { device: &self.device, agent: &self.agent, link: self.link }
    }

    /// Finds a region of the server.
    ///
    /// # Errors
    /// `NoRegion` when it has none of that name; `Lost` when the connection has ended.
    pub fn open(&self, name: &str) -> Result<Region<'_>, ClientError> {
        if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
            return Err(ClientError::NoRegion(name.into()));
        }
        let found = match self.link().ask(Body::Find(name)) {
            Ok(Answer::Found(found)) => found,
            Ok(_) => return Err(ClientError::Nonsense),
            Err(ClientError::Refused(_)) => return Err(ClientError::NoRegion(name.into())),
            Err(error) => return Err(error),
        };
        let Found { rkey, region: description } = found;
        let known = match description.mode {
            Mode::Plain => Knowledge::Plain,
            Mode::OneSided | Mode::RpcOnly => Knowledge::Extended(Arc::new(Extended::new(rkey, description))),
        };
        if let Knowledge::Extended(region) = &known {
            self.prepare(region)?;
        }
        Ok(Region::new(self, found, known))
    }

    /// Shows the server that this client may use a region, and starts pulling its residency bitmap.
    fn prepare(&self, region: &Arc<Extended>) -> Result<(), ClientError> {
        let (rkey, region_id) = (region.rkey(), region.description().region_id);
        let (client_qpn, server_qpn) = self.pair;
        let magic = Magic { client_qpn, server_qpn, rkey, region_id, on: false };
        let link = self.link();
        link.ask(Body::Magic(magic))?;
        let mode = region.description().mode;
        if mode == Mode::OneSided {
            let Answer::Opened(tables) = link.ask(Body::Open(Open { rkey, region_id }))? else {
                return Err(ClientError::Nonsense);
            };
            self.io.lock().pull(self.agent.pd(), region.clone(), tables.bitmap)?;
        }
        self.io.lock().start(&self.agent, mode, server_qpn);
        Ok(())
    }

    /// Memory for accesses.
    ///
    /// # Errors
    /// `Nic` for no bytes, or without memory.
    pub fn buffer(&self, len: usize) -> Result<Buffer, ClientError> {
        Ok(Buffer::new(self.agent.pd(), len, BUFFER_ACCESS)?)
    }

    /// Begins accesses, up to the limit; the first error ends it.
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

    /// Makes progress, adds the accesses that have ended, and returns how many.
    ///
    /// # Errors
    /// `Nic` when completions were lost: the connection is unusable.
    pub fn poll(&self, done: &mut Vec<Completion>) -> Result<usize, ClientError> {
        // Only to make progress: the session's work requests complete to the session.
        self.cq.poll(0, &mut |_| ())?;
        let mut io = self.io.lock();
        io.advance(&self.device, &self.agent)?;
        let before_count = done.len();
        done.extend(io.take_ended());
        Ok(done.len() - before_count)
    }
}

/// The connection of a client, for requests that wait for answers.
struct Connected<'a> {
    device: &'a Arc<Device>,
    agent: &'a Arc<Agent>,
    link: u32,
}

impl Connected<'_> {
    /// Returns how many requests the server takes at a time.
    fn wait_until_connected(&self) -> Result<u16, ClientError> {
        self.wait(|| {
            let mut state = self.agent.lock();
            let party = state.parties.touch(self.link);
            let Some(Party { role: Role::Client(link), .. }) = party else {
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

    /// Sends a request on the control queue pair, and waits for its answer.
    fn ask(&self, body: Body<'_>) -> Result<Answer, ClientError> {
        let id = {
            let mut state = self.agent.lock();
            let Some(Party { control, role: Role::Client(link) }) = state.parties.touch(self.link) else {
                return Err(ClientError::Lost);
            };
            let id = link.request(control, body);
            state.parties.post();
            id
        };
        let answer = self.wait(|| {
            let mut state = self.agent.lock();
            match state.parties.touch(self.link) {
                Some(Party { role: Role::Client(link), .. }) => link.take_answer(id).map(Ok),
                _ => Some(Err(ClientError::Lost)),
            }
        })?;
        match answer {
            Answer::Done(status) if status != Status::Ok => Err(ClientError::Refused(status)),
            answer => Ok(answer),
        }
    }

    /// Makes progress until there is a result.
    fn wait<T>(&self, mut look: impl FnMut() -> Option<Result<T, ClientError>>) -> Result<T, ClientError> {
        let started = Instant::now();
        loop {
            self.device.progress();
            if let Some(result) = look() {
                return result;
            }
            if started.elapsed() > PATIENCE {
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
    let dgid = match config.server {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let family = |gid: &terrace_nic::Gid| gid.addr.is_ipv4() == config.server.is_ipv4();
    let sgid_index = device.gids().iter().position(family).ok_or(ClientError::Family(config.server))?;
    let av = AddressVector {
        is_global: true,
        dgid,
        sgid_index: sgid_index as u8,
        port_num: 1,
        ..AddressVector::default()
    };
    Ok(device.resolve(&av, u32::from(config.slot) << terrace_nic::QPN_SLOT_SHIFT)?)
}
