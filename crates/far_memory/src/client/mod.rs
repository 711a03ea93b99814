//! The client library: pages on one or several memory nodes.
//!
//! ```no_run
//! use terrace_far_memory::{Client, ClientConfig, PageStore};
//!
//! let client = Client::connect(&ClientConfig::new(vec!["192.0.2.7:7474".parse()?], 1 << 20))?;
//! client.store(17, &[42; 4096])?;
//! let mut page = [0; 4096];
//! client.load(17, &mut page)?;
//! client.invalidate(17)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | module | contains |
//! |---|---|
//! | `space` | which nodes have a page |
//! | `link`, `connect_error` | a node's connection, and why there is none |
//! | `pool` | whether a node has a free page, as far as stores have found |
//! | `page_buffer` | registered memory of pages, and the ends of operations |
//! | `transport` | how functions of a node are called |
//! | `chains`, `chain` | by chains, one for each function |
//! | `baseline`, `slabs` | as a baseline does: by messages and one-sided accesses; the memory that was given |
//! | `copies` | which copies of a page there are, and where new ones can be |
//! | `operations` | operations in flight, and what becomes of them when a node is lost |
//! | `rejoin`, `refill` | nodes that were lost are used again; the copies of pages that they lack |
//! | `report` | what `terrace stat` shows |

mod baseline;
mod chain;
mod chains;
mod connect_error;
mod copies;
#[cfg(test)]
mod hostile_node_tests;
#[cfg(test)]
mod hostile_tests;
mod link;
mod operations;
mod page_buffer;
mod pool;
mod refill;
mod rejoin;
mod report;
mod slabs;
mod space;
#[cfg(test)]
mod stopped_tests;
mod transport;

use std::any::Any;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_nic::{Buffer, Cq, CqInit, Device, Error, Pd, PortConfig};
use terrace_sync::Mutex;

use crate::page_store::{PAGE_BYTES, Page, PageError, PageStore};
use crate::protocol::DEPTH_MAX;
use link::Link;
use operations::{Kind, Operation, Operations, Sink, Timeouts, Waiter};
use page_buffer::{BUFFER_ACCESS, new_buffer};
use refill::{COPIES, Refill};
use rejoin::{RejoinThreads, Rejoining};
use report::Report;
use space::Space;
use transport::Asked;

pub use connect_error::ConnectError;
pub use link::node_status;
pub use page_buffer::{Completion, PageBuffer};
pub use report::{NODES_REPORT, NodeState};

/// Pages of the buffer that blocking calls share.
const SHARED_PAGES: usize = 64;
/// How long a waiting thread polls before it lets others run.
const POLL_TIME: Duration = Duration::from_micros(50);

/// The nodes of a client, and the client's parameters.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The memory nodes, as they listen. The space is spread over them.
    pub nodes: Vec<SocketAddr>,
    /// Pages of the space.
    pub page_count: u64,
    /// Copies of each page, on different nodes: 1 or 2. With 2, the loss of a node loses no page.
    pub copies: usize,
    /// Operations in flight at most, on each node: up to 128 are served at a time, others wait.
    pub depth: u32,
    /// A node that takes longer for an operation is given up, if other nodes have copies of all of its pages.
    pub timeout: Duration,
    /// The same for a node that may have the only copy of a page: it may be slow or stopped, and its pages are there as long as
    /// its process is. A node whose process or host has ended is given up at once, or 7 seconds later.
    pub last_copy_timeout: Duration,
    /// A name for `terrace stat`.
    pub name: String,
    /// The configuration of the client's own port.
    pub port: PortConfig,
}

impl ClientConfig {
    /// One copy of each page, up to 64 operations in flight, and timeouts of 5 seconds and 2 minutes.
    pub fn new(nodes: Vec<SocketAddr>, page_count: u64) -> ClientConfig {
        let loopback = nodes.first().map(SocketAddr::ip).filter(|address| address.is_loopback());
        ClientConfig {
            nodes,
            page_count,
            copies: 1,
            depth: 64,
            timeout: Duration::from_secs(5),
            last_copy_timeout: Duration::from_secs(120),
            name: format!("process {}", std::process::id()),
            port: PortConfig { address: loopback, ..PortConfig::default() },
        }
    }
}

/// What to do, for [`Client::submit`].
#[derive(Clone)]
pub enum Request {
    /// Loads a page into a page of a buffer.
    Load {
        /// The page.
        page: u64,
        /// The buffer, and the page there.
        into: (Arc<PageBuffer>, usize),
        /// Names the operation when it ends.
        tag: u64,
    },
    /// Stores a page of a buffer, which may not change until the operation ends.
    Store {
        /// The page.
        page: u64,
        /// The buffer, and the page there.
        from: (Arc<PageBuffer>, usize),
        /// Names the operation when it ends.
        tag: u64,
    },
    /// Frees a page.
    Invalidate {
        /// The page.
        page: u64,
        /// Names the operation when it ends.
        tag: u64,
    },
}

/// Pages on memory nodes.
pub struct Client {
    device: Arc<Device>,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    operations: Arc<Mutex<Operations>>,
    page_count: u64,
    /// The buffer of blocking calls, and the pages of it that are free.
    shared: Arc<PageBuffer>,
    free: Mutex<Vec<usize>>,
    /// Uses lost nodes again, if there are two copies of each page.
    rejoin: Option<RejoinThreads>,
}

impl Client {
    /// Connects to all nodes.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(config: &ClientConfig) -> Result<Client, ConnectError> {
        let are_copies = (1..=2).contains(&config.copies) && config.copies <= config.nodes.len();
        if !are_copies || config.page_count == 0 || config.page_count > 1 << 40 {
            return Err(ConnectError::Config);
        }
        let mut others = config.nodes.iter().enumerate();
        if let Some((_, node)) = others.find(|(index, node)| config.nodes[..*index].contains(node)) {
            return Err(ConnectError::SameNode(*node));
        }
        let device = Device::open(config.port.device().map_err(ConnectError::Port)?)?;
        let client = Client::on_device(&device, config);
        if client.is_err() {
            device.close();
        }
        client
    }

    fn on_device(device: &Arc<Device>, config: &ClientConfig) -> Result<Client, ConnectError> {
        let pd = device.alloc_pd()?;
        let space = Space { page_count: config.page_count, nodes: config.nodes.len(), copies: config.copies };
        let depth = config.depth.clamp(1, DEPTH_MAX).next_power_of_two();
        // Every chain has a reply for each slot, and may fail with all of its messages.
        let completions = config.nodes.len() as u32 * 4 * 4 * depth;
        let cq = device.create_cq(CqInit { depth: completions, channel: None, cookie: 0 })?;
        let asked = Asked { device, pd: &pd, cq: &cq, name: &config.name, entries: space.entries(), depth };
        let links = config.nodes.iter().map(|node| {
            let mut link = Link::connect(*node, &asked)?;
            link.allocate_map(space.entries())?;
            Ok(link)
        });
        let links = links.collect::<Result<Vec<_>, ConnectError>>()?;
        let timeouts = Timeouts { copied: config.timeout, last_copy: config.last_copy_timeout };
        let depth_of_all = config.depth.max(1) as usize * config.nodes.len();
        let mut operations = Operations::new(space, links, timeouts, depth_of_all);
        if config.copies > 1 {
            operations.refill = Some(Refill::new(Arc::new(new_buffer(&pd, COPIES)?)));
        }
        let operations = Arc::new(Mutex::new(operations));
        device.attach(Arc::new(Report::new(&operations)));
        let rejoin = (config.copies > 1).then(|| {
            RejoinThreads::start(Rejoining {
                device: device.clone(),
                pd: pd.clone(),
                cq: cq.clone(),
                name: config.name.clone(),
                entries: space.entries(),
                depth,
                operations: operations.clone(),
            })
        });
        let shared = Arc::new(new_buffer(&pd, SHARED_PAGES)?);
        Ok(Client {
            device: device.clone(),
            pd,
            cq,
            operations,
            page_count: config.page_count,
            shared,
            free: Mutex::new((0..SHARED_PAGES).collect()),
            rejoin: rejoin.transpose().map_err(ConnectError::Thread)?,
        })
    }

    /// Allocates and registers a buffer of so many pages.
    ///
    /// # Errors
    /// As the NIC: without memory, or for no pages.
    pub fn buffer(&self, page_count: usize) -> Result<Arc<PageBuffer>, Error> {
        Ok(Arc::new(new_buffer(&self.pd, page_count)?))
    }

    /// Registers the caller's memory of `page_count` pages at `addr`, which `owner` keeps in place. No reference to it may
    /// exist while operations use it.
    ///
    /// # Errors
    /// As the NIC: for no pages, or a range that overflows.
    pub fn buffer_over(
        &self,
        addr: u64,
        page_count: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<PageBuffer>, Error> {
        let len = page_count.checked_mul(PAGE_BYTES).ok_or(Error::Invalid("more pages than addresses"))?;
        Ok(Arc::new(PageBuffer { buffer: Buffer::over(&self.pd, addr, len, owner, BUFFER_ACCESS)? }))
    }

    /// Begins operations, in their order, up to the first that is refused. Returns how many have begun; each of them ends
    /// with a [`Completion`].
    ///
    /// # Errors
    /// With the number of those that have begun: `OutOfRange`, `Buffer`, or `Full` if the maximum is in flight.
    pub fn submit(&self, requests: impl IntoIterator<Item = Request>) -> Result<usize, (usize, PageError)> {
        let mut operations = self.operations.lock();
        let now = Instant::now();
        let mut count = 0;
        let begun = requests.into_iter().try_for_each(|request| {
            operations.begin(operation_of(request)?, now)?;
            count += 1;
            Ok(())
        });
        operations.post(now);
        begun.map(|()| count).map_err(|error| (count, error))
    }

    /// Makes progress, and appends the completions of operations. Returns how many there were. The caller should poll
    /// until all operations have ended.
    pub fn poll(&self, done: &mut Vec<Completion>) -> usize {
        let mut operations = self.operations.lock();
        self.advance(&mut operations);
        operations.take_completed(done)
    }

    fn advance(&self, operations: &mut Operations) {
        if let Err(error) = operations.advance(&self.cq, Instant::now()) {
            // The completion queue has room for all replies; late ones are given up by their timeouts.
            tracing::error!(%error, "completions are lost");
        }
    }

    /// The nodes, in the order of the configuration.
    pub fn nodes(&self) -> Vec<NodeState> {
        report::states(&self.operations.lock())
    }

    /// Pages that are stored.
    pub fn stored_pages(&self) -> u64 {
        self.operations.lock().stored_pages()
    }

    /// Whether a node that has the page is left.
    pub fn can_load(&self, page: u64) -> bool {
        self.operations.lock().can_load(page)
    }

    /// Whether a store of the page can be expected to succeed: a node of it is left, and has it, or gives the client one page
    /// more. A node whose pool was empty does not, for 50 ms to 1 s, or until this client returns a page.
    pub fn accepts(&self, page: u64) -> bool {
        self.operations.lock().accepts(page, Instant::now())
    }

    /// The client's device, for statistics.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Carries out an operation, and waits for its end, which is bounded by the timeout of each of the page's nodes.
    fn wait(&self, kind: Kind, page: u64, index: Option<usize>) -> Result<(), PageError> {
        let waiter = Arc::new(Waiter::default());
        let buffer = index.and_then(|index| Some((self.shared.clone(), self.shared.sge(index)?)));
        let mut operation = Some(Operation { kind, page, buffer, sink: Sink::Waiter(waiter.clone()) });
        let started = Instant::now();
        loop {
            if let Some(mut operations) = self.operations.try_lock() {
                if let Some(next) = operation.take_if(|_| operations.has_room()) {
                    let now = Instant::now();
                    operations.begin(next, now)?;
                    operations.post(now);
                }
                self.advance(&mut operations);
            }
            if let Some(result) = waiter.take() {
                return result;
            }
            if started.elapsed() > POLL_TIME {
                std::thread::yield_now();
            }
        }
    }

    /// Takes a page of the shared buffer.
    fn take_page(&self) -> SharedPage<'_> {
        loop {
            if let Some(index) = self.free.lock().pop() {
                return SharedPage { client: self, index };
            }
            // Other threads have them, each for one bounded operation.
            std::thread::yield_now();
        }
    }
}

/// A page of the shared buffer, given back when dropped.
struct SharedPage<'a> {
    client: &'a Client,
    index: usize,
}

impl Drop for SharedPage<'_> {
    fn drop(&mut self) {
        self.client.free.lock().push(self.index);
    }
}

impl PageStore for Client {
    fn page_count(&self) -> u64 {
        self.page_count
    }

    fn is_stored(&self, page: u64) -> bool {
        self.operations.lock().is_stored(page)
    }

    fn load(&self, page: u64, into: &mut Page) -> Result<(), PageError> {
        let shared = self.take_page();
        self.wait(Kind::Load, page, Some(shared.index))?;
        self.shared.read(shared.index, into)
    }

    fn store(&self, page: u64, from: &Page) -> Result<(), PageError> {
        let shared = self.take_page();
        self.shared.write(shared.index, from)?;
        self.wait(Kind::Store, page, Some(shared.index))
    }

    fn invalidate(&self, page: u64) -> Result<(), PageError> {
        self.wait(Kind::Invalidate, page, None)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(self.rejoin.take());
        // The thread that has the lock may not have seen that.
        drop(self.operations.lock());
        self.device.close();
    }
}

fn operation_of(request: Request) -> Result<Operation, PageError> {
    let (kind, page, place, tag) = match request {
        Request::Load { page, into, tag } => (Kind::Load, page, Some(into), tag),
        Request::Store { page, from, tag } => (Kind::Store, page, Some(from), tag),
        Request::Invalidate { page, tag } => (Kind::Invalidate, page, None, tag),
    };
    let buffer = match place {
        Some((buffer, index)) => {
            let sge = buffer.sge(index).ok_or(PageError::Buffer)?;
            Some((buffer, sge))
        }
        None => None,
    };
    Ok(Operation { kind, page, buffer, sink: Sink::Tag(tag) })
}
