//! What devices forward to each other: packets, and the request to listen at all addresses.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use terrace_fabric::TxBatch;
use terrace_sync::Mutex;
use terrace_wire::{Packet, Path, Psn, QPN_INSTANCE_SHIFT, ROCE_PORT, RxMeta};

use super::{Inbound, PREFIX_BYTES, SERVICE, Sender};
use crate::address::socket_address;
use crate::device::Device;
use crate::error::Error;
use crate::management::{self, is_management};
use crate::unix_socket::{self, Spare, is_trusted, unwatch, watch};

/// Longest message in bytes: more than any packet.
const MESSAGE_BYTES_MAX: usize = 8192;

/// Processes that forward to this one at a time at most: the one with instance 0, and at times one that has had it
/// before.
const SENDERS_MAX: usize = 16;

/// Messages of one sender that are taken at a time.
const MESSAGES_AT_A_TIME: usize = 64;

const A_PACKET: u8 = 1;
const LISTEN_EVERYWHERE: u8 = 2;
const FORWARDS_NOW: u8 = 3;

impl Inbound {
    fn open(device: &Device) -> Result<Inbound, Errno> {
        let waits = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let listeners = unix_socket::listen_at(SERVICE, device.gids(), device.port.udp_port(), &waits)?;
        Ok(Inbound { waits, listeners, spare: Spare::new(), senders: Mutex::default() })
    }

    /// Takes forwarded messages and new connections. Does not block.
    pub fn serve(&self, device: &Device) {
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }];
        if !matches!(epoll::wait(&self.waits, &mut events, Some(&Timespec::default())), Ok(1..)) {
            return;
        }
        let mut senders = self.senders.lock();
        for (gid_index, listener) in &self.listeners {
            unix_socket::accept_waiting(listener, &self.spare, |socket| {
                // A trusted process may say where packets came from.
                if senders.len() < SENDERS_MAX
                    && is_trusted(&socket)
                    && watch(&self.waits, socket.as_fd()).is_ok()
                {
                    senders.push(Sender { socket, gid_index: *gid_index });
                }
            });
        }
        let mut message = [0; MESSAGE_BYTES_MAX];
        senders.retain(|sender| {
            let stays = sender.take_messages(device, &mut message);
            if !stays {
                unwatch(&self.waits, sender.socket.as_fd());
            }
            stays
        });
        drop(senders);
        // The handlers are called without locks.
        device.management.deliver();
    }
}

impl Sender {
    /// False when the sender has gone.
    fn take_messages(&self, device: &Device, message: &mut [u8]) -> bool {
        for _ in 0..MESSAGES_AT_A_TIME {
            match recv(&self.socket, &mut *message, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return false,
                Ok((len, _)) => device.take_message(&message[..len], self.gid_index),
                Err(error) => return matches!(error, Errno::AGAIN | Errno::INTR),
            }
        }
        true
    }
}

impl Device {
    /// Opens the sockets by which others forward to this device.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open_inbound(&self) -> Result<(), Error> {
        *self.forwarding.inbound.lock() = Some(Arc::new(Inbound::open(self)?));
        // The engine sleeps on them from now on.
        self.engine.wake();
        Ok(())
    }

    /// Whether this device forwards packets of other instances.
    fn is_demultiplexer(&self) -> bool {
        self.port.instance() == 0 && self.is_colocated()
    }

    /// Whether a number is another instance's, and this device forwards to that instance.
    pub(crate) fn is_for_other_instance(&self, qpn: u32) -> bool {
        qpn >> QPN_INSTANCE_SHIFT != 0 && self.is_demultiplexer()
    }

    /// Forwards a packet to the process that has its queue pair number's instance. False if this device does not
    /// forward to it.
    #[cold]
    pub(crate) fn forward_to_process(&self, meta: &RxMeta, bytes: &[u8], qpn: u32) -> bool {
        let instance = (qpn >> QPN_INSTANCE_SHIFT) as u8;
        if instance == 0 || !self.is_demultiplexer() {
            return false;
        }
        self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
        // A packet that the process does not take now is lost, as in any network.
        self.send_to_instance(A_PACKET, instance, meta, bytes);
        true
    }

    /// Forwards a management datagram to the process with that instance, as if it had come there: for handlers that read
    /// such datagrams and find that they are for another process. False if this device does not forward to it.
    ///
    /// # Errors
    /// Those of [`Device::send_management`].
    pub fn forward_management(&self, instance: u8, from: &Path, payload: &[u8]) -> Result<bool, Error> {
        if instance == 0 || !self.is_demultiplexer() {
            return Ok(false);
        }
        self.check_open()?;
        let gid = self.gids().get(usize::from(from.source_gid_index));
        let gid = gid.ok_or(Error::Invalid("no GID at source_gid_index"))?;
        let mut packet = TxBatch::new(0);
        let instances = [instance, management::instance_of(from.remote.port())?];
        management::write(&mut packet, from, Psn::new(0), instances, payload)?;
        let meta = RxMeta {
            source: from.remote,
            destination: gid.addr,
            gid_index: from.source_gid_index,
            traffic_class: 0,
        };
        for inner in packet.packets() {
            self.send_to_instance(A_PACKET, instance, &meta, inner.bytes);
        }
        self.counters.forwarded.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    /// Asks the process that has instance 0 of this device's addresses to listen at all of its own: peers may use any of
    /// them. False if no process has taken the message.
    pub fn ask_demultiplexer_to_listen(&self) -> bool {
        if self.port.instance() == 0 || !self.is_colocated() {
            return false;
        }
        let asked = (0u8..self.gids().len() as u8)
            .map(|gid_index| self.send_command(LISTEN_EVERYWHERE, 0, gid_index));
        asked.fold(false, |any, is_taken| any | is_taken)
    }

    /// Tells the processes with other instances that this one forwards from now on. They may have asked one before it to
    /// listen at all addresses.
    pub(crate) fn announce_demultiplexer(&self) {
        if self.is_demultiplexer() {
            (1..=u8::MAX).for_each(|instance| _ = self.send_command(FORWARDS_NOW, instance, 0));
        }
    }

    /// Sends a message without a packet to the process with that instance of that GID's address. False if it is lost.
    fn send_command(&self, kind: u8, instance: u8, gid_index: u8) -> bool {
        let Some(gid) = self.gids().get(usize::from(gid_index)) else { return false };
        let source = SocketAddr::new(gid.addr, self.port.udp_port());
        let meta = RxMeta { source, destination: gid.addr, gid_index, traffic_class: 0 };
        self.send_to_instance(kind, instance, &meta, &[])
    }

    /// False if no process takes the message.
    fn send_to_instance(&self, kind: u8, instance: u8, meta: &RxMeta, bytes: &[u8]) -> bool {
        let source = match meta.source.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let mut prefix = [0; PREFIX_BYTES];
        (prefix[0], prefix[1]) = (kind, meta.traffic_class);
        prefix[2..4].copy_from_slice(&meta.source.port().to_be_bytes());
        prefix[4..].copy_from_slice(&source.octets());
        let to = SocketAddr::new(meta.destination.to_canonical(), ROCE_PORT + u16::from(instance));
        let is_taken = self.forwarding.send(to, &prefix, bytes);
        if !is_taken {
            tracing::trace!(%to, "no process takes forwarded packets");
        }
        is_taken
    }

    /// Takes a message of a trusted process. No bytes do harm: a bad message at worst increments a counter.
    fn take_message(&self, message: &[u8], gid_index: u8) {
        let Some((prefix, bytes)) = message.split_first_chunk::<PREFIX_BYTES>() else { return };
        let [kind, traffic_class, port_high, port_low, address @ ..] = *prefix;
        match (kind, self.gids().get(usize::from(gid_index))) {
            (LISTEN_EVERYWHERE, _) if self.is_demultiplexer() => self.activate_all_gids(),
            (FORWARDS_NOW, _) if self.activated.load(Ordering::SeqCst) != 0 => {
                self.ask_demultiplexer_to_listen();
            }
            (A_PACKET, Some(gid)) if self.port.instance() != 0 => {
                let ip = IpAddr::V6(Ipv6Addr::from(address)).to_canonical();
                let port = u16::from_be_bytes([port_high, port_low]);
                let source = socket_address(ip, port, gid.ifindex);
                self.take_packet(&RxMeta { source, destination: gid.addr, gid_index, traffic_class }, bytes);
            }
            _ => {}
        }
    }

    fn take_packet(&self, meta: &RxMeta, bytes: &[u8]) {
        let mut packet = Packet::default();
        if !self.read(meta, bytes, &mut packet) {
            return;
        }
        if is_management(packet.bth.qpn) {
            self.management.take(self.clock.now(), self.port.instance(), meta, &packet);
        } else if !self.handle_forwarded(meta, &packet) {
            self.counters.unknown_qp.fetch_add(1, Ordering::Relaxed);
        }
    }
}
