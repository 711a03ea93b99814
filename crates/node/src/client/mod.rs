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
//! Nothing blocks but [`Client::connect`] and [`Client::open`]: an access is begun, and its completion comes by
//! [`Client::poll`], with the tag that it was begun with, in the order of beginning.

mod error;
mod region;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_access::proto::Body;
use terrace_nic::{
    AddressVector, Buffer, Cq, CqInit, Device, DeviceConfig, Path, Pd, PortConfig, QpCap, QueuePair, Wc,
    WcStatus,
};

use crate::agent::Agent;
use crate::control;
use crate::link::{Answer, LinkState};
use crate::parties::{Party, Role};

pub use error::ClientError;
pub use region::{Region, Span};

/// How long `connect` and `open` wait for an answer on a connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// `ibv_access_flags` of buffers: the server writes into them and READs from them when it carries out requests.
const BUFFER_ACCESS: u32 = 1 | 1 << 1 | 1 << 2;
/// Completions that are taken at a time.
const COMPLETIONS_MAX: usize = 64;

/// Where a client finds its server.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The server's address.
    pub server: IpAddr,
    /// The server's slot: 0 for the first process that uses Terrace at that address.
    pub slot: u8,
    /// How to open the client's own port.
    pub port: PortConfig,
    /// Accesses that may be under way at a time.
    pub depth: u32,
}

impl ClientConfig {
    /// A client of the first process at an address, with up to 256 accesses under way.
    pub fn new(server: IpAddr) -> ClientConfig {
        let address = server.is_loopback().then_some(server);
        ClientConfig { server, slot: 0, port: PortConfig { address, ..PortConfig::default() }, depth: 256 }
    }
}

/// An access that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// What it was begun with.
    pub tag: u64,
    /// `Success`, or why not.
    pub status: WcStatus,
}

/// A connection to a memory node.
pub struct Client {
    device: Arc<Device>,
    agent: Arc<Agent>,
    /// The number of our end of the control queue pair.
    link: u32,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    qp: Arc<QueuePair>,
}

impl Client {
    /// Connects to a server.
    ///
    /// # Errors
    /// `Port` or `Nic` when there is no port or no memory for one; `Silent` when nobody answers; `Refused` when the server does
    /// not want to.
    pub fn connect(config: &ClientConfig) -> Result<Client, ClientError> {
        let port = config.port.open().map_err(ClientError::Port)?;
        let device = Device::open(DeviceConfig::new(port))?;
        let made = Client::on_device(&device, config);
        if made.is_err() {
            device.close();
        }
        made
    }

    fn on_device(device: &Arc<Device>, config: &ClientConfig) -> Result<Client, ClientError> {
        let agent = Agent::attach(device)?;
        let remote = path_to(device, config)?;
        let link = agent.connect_to(device, remote)?;
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(CqInit { depth: config.depth.max(1), channel: None, cookie: 0 })?;
        let cap = QpCap {
            max_send_wr: config.depth,
            max_recv_wr: 0,
            max_send_sge: 1,
            max_recv_sge: 0,
            max_inline_data: 0,
        };
        let (qp, own) = control::new_pair(&pd, &cq, cap)?;
        let client = Client { device: device.clone(), agent, link, pd, cq, qp };
        client.wait_until_connected()?;
        let Answer::Paired(peer) = client.ask(Body::Pair(own))? else { return Err(ClientError::Nonsense) };
        control::prepare(&client.qp, 0)?;
        control::connect(&client.qp, own, remote, peer)?;
        Ok(client)
    }

    fn wait_until_connected(&self) -> Result<(), ClientError> {
        self.wait(|client| {
            let mut state = client.agent.lock();
            let party = state.parties.touch(client.link);
            let Some(Party { role: Role::Client(link), .. }) = party else {
                return Some(Err(ClientError::Lost));
            };
            match link.state {
                LinkState::Connecting { .. } => None,
                LinkState::Connected => Some(Ok(())),
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
        let answer = self.wait(|client| {
            let mut state = client.agent.lock();
            match state.parties.touch(client.link) {
                Some(Party { role: Role::Client(link), .. }) => link.take_answer(id).map(Ok),
                _ => Some(Err(ClientError::Lost)),
            }
        })?;
        match answer {
            Answer::Done(status) => Err(ClientError::Refused(status)),
            answer => Ok(answer),
        }
    }

    /// Makes progress until there is a result.
    fn wait<T>(
        &self,
        mut look: impl FnMut(&Client) -> Option<Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let started = Instant::now();
        loop {
            self.device.progress();
            if let Some(result) = look(self) {
                return result;
            }
            if started.elapsed() > PATIENCE {
                return Err(ClientError::Lost);
            }
            std::thread::yield_now();
        }
    }

    /// Finds a region of the server.
    ///
    /// # Errors
    /// `NoRegion` when it has none of that name; `Lost` when the connection has ended.
    pub fn open(&self, name: &str) -> Result<Region<'_>, ClientError> {
        match self.ask(Body::Find(name)) {
            Ok(Answer::Found(found)) => Ok(Region::new(self, found)),
            Ok(_) => Err(ClientError::Nonsense),
            Err(ClientError::Refused(_)) => Err(ClientError::NoRegion(name.into())),
            Err(error) => Err(error),
        }
    }

    /// Memory that accesses can use.
    ///
    /// # Errors
    /// `Nic` for no bytes, or without memory.
    pub fn buffer(&self, len: usize) -> Result<Buffer, ClientError> {
        Ok(Buffer::new(&self.pd, len, BUFFER_ACCESS)?)
    }

    /// Makes progress, adds the accesses that have ended, and returns how many.
    ///
    /// # Errors
    /// `Nic` when completions were lost: the connection is of no more use.
    pub fn poll(&self, done: &mut Vec<Completion>) -> Result<usize, ClientError> {
        let mut take = |wc: Wc| done.push(Completion { tag: wc.wr_id, status: wc.status });
        Ok(self.cq.poll(COMPLETIONS_MAX, &mut take)?)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.device.close();
    }
}

/// The way to the server.
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
