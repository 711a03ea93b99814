//! The path to same-host peers without packets: `READ`, `WRITE` and atomics access the peer's registered memory
//! directly ([`terrace_memory::shared`]).
//!
//! Every device listens on sockets in the abstract name space, one for each of its addresses, named after address and
//! UDP port. A peer in the same network name space finds them when it connects a queue pair to that address. Both ends
//! check that the other one belongs to the same user. The connecting side sends the segment with its reader slots and
//! gets the other side's shared registry in return. From then on it asks how a region is reached when it first accesses
//! that region. When either end goes away, the kernel closes the socket, and the other end is notified.
//!
//! Everything else goes by packets. Between same-host peers these need no network either, but a ring in memory
//! (`rings`).
//!
//! Discovery is done by one thread, which otherwise sleeps. Work requests use what it has found by then. They use
//! packets until then, and when direct access fails: absent memory, a wrong key, a region that is being changed.

mod message;
mod now;
mod post;
mod rings;
mod thread;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use terrace_memory::shared::{BackedBy, Lead, ShownQueuePair, Version};
use terrace_memory::{Access, HostRange};
use terrace_sync::{ArcMutexGuard, Mutex, RwLock};
use terrace_transport::{QpState, QpType};

use crate::device::Device;
use crate::qp::{QpCore, QueuePair};
use crate::semaphore::Doorbell;

pub(crate) use post::Reached;
pub(crate) use rings::{Filled, PeerRxSet, RxPending};
use rings::{PeerTx, SameHostPeer};

/// Finds the files behind the program's memory.
pub trait Backings: Send + Sync {
    /// The file that holds the bytes of this range and, perhaps, more around it, open for writing if asked for; `None`
    /// if there is no such file. A pager's range is asked for as a whole.
    fn find(&self, range: HostRange, writable: bool) -> Option<BackedBy>;
}

/// Called with the address of a process on this host that has ended, or can no longer be reached directly.
pub type PeerGone = Arc<dyn Fn(SocketAddr) + Send + Sync>;

/// A command to the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    /// Connect to the process that has this address.
    Connect(SocketAddr),
    /// Ask the process at this address how its region is reached.
    Ask(SocketAddr, u32, Version),
    /// Have peers forget a region of this process.
    Recall(u32, Version),
}

/// A device's path to same-host peers.
#[derive(Default)]
pub(crate) struct LocalPath {
    /// Whether the path is in use at all.
    on: AtomicBool,
    stopping: AtomicBool,
    running: Arc<Mutex<Option<Running>>>,
    /// Used by the thread alone, except for forks. Locked before anything else.
    sockets: Arc<Mutex<Option<thread::Sockets>>>,
    commands: Mutex<Vec<Command>>,
    peers: RwLock<HashMap<SocketAddr, SameHostPeer>>,
    /// Own regions that a peer was told to map, with the version that they had.
    given: Mutex<HashMap<u32, Version>>,
    /// Whether there are RX rings, for threads that would have to wait for the receive lock.
    has_inlets: AtomicBool,
    /// Packets received. Changed under the receive lock.
    received: AtomicU64,
    /// Packets sent through the rings of peers that have gone.
    sent_before: AtomicU64,
    /// Packets lost because rings were full and their readers stalled.
    lost: AtomicU64,
    /// Incremented for each new peer, so that queue pairs search again.
    generation: AtomicU32,
    backings: RwLock<Option<Arc<dyn Backings>>>,
    on_peer_gone: RwLock<Option<PeerGone>>,
}

struct Running {
    doorbell: Arc<Doorbell>,
    thread: JoinHandle<()>,
}

/// The locked sockets and handle of the thread.
pub(crate) struct Held {
    sockets: ArcMutexGuard<Option<thread::Sockets>>,
    running: ArcMutexGuard<Option<Running>>,
}

/// A queue pair's part of the local path.
#[derive(Default)]
pub(crate) struct QpLocal {
    /// The peer's address and the own GID index between which it looks for paths.
    ends: Option<(SocketAddr, u8)>,
    lead: Option<Lead>,
    peer_tx: Option<Arc<PeerTx>>,
    /// The generation of peers in which it last searched for its own.
    looked: u32,
    /// The region it has asked about last.
    asked: Option<(u32, Version)>,
    /// The state that is published to peers.
    shown: Option<QpState>,
    /// Whether it stays unpublished until it is modified.
    is_withdrawn: bool,
}

impl QpLocal {
    /// Whether packets go through a ring.
    #[inline]
    pub fn has_tx_ring(&self) -> bool {
        self.peer_tx.is_some()
    }

    /// Notes that peers are to see it no more. False if they did not.
    pub fn withdraw(&mut self) -> bool {
        let was_shown = self.shown.is_some();
        self.is_withdrawn = true;
        was_shown
    }

    /// The direct path into the peer's memory. A path into a process that has gone is dropped: it would keep that
    /// process's memory.
    #[inline(always)]
    fn lead(&mut self) -> Option<&mut Lead> {
        match &self.lead {
            Some(lead) if lead.reach().is_gone() => self.give_up_lead(),
            _ => {}
        }
        self.lead.as_mut()
    }

    #[cold]
    #[inline(never)]
    fn give_up_lead(&mut self) {
        self.lead = None;
    }
}

impl LocalPath {
    /// Whether work requests may use direct access.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Sets what finds the files behind the program's memory, from now on.
    pub fn set_backings(&self, backings: Arc<dyn Backings>) {
        *self.backings.write() = Some(backings);
    }

    /// Reports peers that have gone. Called without locks held.
    fn tell_gone(&self, gone: Vec<SocketAddr>) {
        let Some(hear) = self.on_peer_gone.read().clone() else { return };
        gone.into_iter().for_each(|address| hear(address));
    }

    /// The counters: none if the path is off.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        if !self.is_on() {
            return Vec::new();
        }
        let received = self.received.load(Ordering::Relaxed);
        let peers = self.peers.read();
        let sent: u64 = peers.values().map(|peer| peer.peer_tx.sent()).sum();
        let sent = sent + self.sent_before.load(Ordering::Relaxed);
        let lost = self.lost.load(Ordering::Relaxed);
        vec![
            ("peers", peers.len() as u64),
            ("packets_sent", sent),
            ("packets_received", received),
            ("packets_lost", lost),
        ]
    }

    /// Removes a peer that has gone.
    fn remove(&self, address: &SocketAddr) {
        if let Some(peer) = self.peers.write().remove(address) {
            self.sent_before.fetch_add(peer.peer_tx.sent(), Ordering::Relaxed);
        }
    }

    fn is_stopped(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn command(&self, command: Command) {
        self.commands.lock().push(command);
        if let Some(running) = &*self.running.lock() {
            running.doorbell.ring();
        }
    }

    /// A region was invalidated or changed: peers that have mapped it are told to drop the mapping. Nothing waits for
    /// them; a stopped peer keeps the memory until it runs again.
    pub fn recall(&self, key: u32) {
        if self.is_on() {
            let given = self.given.lock().remove(&key);
            given.into_iter().for_each(|version| self.command(Command::Recall(key, version)));
        }
    }

    /// Ends the thread and waits for it: afterwards no peer reaches this process.
    pub fn stop(&self) {
        self.on.store(false, Ordering::SeqCst);
        self.stopping.store(true, Ordering::SeqCst);
        let Some(Running { doorbell, thread }) = self.running.lock().take() else { return };
        doorbell.ring();
        // It can only have panicked, which is in the log.
        let _ = thread.join();
        *self.sockets.lock() = None;
        self.peers.write().clear();
    }

    /// Keeps the thread from working while the process forks.
    pub fn hold(&self) -> Held {
        let sockets = self.sockets.lock_arc();
        // A program's thread that queues a command rings the doorbell, with no other lock than a queue pair's.
        Held { sockets, running: self.running.lock_arc() }
    }

    /// In a forked child: thread, reader slots and shared registry are the parent's. Everything goes by the network.
    pub fn forget(&self, mut held: Held) {
        self.on.store(false, Ordering::SeqCst);
        self.has_inlets.store(false, Ordering::SeqCst);
        if let Some(sockets) = held.sockets.take() {
            sockets.close_in_child();
        }
        std::mem::forget(held.running.take());
    }
}

impl Device {
    /// Opens the path to same-host peers. Packets do without it, so failure is no error.
    pub(crate) fn start_local_path(self: &Arc<Self>) {
        match thread::start(self) {
            Ok(running) => {
                *self.local.running.lock() = Some(running);
                self.local.on.store(true, Ordering::SeqCst);
            }
            Err(error) => tracing::warn!(%error, "peers on this host are reached by packets only"),
        }
    }

    /// Sets what finds the files behind the program's memory: same-host peers then reach regions over files fastest.
    pub fn set_backings(&self, backings: Arc<dyn Backings>) {
        self.local.set_backings(backings);
    }

    /// Sets the callback for peers on this host that have gone, from now on.
    pub fn on_peer_gone(&self, hear: PeerGone) {
        *self.local.on_peer_gone.write() = Some(hear);
    }

    /// Searches for the peer of a newly connected queue pair, and drops the peer of a queue pair that is no longer
    /// connected.
    pub(crate) fn note_modified(&self, qp: &QueuePair, core: &mut QpCore) {
        self.show(qp, core, true);
        match core.qp.state() {
            QpState::Rts | QpState::Sqd if self.local.is_on() && qp.qp_type() != QpType::Ud => {
                let ends = core.qp.attr().path.map(|path| (canonical(path.remote), path.source_gid_index));
                // With the same ends the paths stay: what is in the ring must not be overtaken.
                if let Some((remote, _)) = ends
                    && ends != core.local.ends
                {
                    // If the peer is connected already, the queue pair finds it when it next has something to do.
                    let before = self.local.generation.load(Ordering::Acquire).wrapping_sub(1);
                    let shown = core.local.shown;
                    core.local = QpLocal { ends, looked: before, shown, ..QpLocal::default() };
                    self.local.command(Command::Connect(remote));
                }
            }
            QpState::Reset | QpState::Init => {
                (core.local.ends, core.local.lead, core.local.peer_tx) = (None, None, None);
            }
            _ => {}
        }
    }

    /// Finds the paths to a queue pair's peer that the thread has opened since the last time. Only while nothing is
    /// outstanding: a change of path then cannot overtake anything.
    #[inline(always)]
    pub(crate) fn meet(&self, qp: &QueuePair, core: &mut QpCore) {
        if self.local.is_on()
            && core.local.looked != self.local.generation.load(Ordering::Acquire)
            && core.qp.is_quiet()
        {
            self.find_same_host_peer(qp, core);
        }
    }

    #[cold]
    fn find_same_host_peer(&self, qp: &QueuePair, core: &mut QpCore) {
        core.local.looked = self.local.generation.load(Ordering::Acquire);
        let attr = core.qp.attr();
        let Some(path) = attr.path.filter(|_| qp.qp_type() != QpType::Ud) else { return };
        let peers = self.local.peers.read();
        let Some(same_host_peer) = peers.get(&canonical(path.remote)) else { return };
        let own = self.gids().get(usize::from(path.source_gid_index)).map(|gid| gid.addr);
        let has_lead = core.local.lead.as_ref().is_some_and(|lead| !lead.reach().is_gone());
        if let (QpType::Rc, Some(own), false) = (qp.qp_type(), own, has_lead) {
            let own = address_bytes((own, 0).into());
            core.local.lead = same_host_peer.reach.lead(own, qp.qpn(), attr.dest_qpn);
        }
        core.local.peer_tx = Some(same_host_peer.peer_tx.clone());
    }

    /// Publishes a queue pair's present state to same-host peers.
    #[inline]
    pub(crate) fn show(&self, qp: &QueuePair, core: &mut QpCore, anew: bool) {
        core.local.is_withdrawn &= !anew;
        if self.memory.is_shown() && (anew || core.local.shown != Some(core.qp.state())) {
            self.show_now(qp, core);
        }
    }

    #[cold]
    fn show_now(&self, qp: &QueuePair, core: &mut QpCore) {
        core.local.shown = Some(core.qp.state());
        if qp.qp_type() == QpType::Rc {
            self.memory.set_queue_pair(qp.qpn(), shown(qp, core).as_ref());
        }
    }

    /// Publishes all queue pairs, when the first peer connects.
    fn show_all(&self) {
        for qp in self.table.all() {
            let mut core = qp.lock();
            if !core.dead {
                self.show(&qp, &mut core, true);
            }
        }
    }
}

/// The accesses that peers may make through a queue pair; `None` when it takes no requests.
fn shown(qp: &QueuePair, core: &QpCore) -> Option<ShownQueuePair> {
    let attr = core.qp.attr();
    let takes_requests = matches!(attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
    let path = attr.path.filter(|_| takes_requests && !core.dead && !core.local.is_withdrawn)?;
    let mut access = Access::from_bits_truncate(attr.access);
    if attr.max_dest_rd_atomic == 0 {
        access -= Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    }
    let peer = address_bytes(path.remote);
    Some(ShownQueuePair { pd: qp.pd().handle(), access, dest_qpn: attr.dest_qpn, peer })
}

/// An address in the format of the shared registry.
fn address_bytes(address: SocketAddr) -> [u8; 16] {
    match address.ip().to_canonical() {
        std::net::IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(address) => address.octets(),
    }
}

/// The form of an address by which processes of this host find each other.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
