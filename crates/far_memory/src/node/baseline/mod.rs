//! Memory nodes that allocate by their processors, which ODRP is compared with (sections 2.2 and 5.1 of its paper). One thread
//! answers the messages of all clients. Under a static scheme there are none.
//!
//! | module | contains |
//! |---|---|
//! | `frames` | the memory, in slabs |
//! | `tenant` | a client: its connection, and the memory that it has |

mod frames;
mod tenant;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use terrace_nic::{CompChannel, Device, Error, ProgressCallback, Wc};
use terrace_sync::Mutex;

use super::reclaim::Reclaimer;
use super::service::{Expelled, Service, check_places};
use crate::protocol::{Connect, Connected};
use crate::scheme::Scheme;
use crate::status::NodeStatus;
use frames::Frames;
use tenant::Tenant;

/// Completions of a client that are taken at a time.
const COMPLETIONS_PER_TURN: usize = 64;
/// How long the thread polls without a message before it sleeps.
const POLL_TIME: Duration = Duration::from_micros(50);

struct Inner {
    frames: Frames,
    tenants: Vec<Tenant>,
    /// Pages of the reserved spaces of clients that have gone and still have memory.
    ending_pages: u64,
    /// Completions that were taken.
    taken: Vec<Wc>,
}

/// The state of a node.
pub(crate) struct Baseline {
    device: Weak<Device>,
    channel: Arc<CompChannel>,
    scheme: Scheme,
    page_count: u64,
    budget_pages: u64,
    clients_max: usize,
    inner: Arc<Mutex<Inner>>,
    reclaimer: Reclaimer<Tenant>,
}

impl Baseline {
    pub fn new(
        device: &Arc<Device>,
        scheme: Scheme,
        page_count: u64,
        budget_pages: u64,
        clients_max: usize,
    ) -> Result<Baseline, Error> {
        let pd = device.alloc_pd()?;
        let frames = match scheme.slab_pages() {
            Some(slab_pages) => Frames::new(&pd, page_count, slab_pages)?,
            // Clients have memory of their own.
            None => Frames::new(&pd, 1, 1)?,
        };
        let inner = Inner { frames, tenants: Vec::new(), ending_pages: 0, taken: Vec::new() };
        let inner = Arc::new(Mutex::new(inner));
        let reclaimed = inner.clone();
        Ok(Baseline {
            device: Arc::downgrade(device),
            channel: device.create_channel()?,
            scheme,
            page_count,
            budget_pages,
            clients_max,
            reclaimer: Reclaimer::start(
                |tenant: &Tenant| tenant.address,
                move |tenant| reclaim(&reclaimed, tenant),
            )?,
            inner,
        })
    }

    fn make_tenant(&self, id: u64, connect: &Connect) -> Result<Connected, String> {
        let device = self.device.upgrade().ok_or("the memory node is ending")?;
        let mut inner = self.inner.lock();
        let addresses = inner.tenants.iter().map(|tenant| tenant.address);
        check_places(self.clients_max, addresses.chain(self.reclaimer.addresses()), connect.address)?;
        let free_pages = self.free_pages(&inner);
        if self.scheme == Scheme::Static && connect.page_count > free_pages.min(self.budget_pages) {
            return Err(format!(
                "it reserves a client's whole space, of {} pages: {free_pages} are free, and a client may have {}",
                connect.page_count, self.budget_pages
            ));
        }
        let made = Tenant::new(id, (&device, &self.channel), self.scheme, self.budget_pages, connect);
        let (tenant, connected) = made.map_err(|error| format!("no connection for the client: {error}"))?;
        inner.tenants.push(tenant);
        Ok(connected)
    }

    fn free_pages(&self, inner: &Inner) -> u64 {
        match self.scheme {
            Scheme::Static => {
                let reserved = inner.tenants.iter().map(|tenant| tenant.pages(1)).sum::<u64>();
                self.page_count.saturating_sub(reserved + inner.ending_pages)
            }
            _ => inner.frames.free_pages(),
        }
    }

    /// Answers messages. Returns whether there were any, or completions of replies.
    fn serve(&self) -> bool {
        let mut inner = self.inner.lock();
        let Inner { frames, tenants, taken, .. } = &mut *inner;
        let counts = tenants.iter_mut().map(|tenant| tenant.serve(frames, COMPLETIONS_PER_TURN, taken));
        counts.sum::<usize>() > 0
    }

    /// Has the channel report the next message of each client.
    fn request_notify(&self) {
        self.inner.lock().tenants.iter().for_each(Tenant::request_notify);
    }
}

impl Service for Baseline {
    fn admit(&self, id: u64, connect: Box<Connect>, answer: Sender<Result<Connected, String>>) {
        // If nobody waits any more, the client is removed next.
        let _ = answer.send(self.make_tenant(id, &connect));
    }

    fn remove(&self, id: u64) {
        let mut inner = self.inner.lock();
        // A client that was refused is none.
        let Some(place) = inner.tenants.iter().position(|tenant| tenant.id == id) else { return };
        let tenant = inner.tenants.remove(place);
        inner.ending_pages += tenant.reserved_pages();
        self.reclaimer.end(tenant);
    }

    fn monitor(&self) -> Vec<Expelled> {
        let inner = self.inner.lock();
        let failed = inner.tenants.iter().filter_map(|tenant| {
            tenant.failure().map(|reason| Expelled { id: tenant.id, reason: reason.into() })
        });
        failed.collect()
    }

    fn status(&self) -> NodeStatus {
        let inner = self.inner.lock();
        let slab_pages = inner.frames.slab_pages();
        NodeStatus {
            scheme: self.scheme,
            page_count: self.page_count,
            free_pages: self.free_pages(&inner),
            budget_pages: self.budget_pages,
            repairs: 0,
            clients: inner.tenants.iter().map(|tenant| tenant.status(slab_pages)).collect(),
        }
    }
}

/// The device shows the node's state in `terrace stat`.
impl ProgressCallback for Baseline {
    fn advance(&self) -> bool {
        false
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some(("memory_node".into(), serde_json::to_value(self.status()).ok()?))
    }
}

/// Takes the memory of a client back. Returns the client if it still has some.
fn reclaim(inner: &Mutex<Inner>, mut tenant: Tenant) -> Option<Tenant> {
    let memory = inner.lock().frames.memory().clone();
    // Without the lock: other clients are served meanwhile.
    let slabs = tenant.release_all(&memory);
    let (is_done, reserved_pages) = (!tenant.has_slabs(), tenant.reserved_pages());
    // A space that is reserved as a whole ends with its client.
    let left = (!is_done).then_some(tenant);
    let mut inner = inner.lock();
    slabs.into_iter().for_each(|slab| inner.frames.put_back(slab));
    if is_done {
        inner.ending_pages -= reserved_pages;
    }
    left
}

/// The thread that answers messages, which ends when this is dropped.
pub(crate) struct Worker {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub fn start(node: Arc<Baseline>) -> io::Result<Worker> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        rustix::io::ioctl_fionbio(node.channel.fd(), true)?;
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("memory-rpc".into())
            .spawn(move || while wait_for_messages(&node, &stopped) {})?;
        Ok(Worker { stop, thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It fails only if the counter is full, and the thread ends then, too.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported.
            let _ = thread.join();
        }
    }
}

/// Answers messages until none has come for some time, and sleeps until one comes. Returns whether the thread goes on.
fn wait_for_messages(node: &Baseline, stop: &OwnedFd) -> bool {
    let mut last = Instant::now();
    while last.elapsed() < POLL_TIME {
        if node.serve() {
            last = Instant::now();
        }
    }
    node.request_notify();
    // What came before that is not reported.
    if node.serve() {
        return true;
    }
    let mut watched =
        [PollFd::new(stop, PollFlags::IN), PollFd::from_borrowed_fd(node.channel.fd(), PollFlags::IN)];
    // The only error is an interruption; then there is another turn.
    let _ = poll(&mut watched, None);
    while let Ok(cq) = node.channel.get_event() {
        cq.ack_events(1);
    }
    !watched[0].revents().contains(PollFlags::IN)
}
