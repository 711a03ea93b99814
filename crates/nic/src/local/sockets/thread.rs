//! The thread that connects to same-host peers, and accepts their connections.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use terrace_shm::{ReaderSlots, RingFile, Version};
use terrace_sync::without_signals;

use super::later::Later;
use super::{Peer, PeerSocket, Sockets, Unsent};
use crate::device::Device;
use crate::error::Error;
use crate::local::message::{self, LAYOUT, Message};
use crate::local::rings::SameHostPeer;
use crate::local::{Command, Running};
use crate::semaphore::Doorbell;
use crate::unix_socket::{self, Spare, unwatch, watch};

/// The service that the sockets are named after.
const SERVICE: &str = "reach";
/// Peers that may access this process's memory at a time. Each costs two descriptors.
const READERS_MAX: usize = 256;

/// Opens the sockets, and starts the thread.
pub(in crate::local) fn start(device: &Arc<Device>) -> Result<Running, Error> {
    let waits = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
    let doorbell = Arc::new(Doorbell::new()?);
    watch(&waits, doorbell.fd())?;
    let listeners = unix_socket::listen_at(SERVICE, device.gids(), device.port.udp_port(), &waits)?;
    let sockets = Sockets {
        waits: waits.clone(),
        listeners,
        spare: Spare::new(),
        readers: Vec::new(),
        accepted_count: 0,
        peers: Vec::new(),
        later: Later::default(),
        gone: Vec::new(),
    };
    *device.local.sockets.lock() = Some(sockets);
    let thread = {
        let (device, doorbell) = (device.clone(), doorbell.clone());
        without_signals(|| {
            let builder = std::thread::Builder::new().name("terrace-local".into());
            builder.spawn(move || run(&device, &doorbell, &waits))
        })
    };
    match thread {
        Ok(thread) => Ok(Running { doorbell, thread }),
        Err(error) => {
            // Peers would connect, and wait.
            *device.local.sockets.lock() = None;
            Err(Error::System(error.raw_os_error().unwrap_or(0)))
        }
    }
}

/// The thread: it holds no lock while it sleeps.
fn run(device: &Arc<Device>, doorbell: &Doorbell, waits: &OwnedFd) {
    let (mut events, mut until_next) = (Vec::with_capacity(1), None);
    loop {
        // The only error is an interruption; then all sockets are checked.
        let _ = epoll::wait(waits, spare_capacity(&mut events), until_next.as_ref());
        events.clear();
        doorbell.silence();
        let mut held = device.local.sockets.lock();
        let Some(sockets) = held.as_mut() else { return };
        if device.local.is_stopped() {
            return sockets.note_all_gone();
        }
        sockets.handle_commands(device);
        // From the end, so that a removal does not move those still to come.
        (0..sockets.peers.len()).rev().for_each(|index| sockets.receive_answers(device, index));
        (0..sockets.readers.len()).rev().for_each(|index| sockets.receive_requests(device, index));
        (0..sockets.listeners.len()).for_each(|index| sockets.accept(index));
        until_next = sockets.until_next();
        let gone = std::mem::take(&mut sockets.gone);
        drop(held);
        device.local.report_gone(gone);
    }
}

/// The process at the other end, if it belongs to the same user and this process can see it.
pub(super) fn check_peer(socket: &OwnedFd) -> Option<i32> {
    let peer = unix_socket::peer_of(socket)?;
    let pid = peer.pid?.as_raw_pid();
    (peer.uid == rustix::process::geteuid()).then_some(pid)
}

impl Sockets {
    fn note_all_gone(&self) {
        self.peers.iter().filter_map(|peer| peer.same_host_peer.as_ref()).for_each(SameHostPeer::note_gone);
    }

    /// How long the thread sleeps if nothing comes. `None`: for ever.
    fn until_next(&self) -> Option<Timespec> {
        let until_next = self.later.until_next(Instant::now())?;
        // A longest delay has few seconds.
        Timespec::try_from(until_next).ok()
    }

    fn handle_commands(&mut self, device: &Device) {
        let now = Instant::now();
        let commands = std::mem::take(&mut *device.local.commands.lock());
        let commands = commands.into_iter().map(|command| (command, None));
        let due = self.later.take_due(now).into_iter().map(|(command, delay)| (command, Some(delay)));
        for (command, delay) in commands.chain(due) {
            let is_due_again = match command {
                Command::Connect(address) => self.connect(device, address, delay),
                // Another queue pair accesses a region that is going to be asked for again.
                Command::Ask(..) if delay.is_none() && self.later.contains(&command) => false,
                Command::Ask(address, key, version) => self.ask(address, key, version),
                Command::Recall(key) => {
                    self.recall(device, key);
                    false
                }
            };
            if is_due_again {
                self.later.add(command, delay, now);
            }
        }
    }

    /// True if the connection has to be tried again.
    fn connect(&mut self, device: &Device, address: SocketAddr, delay: Option<Duration>) -> bool {
        // A peer at this address that has gone is noticed at its socket, and then this is tried again.
        let is_needed = delay.is_none() || device.is_remote_of_any(address);
        if !is_needed || self.peers.iter().any(|peer| peer.address == address) {
            return false;
        }
        match self.try_connect(address, delay) {
            Ok(peer) => self.peers.push(peer),
            // No socket of that name: another host, or a process without this path.
            Err(Errno::CONNREFUSED) => {}
            Err(error) => {
                tracing::debug!(%error, %address, "a peer on this host cannot be asked");
                return error != Errno::PERM;
            }
        }
        false
    }

    fn try_connect(&self, address: SocketAddr, delay: Option<Duration>) -> Result<Peer, Errno> {
        let socket = unix_socket::connect_to(SERVICE, address)?;
        let pid = check_peer(&socket).ok_or(Errno::PERM)?;
        let reader_slots = ReaderSlots::new().map_err(|_| Errno::MFILE)?;
        let ring = RingFile::new().map_err(|_| Errno::MFILE)?;
        message::send(&socket, &Message::Hello { layout: LAYOUT }, &[reader_slots.file(), ring.file()])?;
        watch(&self.waits, socket.as_fd())?;
        Ok(Peer {
            socket,
            address,
            pid,
            reader_slots,
            delay,
            ring: Some(ring),
            lacking: HashMap::new(),
            same_host_peer: None,
        })
    }

    /// True if the question did not fit into the peer's socket.
    fn ask(&self, address: SocketAddr, key: u32, version: Version) -> bool {
        let ask = Message::Ask { key, version: version.0 };
        let peer = self.peers.iter().find(|peer| peer.address == address);
        // A peer that has gone is noticed at its socket.
        peer.is_some_and(|peer| message::send(&peer.socket, &ask, &[]) == Err(Errno::AGAIN))
    }

    /// Has peers forget the versions of a region that are no more.
    fn recall(&mut self, device: &Device, key: u32) {
        let current = device.memory.region_version(key);
        let mut is_mapped = false;
        for PeerSocket { may_map, unsent, .. } in &mut self.readers {
            let Some(&version) = may_map.get(&key) else { continue };
            if Some(version) == current {
                is_mapped = true;
            } else {
                may_map.remove(&key);
                // Sent when the peer is read next.
                unsent.ended.push((key, version));
            }
        }
        if !is_mapped {
            device.local.shared.lock().remove(&key);
        }
    }

    fn receive_answers(&mut self, device: &Arc<Device>, index: usize) {
        loop {
            let peer = &mut self.peers[index];
            let handled = match message::receive(&peer.socket) {
                Ok(Some(received)) => peer.handle(device, received, &mut self.later),
                Err(Errno::AGAIN | Errno::INTR) => return,
                _ => None,
            };
            if handled.is_none() {
                let peer = self.peers.remove(index);
                unwatch(&self.waits, peer.socket.as_fd());
                // It may live: a descriptor was missing, or it had no room. Or another process has its address by now.
                self.later.add(Command::Connect(peer.address), peer.delay, Instant::now());
                device.local.remove(&peer.address);
                if let Some(same_host_peer) = peer.same_host_peer {
                    self.gone.push(peer.address);
                    same_host_peer.note_gone();
                }
                return;
            }
        }
    }

    fn accept(&mut self, index: usize) {
        let Sockets { waits, listeners, spare, readers, accepted_count, .. } = self;
        let (gid_index, listener) = &listeners[index];
        unix_socket::accept_waiting(listener, spare, |socket| {
            let is_welcome = check_peer(&socket).is_some() && readers.len() < READERS_MAX;
            if is_welcome && watch(waits, socket.as_fd()).is_ok() {
                let (gid_index, number) = (*gid_index, *accepted_count);
                *accepted_count += 1;
                let (may_map, unsent) = (HashMap::new(), Unsent::default());
                readers.push(PeerSocket { socket, may_map, unsent, gid_index, number, readers: None });
            }
        });
    }

    fn receive_requests(&mut self, device: &Arc<Device>, index: usize) {
        loop {
            let peer_socket = &mut self.readers[index];
            let sent = peer_socket.send_unsent(device);
            let waits_for_room = sent == Err(Errno::AGAIN);
            let handled = match sent.and_then(|()| message::receive(&peer_socket.socket)) {
                Ok(Some(received)) => peer_socket.handle(device, received),
                Err(Errno::AGAIN | Errno::INTR) => {
                    match peer_socket.watch_for_room(&self.waits, waits_for_room) {
                        Ok(()) => return,
                        Err(_) => None,
                    }
                }
                _ => None,
            };
            if handled.is_none() {
                let PeerSocket { socket, number, readers, .. } = self.readers.remove(index);
                unwatch(&self.waits, socket.as_fd());
                // First: other threads may wait for this peer's readers, and this thread would wait for those threads.
                drop(readers);
                return device.end_peer_rx(number);
            }
        }
    }
}
