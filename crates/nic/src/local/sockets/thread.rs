//! The thread that connects to same-host peers, and accepts their connections.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::io::Errno;
use terrace_hostmem::HostRange;
use terrace_memory::{PeerTables, RegionMemory, SharedFile};
use terrace_shm::{
    BackedBy, Cached, FrameTables, Framed, Frames, Mapped, MappedFile, PeerMemory, PeerReaders, ReaderSlots,
    RingFile, RxRing, Source, TxRing, Version,
};

use super::{Peer, PeerSocket, Sockets, Unsent};
use crate::device::Device;
use crate::error::Error;
use crate::local::message::{self, LAYOUT, Message, Received, RegionPath};
use crate::local::rings::{PeerTx, SameHostPeer};
use crate::local::{Command, Running};
use crate::semaphore::Doorbell;
use crate::signals::without_signals;
use crate::unix_socket::{self, Spare, unwatch, watch};

/// The service that the sockets are named after.
const SERVICE: &str = "reach";
/// Peers that may access this process's memory at a time. Each costs two descriptors.
const READERS_MAX: usize = 256;

/// Opens the sockets, and starts the thread.
pub(in crate::local) fn start(device: &Arc<Device>) -> Result<Running, Error> {
    let port = device.port.udp_port();
    let waits = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
    let doorbell = Arc::new(Doorbell::new()?);
    watch(&waits, doorbell.fd())?;
    let mut listeners = Vec::new();
    for gid in device.gids() {
        let listener = unix_socket::listen_as(SERVICE, SocketAddr::new(gid.addr.to_canonical(), port))?;
        watch(&waits, listener.as_fd())?;
        listeners.push(listener);
    }
    let sockets = Sockets {
        waits: waits.clone(),
        listeners,
        spare: Spare::new(),
        readers: Vec::new(),
        accepted_count: 0,
        peers: Vec::new(),
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
    let thread = thread.map_err(|error| Error::System(error.raw_os_error().unwrap_or(0)))?;
    Ok(Running { doorbell, thread })
}

/// The thread: it holds no lock while it sleeps.
fn run(device: &Arc<Device>, doorbell: &Doorbell, waits: &OwnedFd) {
    let mut events = Vec::with_capacity(1);
    loop {
        // The only error is an interruption; then all sockets are checked.
        let _ = epoll::wait(waits, spare_capacity(&mut events), None);
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
        let gone = std::mem::take(&mut sockets.gone);
        drop(held);
        device.local.report_gone(gone);
    }
}

/// The process at the other end, if it belongs to the same user and this process can see it.
fn check_peer(socket: &OwnedFd) -> Option<i32> {
    let peer = unix_socket::peer_of(socket)?;
    let pid = peer.pid.as_raw_nonzero().get();
    (peer.uid == rustix::process::geteuid() && pid > 0).then_some(pid)
}

impl Sockets {
    fn note_all_gone(&self) {
        self.peers.iter().filter_map(|peer| peer.same_host_peer.as_ref()).for_each(SameHostPeer::note_gone);
    }

    fn handle_commands(&mut self, device: &Device) {
        let commands = std::mem::take(&mut *device.local.commands.lock());
        for command in commands {
            match command {
                Command::Connect(address) => self.connect(address),
                Command::Ask(address, key, version) => {
                    let ask = Message::Ask { key, version: version.0 };
                    if let Some(peer) = self.peers.iter().find(|peer| peer.address == address) {
                        // A peer that has gone is noticed at its socket.
                        let _ = message::send(&peer.socket, &ask, &[]);
                    }
                }
                Command::Recall(key, version) => {
                    // Sent when the peer is read next.
                    for PeerSocket { may_map, unsent, .. } in &mut self.readers {
                        unsent.ended.extend(may_map.take(&(key, version)));
                    }
                }
            }
        }
    }

    fn connect(&mut self, address: SocketAddr) {
        if self.peers.iter().any(|peer| peer.address == address) {
            return;
        }
        match self.try_connect(address) {
            Ok(peer) => self.peers.push(peer),
            // No socket of that name: another host, or a process without this path.
            Err(Errno::CONNREFUSED) => {}
            Err(error) => tracing::debug!(%error, %address, "a peer on this host cannot be asked"),
        }
    }

    fn try_connect(&self, address: SocketAddr) -> Result<Peer, Errno> {
        let socket = unix_socket::connect_to(SERVICE, address)?;
        let pid = check_peer(&socket).ok_or(Errno::PERM)?;
        let reader_slots = ReaderSlots::new().map_err(|_| Errno::MFILE)?;
        let ring = RingFile::new().map_err(|_| Errno::MFILE)?;
        message::send(&socket, &Message::Hello { layout: LAYOUT }, &[reader_slots.file(), ring.file()])?;
        watch(&self.waits, socket.as_fd())?;
        Ok(Peer { socket, address, pid, reader_slots, ring: Some(ring), same_host_peer: None })
    }

    fn receive_answers(&mut self, device: &Arc<Device>, index: usize) {
        loop {
            let peer = &mut self.peers[index];
            let handled = match message::receive(&peer.socket) {
                Ok(Some(received)) => peer.handle(device, received),
                Err(Errno::AGAIN | Errno::INTR) => return,
                _ => None,
            };
            if handled.is_none() {
                let peer = self.peers.remove(index);
                unwatch(&self.waits, peer.socket.as_fd());
                device.local.remove(&peer.address);
                self.gone.push(peer.address);
                if let Some(same_host_peer) = peer.same_host_peer {
                    same_host_peer.note_gone();
                }
                return;
            }
        }
    }

    fn accept(&mut self, index: usize) {
        while let Some(socket) = unix_socket::accept(&self.listeners[index], &self.spare) {
            let is_welcome = check_peer(&socket).is_some() && self.readers.len() < READERS_MAX;
            if is_welcome && watch(&self.waits, socket.as_fd()).is_ok() {
                let (gid_index, number) = (index as u8, self.accepted_count);
                self.accepted_count += 1;
                let (may_map, unsent) = (HashSet::new(), Unsent::default());
                self.readers.push(PeerSocket { socket, may_map, unsent, gid_index, number, readers: None });
            }
        }
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

impl PeerSocket {
    /// `None` ends the connection.
    fn handle(&mut self, device: &Arc<Device>, (message, mut files): Received) -> Option<()> {
        match message {
            Message::Hello { layout: LAYOUT } if self.readers.is_none() => {
                let rx_ring = RxRing::new(files.pop()?).ok()?;
                // Before the peer gets access to anything.
                let pid = check_peer(&self.socket)?;
                self.readers = Some(PeerReaders::admit(files.pop()?, pid).ok()?);
                let published = device.memory.publish();
                let registry =
                    published.inspect_err(|error| tracing::warn!(%error, "no shared registry")).ok()?;
                device.publish_all_queue_pairs();
                let consumer_page = rx_ring.consumer_page().try_clone_to_owned().ok()?;
                device.add_peer_rx(self.number, rx_ring, self.gid_index);
                let doorbell = device.engine.doorbell();
                // The engine may be about to sleep without having announced it in the new ring.
                doorbell.ring();
                let files = [registry, consumer_page.as_fd(), doorbell.fd()];
                message::send(&self.socket, &Message::Welcome, &files).ok()
            }
            Message::Ask { key, version } if self.readers.is_some() => {
                self.unsent.question = Some((key, Version(version)));
                Some(())
            }
            _ => None,
        }
    }

    /// Sends what is unsent.
    ///
    /// # Errors
    /// `AGAIN` when there is no space for all of it; otherwise the peer has gone.
    fn send_unsent(&mut self, device: &Device) -> Result<(), Errno> {
        while let Some(&(key, version)) = self.unsent.ended.last() {
            message::send(&self.socket, &Message::Forget { key, version: version.0 }, &[])?;
            self.unsent.ended.pop();
        }
        if let Some((key, version)) = self.unsent.question {
            self.answer(device, key, version)?;
            self.unsent.question = None;
        }
        Ok(())
    }

    /// Has the thread woken when the socket has space, or when there is a message to be read.
    fn watch_for_room(&mut self, waits: &OwnedFd, for_room: bool) -> Result<(), Errno> {
        if self.unsent.waits_for_room != for_room {
            let event = if for_room { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            epoll::modify(waits, &self.socket, epoll::EventData::new_u64(0), event)?;
            self.unsent.waits_for_room = for_room;
        }
        Ok(())
    }

    fn answer(&mut self, device: &Device, key: u32, version: Version) -> Result<(), Errno> {
        let mut memory = device.memory.memory_of(key, version);
        let file = memory.as_ref().and_then(RegionMemory::shared_file);
        let backed = match &file {
            None => memory.as_ref().and_then(|memory| find_backing(device, memory)),
            Some(_) => None,
        };
        let is_framed = memory.as_ref().is_some_and(RegionMemory::is_framed);
        if backed.is_some() || is_framed || file.is_some() {
            device.local.shared.lock().insert(key, version);
            // Invalidation removes the region before it reads `shared`. If it read `shared` before this insertion, the
            // region is gone by now.
            memory = device.memory.memory_of(key, version);
            if memory.is_none() {
                device.local.shared.lock().remove(&key);
            }
        }
        let tables = memory.as_ref().and_then(|memory| memory.pager.as_ref()?.translation().peer_tables());
        let answer = |path| Message::Answer { key, version: version.0, path };
        if let (Some(SharedFile { file, range, lengths, number }), Some(_)) = (&file, &memory) {
            let path = RegionPath::File { number: *number, addr: range.addr, len: range.len };
            message::send(&self.socket, &answer(path), &[file.as_fd(), lengths.file()])?;
            self.may_map.insert((key, version));
            return Ok(());
        }
        if let Some(PeerTables::Frames { entries, counters, hits, pool, pool_to_read, offset, count }) =
            tables
            && let Some(memory) = &memory
        {
            let HostRange { addr, len } = memory.range_of_pager();
            let path = RegionPath::Framed { offset, count, addr, len };
            let pool = if memory.is_writable { pool } else { pool_to_read };
            message::send(&self.socket, &answer(path), &[pool, entries, counters, hits])?;
            self.may_map.insert((key, version));
            return Ok(());
        }
        match (&backed, &memory) {
            (Some(backed), Some(memory)) => {
                let (offset, HostRange { addr, len }) = (backed.offset, backed.range);
                match (&memory.pager, tables) {
                    (None, _) => {
                        let path = RegionPath::Mapped { offset, addr, len };
                        message::send(&self.socket, &answer(path), &[backed.file.as_fd()])?;
                    }
                    (Some(_), Some(PeerTables::Cached { entries, counters, count, is_swap_file })) => {
                        let path = RegionPath::Cached { offset, count, is_swap_file, addr, len };
                        message::send(
                            &self.socket,
                            &answer(path),
                            &[backed.file.as_fd(), entries, counters],
                        )?;
                    }
                    (Some(_), _) => return message::send(&self.socket, &answer(RegionPath::Packets), &[]),
                }
                self.may_map.insert((key, version));
                Ok(())
            }
            (None, Some(memory)) if memory.pager.is_none() => {
                message::send(&self.socket, &answer(RegionPath::Process), &[])
            }
            _ => message::send(&self.socket, &answer(RegionPath::Packets), &[]),
        }
    }
}

/// The file behind a region; of a paged region, behind its pager's whole range.
fn find_backing(device: &Device, memory: &RegionMemory) -> Option<BackedBy> {
    let wanted = memory.range_of_pager();
    let backings = device.local.backings.read().clone()?;
    let backed = backings.find(wanted, memory.is_writable)?;
    let covers = backed.range.addr <= wanted.addr
        && backed.range.len >= wanted.len
        && wanted.addr - backed.range.addr <= backed.range.len - wanted.len;
    let fits = covers && (memory.pager.is_none() || backed.range == wanted);
    fits.then_some(backed)
}

impl Peer {
    /// `None` for a protocol violation.
    fn handle(&mut self, device: &Device, (message, files): Received) -> Option<()> {
        match message {
            Message::Welcome if self.same_host_peer.is_none() => {
                let mut files = files.into_iter();
                let (registry, consumer_page, doorbell) = (files.next()?, files.next()?, files.next()?);
                let memory = PeerMemory::new(registry, self.reader_slots.clone(), self.pid).ok()?;
                let tx_ring = TxRing::new(self.ring.take()?, consumer_page).ok()?;
                let peer_tx = Arc::new(PeerTx::new(tx_ring, doorbell).ok()?);
                let same_host_peer = SameHostPeer { memory, peer_tx };
                device.local.peers.write().insert(self.address, same_host_peer.clone());
                device.local.generation.fetch_add(1, Ordering::Release);
                self.same_host_peer = Some(same_host_peer);
                Some(())
            }
            Message::Answer { key, version, path } => {
                let source = self.source(path, files)?;
                self.same_host_peer.as_ref()?.memory.set_source(key, Version(version), source);
                Some(())
            }
            Message::Forget { key, version } => {
                self.same_host_peer.as_ref()?.memory.forget(key, Version(version));
                Some(())
            }
            _ => None,
        }
    }

    /// A region whose files cannot be used goes by packets.
    fn source(&self, path: RegionPath, files: impl IntoIterator<Item = OwnedFd>) -> Option<Source> {
        let mut files = files.into_iter();
        let mut backed = |offset, addr, len| {
            files.next().map(|file| BackedBy { file, offset, range: HostRange { addr, len } })
        };
        let source = match path {
            RegionPath::Packets => Ok(Source::Packets),
            RegionPath::Process => Ok(private_memory(self.pid)),
            RegionPath::Mapped { offset, addr, len } => {
                Mapped::new(&backed(offset, addr, len)?).map(Source::Mapped)
            }
            RegionPath::File { number, addr, len } => {
                let backed = backed(addr, addr, len)?;
                MappedFile::new(&backed, files.next()?, number).map(Source::File)
            }
            RegionPath::Framed { offset, count, addr, len } => {
                let file = files.next()?;
                let (entries, counters, hits) = (files.next()?, files.next()?, files.next()?);
                let (range, frames) = (HostRange { addr, len }, Frames { file, offset, count });
                Framed::new(range, frames, FrameTables { entries, counters, hits }).map(Source::Framed)
            }
            RegionPath::Cached { offset, count, is_swap_file, addr, len } => {
                let backed = backed(offset, addr, len)?;
                let (entries, counters) = (files.next()?, files.next()?);
                Cached::new(backed, is_swap_file, entries, counters, count).map(Source::Cached)
            }
        };
        Some(source.unwrap_or_else(|error| {
            tracing::debug!(%error, ?path, "a region is reached by packets only");
            Source::Packets
        }))
    }
}

/// How private memory of a peer is accessed.
fn private_memory(pid: i32) -> Source {
    let source = Source::process(pid);
    if matches!(source, Source::Packets) {
        tracing::info!(
            pid,
            "the kernel forbids copies from and to this process (kernel.yama.ptrace_scope, or a container's seccomp \
             filter): its private memory is accessed through a ring, slower"
        );
    }
    source
}
