//! The path to same-host peers without packets: `READ`, `WRITE` and atomics access the peer's registered memory
//! directly ([`terrace_shm`]).
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
pub(crate) mod rings;
mod route;
mod sockets;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use terrace_hostmem::HostRange;
use terrace_shm::{BackedBy, DirectAccess, Version};
use terrace_sync::{ArcMutexGuard, Mutex, RwLock};
use terrace_transport::QpState;

use crate::semaphore::Doorbell;

pub(crate) use rings::{Filled, PeerRxSet, RxPending};
use rings::{PeerTx, SameHostPeer};
pub(crate) use sockets::Sockets;

/// Finds the files behind the program's memory.
pub trait Backings: Send + Sync {
    /// The file that holds the bytes of this range and, perhaps, more around it, open for writing if asked for; `None`
    /// if there is no such file. A pager's range is asked for as a whole.
    ///
    /// # Errors
    /// When descriptors or memory are lacking: the caller tries again later.
    fn find(&self, range: HostRange, writable: bool) -> io::Result<Option<BackedBy>>;
}

/// Called with the address of a process on this host that has ended, or can no longer be reached directly.
pub type PeerGone = Arc<dyn Fn(SocketAddr) + Send + Sync>;

/// A command to the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Command {
    /// Connect to the process that has this address.
    Connect(SocketAddr),
    /// Ask the process at this address how its region is reached.
    Ask(SocketAddr, u32, Version),
    /// Have peers forget what they may have mapped of a region of this process that has ended or changed.
    Recall(u32),
}

/// A device's path to same-host peers.
#[derive(Default)]
pub(crate) struct LocalPath {
    /// Whether the path is in use at all.
    on: AtomicBool,
    stopping: AtomicBool,
    running: Arc<Mutex<Option<Running>>>,
    /// Used by the thread alone, except for forks. Locked before anything else.
    sockets: Arc<Mutex<Option<Sockets>>>,
    commands: Mutex<Vec<Command>>,
    peers: RwLock<HashMap<SocketAddr, SameHostPeer>>,
    /// Keys of own regions that a peer may have mapped. Only the thread changes it.
    shared: Mutex<HashSet<u32>>,
    /// Whether there are RX rings, for threads that would have to wait for the receive lock.
    has_rx_rings: AtomicBool,
    /// Threads that poll, so that peers need not wake the engine.
    pollers: AtomicU32,
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
pub(crate) struct ForkLock {
    sockets: ArcMutexGuard<Option<Sockets>>,
    running: ArcMutexGuard<Option<Running>>,
}

/// The route of a queue pair's work requests to its peer: `choose_route` alone changes it.
#[derive(Default)]
pub(crate) struct Route {
    /// Direct access to the peer's memory, for one-sided requests that find the send queue empty.
    direct: Option<DirectAccess>,
    /// The carrier of everything else.
    pub packets: Carrier,
}

/// What carries packets.
#[derive(Default)]
pub(crate) enum Carrier {
    /// The network.
    #[default]
    Udp,
    /// The peer's ring.
    Ring(Arc<PeerTx>),
}

/// A queue pair's part of the local path.
#[derive(Default)]
pub(crate) struct QpLocal {
    pub route: Route,
    /// The peer's address and the own GID index between which the route was chosen.
    ends: Option<(SocketAddr, u8)>,
    /// The generation of peers in which the route was chosen.
    generation: u32,
    /// The region it has asked about last.
    last_asked: Option<(u32, Version)>,
    /// The state that is published to peers.
    published: Option<QpState>,
    /// Whether it stays unpublished until it is modified.
    is_withdrawn: bool,
}

impl QpLocal {
    /// Whether packets go through a ring.
    #[inline]
    pub fn has_tx_ring(&self) -> bool {
        matches!(self.route.packets, Carrier::Ring(_))
    }

    /// Whether direct access to this region of the peer, which was accessed last, is by the kernel.
    #[inline]
    pub fn copies_by_kernel(&self, rkey: u32) -> bool {
        self.route.direct.as_ref().is_some_and(|direct| direct.copies_by_kernel(rkey))
    }

    /// Whether the published state lets peers access memory.
    pub fn serves_peers(&self) -> bool {
        matches!(self.published, Some(QpState::Rtr | QpState::Rts | QpState::Sqd))
    }

    /// Notes that peers are to see it no more. False if they did not.
    pub fn withdraw(&mut self) -> bool {
        let was_published = self.published.is_some();
        self.is_withdrawn = true;
        was_published
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
    fn report_gone(&self, gone: Vec<SocketAddr>) {
        let Some(callback) = self.on_peer_gone.read().clone() else { return };
        gone.into_iter().for_each(|address| callback(address));
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

    /// A region was invalidated or changed: peers that have mapped it get a message to drop the mapping. Nothing waits
    /// for them; a stopped peer keeps the memory until it runs again.
    pub fn recall(&self, key: u32) {
        if self.is_on() && self.shared.lock().contains(&key) {
            self.command(Command::Recall(key));
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
    pub fn lock_sockets(&self) -> ArcMutexGuard<Option<Sockets>> {
        self.sockets.lock_arc()
    }

    /// Keeps other threads from ringing the thread's doorbell, too: a thread that queues a command does so, with the locks of a
    /// queue pair and of the progress callbacks.
    pub fn lock_for_fork(&self, sockets: ArcMutexGuard<Option<Sockets>>) -> ForkLock {
        ForkLock { sockets, running: self.running.lock_arc() }
    }

    /// In a forked child: thread, reader slots and shared registry are the parent's. Everything goes by the network.
    pub fn forget(&self, mut lock: ForkLock) {
        self.on.store(false, Ordering::SeqCst);
        self.has_rx_rings.store(false, Ordering::SeqCst);
        if let Some(sockets) = lock.sockets.take() {
            sockets.close_in_child();
        }
        std::mem::forget(lock.running.take());
    }
}
