//! Memory nodes.
//!
//! | module | contains |
//! |---|---|
//! | `pool` | the pages, and the queue of free ones |
//! | `tenant` | a client: its translation table and its chains |
//! | `chain`, `program` | a chain's queue pairs and queues; the entries in them |
//! | `state` | what the engine does besides executing chains |
//! | `reclaim` | the memory of clients that have gone |
//! | `service`, `control` | what admits clients; the control thread: connections of clients, budgets |
//! | `baseline` | nodes whose processors allocate, for comparison |
//! | `access` | `ibv_access_flags` of regions and queue pairs |

mod access;
mod baseline;
mod chain;
mod control;
mod pool;
mod program;
mod reclaim;
mod service;
mod state;
mod tenant;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use terrace_nic::{Device, Error, OpenError, PortConfig};

use crate::page_store::PAGE_BYTES;
use crate::scheme::Scheme;
use crate::status::NodeStatus;
use baseline::{Baseline, Worker};
use control::ControlThread;
use pool::{POOL_PAGES_MAX, Pool};
use service::Service;
use state::State;

/// The configuration of a memory node.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Memory to lend, in bytes: whole pages of it.
    pub memory_bytes: u64,
    /// Address and TCP port at which clients connect. The NIC's address is the same, unless `port` says otherwise.
    pub listen: SocketAddr,
    /// Clients at most.
    pub clients_max: usize,
    /// Pages that a client may have; `None` for all.
    pub budget_pages: Option<u64>,
    /// How pages are allocated.
    pub scheme: Scheme,
    /// The configuration of the port.
    pub port: PortConfig,
}

impl NodeConfig {
    /// A node with this memory, for up to 64 clients without budgets, by ODRP.
    pub fn new(memory_bytes: u64, listen: SocketAddr) -> NodeConfig {
        let address = (!listen.ip().is_unspecified()).then_some(listen.ip());
        NodeConfig {
            memory_bytes,
            listen,
            clients_max: 64,
            budget_pages: None,
            scheme: Scheme::Odrp,
            port: PortConfig { address, ..PortConfig::default() },
        }
    }
}

/// Why a memory node cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// No port could be opened.
    #[error(transparent)]
    Port(OpenError),
    /// The NIC refuses.
    #[error("the NIC refuses: {0}")]
    Nic(#[from] Error),
    /// Less than a page, or more than a pool can have.
    #[error("a memory node has from 4 KiB to 512 GiB of memory")]
    Size,
    /// Less than what the scheme allocates at a time, in bytes.
    #[error("a memory node of scheme {0} has at least {1} bytes of memory")]
    NoSlab(Scheme, u64),
    /// Clients cannot connect.
    #[error("cannot listen at {0}: {1}")]
    Listen(SocketAddr, #[source] io::Error),
}

/// A memory node. It lends its pages until it is dropped.
pub struct MemoryNode {
    device: Arc<Device>,
    service: Arc<dyn Service>,
    control: Option<ControlThread>,
    /// It answers messages, if clients send any.
    worker: Option<Worker>,
}

impl MemoryNode {
    /// Opens the port, and starts to serve.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub fn open(config: &NodeConfig) -> Result<MemoryNode, NodeError> {
        let page_count = config.memory_bytes / PAGE_BYTES as u64;
        if !(1..=POOL_PAGES_MAX).contains(&page_count) {
            return Err(NodeError::Size);
        }
        let slab_pages = config.scheme.slab_pages().unwrap_or(1);
        if page_count < slab_pages {
            return Err(NodeError::NoSlab(config.scheme, slab_pages * PAGE_BYTES as u64));
        }
        let listen_error = |error| NodeError::Listen(config.listen, error);
        let listener = std::net::TcpListener::bind(config.listen).map_err(listen_error)?;
        let device = Device::open(config.port.device().map_err(NodeError::Port)?)?;
        let joined = device.join_colocated().map_err(NodeError::from);
        let opened = joined.and_then(|()| MemoryNode::on_device(&device, config, page_count, listener));
        if opened.is_err() {
            device.close();
        }
        opened
    }

    fn on_device(
        device: &Arc<Device>,
        config: &NodeConfig,
        page_count: u64,
        listener: std::net::TcpListener,
    ) -> Result<MemoryNode, NodeError> {
        let budget_pages = config.budget_pages.unwrap_or(page_count).min(page_count);
        let listen_error = |error| NodeError::Listen(config.listen, error);
        let mut worker = None;
        let service: Arc<dyn Service> = match config.scheme {
            Scheme::Odrp => {
                let pool = Pool::new(&device.alloc_pd()?, page_count)?;
                let state = Arc::new(State::new(device, pool, config.clients_max, budget_pages)?);
                device.attach(state.clone());
                state
            }
            scheme => {
                let node = Baseline::new(device, scheme, page_count, budget_pages, config.clients_max)?;
                let node = Arc::new(node);
                device.attach(node.clone());
                if scheme != Scheme::Static {
                    worker = Some(Worker::start(node.clone()).map_err(listen_error)?);
                }
                node
            }
        };
        let control = Some(ControlThread::start(listener, service.clone()).map_err(listen_error)?);
        Ok(MemoryNode { device: device.clone(), service, control, worker })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Where clients connect: the configured address, with the port that the system chose if that was 0.
    pub fn listens_at(&self) -> SocketAddr {
        self.control.as_ref().map_or_else(|| ([0, 0, 0, 0], 0).into(), ControlThread::address)
    }

    /// What admits clients.
    #[cfg(test)]
    pub(crate) fn service(&self) -> &dyn Service {
        &*self.service
    }

    /// Pages, and who has them.
    pub fn status(&self) -> NodeStatus {
        self.service.status()
    }
}

impl Drop for MemoryNode {
    fn drop(&mut self) {
        // The control thread first: it may wait for the engine.
        drop(self.control.take());
        drop(self.worker.take());
        self.device.close();
    }
}
