//! Routes of queue pairs to same-host peers, and what these peers see of a queue pair.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_shm::{DirectAccess, PublishedQueuePair, Rights};
use terrace_transport::{QpState, QpType};

use super::rings::SameHostPeer;
use super::sockets::thread;
use super::{Backings, Carrier, Command, PeerGone, Route};
use crate::device::Device;
use crate::qp::{QpCore, QueuePair};

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
    pub fn on_peer_gone(&self, callback: PeerGone) {
        *self.local.on_peer_gone.write() = Some(callback);
    }

    /// Chooses the route of a newly connected queue pair, and has the thread search for its peer. A queue pair that is
    /// no longer connected loses its route.
    pub(crate) fn note_modified(&self, qp: &QueuePair, core: &mut QpCore) {
        self.publish_queue_pair(qp, core, true);
        let ends = match core.qp.state() {
            QpState::Rts | QpState::Sqd if self.local.is_on() && qp.qp_type() != QpType::Ud => {
                core.qp.attr().path.map(|path| (canonical(path.remote), path.source_gid_index))
            }
            QpState::Reset | QpState::Init => None,
            _ => return,
        };
        // With the same ends the route stays: what is in the ring must not be overtaken.
        if ends != core.nic.local.ends {
            (core.nic.local.ends, core.nic.local.last_asked) = (ends, None);
            self.choose_route(qp, core);
            if let Some((remote, _)) = ends {
                self.local.command(Command::Connect(remote));
            }
        }
    }

    /// Chooses the route anew if the thread has found peers since it was chosen. Only while nothing is in flight: a
    /// change then cannot overtake anything.
    #[inline(always)]
    pub(crate) fn update_route(&self, qp: &QueuePair, core: &mut QpCore) {
        if self.local.is_on() && core.nic.local.generation != self.local.generation.load(Ordering::Acquire) {
            self.approach_route(qp, core);
        }
    }

    /// Chooses the route if nothing is in flight. Otherwise a queue pair whose peer was found stops starting requests,
    /// until nothing is: one that always has some in flight would keep the network's route.
    #[cold]
    #[inline(never)]
    fn approach_route(&self, qp: &QueuePair, core: &mut QpCore) {
        if core.qp.is_idle() {
            return self.choose_route(qp, core);
        }
        if core.nic.local.has_tx_ring() {
            return;
        }
        // Read before the search: a peer that is added behind it makes another generation.
        let generation = self.local.generation.load(Ordering::Acquire);
        let is_known = |(remote, _)| self.local.peers.read().contains_key(&remote);
        match core.nic.local.ends.is_some_and(is_known) {
            true => core.qp.set_draining(true),
            false => {
                // The peer may have been known, and have gone.
                core.qp.set_draining(false);
                core.nic.local.generation = generation;
            }
        }
    }

    /// Chooses a queue pair's route to its peer: direct access and a ring to a process of this host that the thread has
    /// found, the network to all others. While requests are in flight, and the queue pair has lost its route, that is
    /// the network; once none is, [`Device::update_route`] searches again.
    #[cold]
    #[inline(never)]
    pub(crate) fn choose_route(&self, qp: &QueuePair, core: &mut QpCore) {
        if !self.local.is_on() {
            // In a forked child the direct access is the parent's. To drop it takes locks that the parent's other threads
            // may have held.
            core.nic.local.route.packets = Carrier::Udp;
            return;
        }
        let generation = self.local.generation.load(Ordering::Acquire);
        let may_search = core.qp.is_idle();
        core.qp.set_draining(false);
        core.nic.local.generation = if may_search { generation } else { generation.wrapping_sub(1) };
        let before = std::mem::take(&mut core.nic.local.route);
        if may_search && let Some(route) = self.find_route(qp, core, before) {
            core.nic.local.route = route;
            // The question may have gone to a peer that has gone.
            core.nic.local.last_asked = None;
        }
    }

    /// The route to the queue pair's peer, if that is a process of this host.
    fn find_route(&self, qp: &QueuePair, core: &QpCore, before: Route) -> Option<Route> {
        let (remote, gid_index) = core.nic.local.ends?;
        let SameHostPeer { memory, peer_tx } = self.local.peers.read().get(&remote)?.clone();
        let own = self.gids().get(usize::from(gid_index)).map(|gid| gid.addr);
        // The same access to the same process stays: there are not many reader slots.
        let kept = before.direct.filter(|direct| Arc::ptr_eq(direct.peer(), &memory));
        let direct = kept.or_else(|| {
            let own = own.filter(|_| qp.qp_type() == QpType::Rc)?;
            memory.direct_access(address_bytes((own, 0).into()), qp.qpn(), core.qp.attr().dest_qpn)
        });
        Some(Route { direct, packets: Carrier::Ring(peer_tx) })
    }

    /// The direct path into the peer's memory. A path into a process that has gone is dropped: it would keep that
    /// process's memory.
    #[inline(always)]
    pub(super) fn direct<'a>(&self, qp: &QueuePair, core: &'a mut QpCore) -> Option<&'a mut DirectAccess> {
        if core.nic.local.route.direct.as_ref().is_some_and(|direct| direct.peer().is_gone()) {
            self.choose_route(qp, core);
        }
        core.nic.local.route.direct.as_mut()
    }

    /// Publishes a queue pair's present state to same-host peers.
    #[inline]
    pub(crate) fn publish_queue_pair(&self, qp: &QueuePair, core: &mut QpCore, anew: bool) {
        core.nic.local.is_withdrawn &= !anew;
        if self.memory.is_published() && (anew || core.nic.local.published != Some(core.qp.state())) {
            self.publish_queue_pair_now(qp, core);
        }
    }

    #[cold]
    fn publish_queue_pair_now(&self, qp: &QueuePair, core: &mut QpCore) {
        core.nic.local.published = Some(core.qp.state());
        if qp.qp_type() == QpType::Rc {
            self.memory.set_queue_pair(qp.qpn(), published_record(qp, core).as_ref());
        }
    }

    /// Whether a queue pair has its peer at this address.
    pub(super) fn is_remote_of_any(&self, address: SocketAddr) -> bool {
        let is_remote =
            |qp: &Arc<QueuePair>| qp.lock().nic.local.ends.is_some_and(|(remote, _)| remote == address);
        self.table.all().iter().any(is_remote)
    }

    /// Publishes all queue pairs, when the first peer connects. Later each is published as it changes.
    pub(super) fn publish_all_queue_pairs(&self) {
        for qp in self.table.all() {
            let mut core = qp.lock();
            if !core.nic.dead {
                self.publish_queue_pair(&qp, &mut core, false);
            }
        }
    }
}

/// The accesses that peers may make through a queue pair; `None` when it takes no requests.
fn published_record(qp: &QueuePair, core: &QpCore) -> Option<PublishedQueuePair> {
    let attr = core.qp.attr();
    let takes_requests = matches!(attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
    let path = attr.path.filter(|_| takes_requests && !core.nic.dead && !core.nic.local.is_withdrawn)?;
    let mut access = Rights::from_bits_truncate(attr.access);
    if attr.max_dest_rd_atomic == 0 {
        access -= Rights::READ | Rights::ATOMIC;
    }
    let peer = address_bytes(path.remote);
    Some(PublishedQueuePair { pd: qp.pd().handle(), access, dest_qpn: attr.dest_qpn, peer })
}

/// An address in the format of the shared registry.
fn address_bytes(address: SocketAddr) -> [u8; 16] {
    match address.ip().to_canonical() {
        std::net::IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(address) => address.octets(),
    }
}

/// The form of an address by which processes of this host find each other.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
