//! One UDP socket: its options, and the system calls that send and receive.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, RecvMsg, SockaddrIn, SockaddrIn6, sockopt};
use nix::sys::socket::{recvmsg, setsockopt};
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use socket2::{Domain, InterfaceIndexOrAddress, MsgHdr, SockAddr, Socket, Type};
use terrace_sync::Uncancelled;
use terrace_wire::icrc::{self, Flow};

use super::addresses::is_link_local;
use crate::corrupt::corrupt;
use crate::counters::add;
use crate::tx::Run;

/// A function that is called with every new socket before it is bound.
pub type SocketHook = fn(BorrowedFd<'_>) -> io::Result<()>;

/// Requested size of the send buffer, which queues packets while an interface is busy.
const SEND_BUFFER_BYTES: usize = 4 << 20;
/// Receive buffer size of a port unless its configuration sets one.
pub(super) const RECEIVE_BUFFER_BYTES: usize = 16 << 20;

/// Space for the control messages of one datagram. All possible messages together need less than half of it.
const CONTROL_BYTES: usize = 192;

#[derive(Debug)]
pub(super) struct UdpSocket {
    socket: Socket,
    local: SocketAddr,
    /// Interface of a link-local address, for peers without a scope.
    scope_id: u32,
    /// The kernel's last known count of dropped datagrams.
    last_overflows: AtomicU32,
}

/// Result of a send.
pub(super) enum Sent {
    All,
    WouldBlock,
    /// Neither the interface nor the kernel segments this run. Single packets may still be sent.
    SegmentationRefused,
    Failed(io::Error),
}

/// Result of a receive.
pub(super) enum Received {
    Datagram {
        source: SocketAddr,
        len: usize,
        /// Length of each packet but the last.
        segment: usize,
        traffic_class: u8,
        /// Datagrams that the socket has dropped so far, if the kernel reports the number.
        overflows: Option<u32>,
    },
    /// The datagram was longer than the buffer, and is lost.
    Truncated,
    Nothing,
    Failed(io::Error),
}

/// Control messages must be aligned as the kernel's own header for them.
#[repr(align(8))]
struct Control([u8; CONTROL_BYTES]);

impl UdpSocket {
    /// A non-blocking socket with the options for RoCEv2, bound to the address but not connected.
    pub fn bind(
        local: SocketAddr,
        receive_buffer_bytes: usize,
        hook: Option<SocketHook>,
    ) -> io::Result<UdpSocket> {
        UdpSocket::bind_with(local, receive_buffer_bytes, hook, |_| Ok(()))
    }

    /// A socket that receives what is sent to a multicast group, over the interface with that index. Other sockets may be
    /// bound to the same group.
    pub fn bind_group(
        local: SocketAddr,
        ifindex: u32,
        receive_buffer_bytes: usize,
        hook: Option<SocketHook>,
    ) -> io::Result<UdpSocket> {
        UdpSocket::bind_with(local, receive_buffer_bytes, hook, |socket| {
            socket.set_reuse_address(true)?;
            // Without `MULTICAST_ALL`, only this socket's own membership counts, not those of other sockets on other
            // interfaces.
            match local {
                SocketAddr::V4(group) => {
                    socket.set_multicast_all_v4(false)?;
                    socket.join_multicast_v4_n(group.ip(), &InterfaceIndexOrAddress::Index(ifindex))
                }
                SocketAddr::V6(group) => {
                    socket.set_multicast_all_v6(false)?;
                    socket.join_multicast_v6(group.ip(), ifindex)
                }
            }
        })
    }

    fn bind_with(
        local: SocketAddr,
        receive_buffer_bytes: usize,
        hook: Option<SocketHook>,
        prepare: impl FnOnce(&Socket) -> io::Result<()>,
    ) -> io::Result<UdpSocket> {
        let socket = Socket::new(Domain::for_address(local), Type::DGRAM, None)?;
        socket.set_nonblocking(true)?;
        match local {
            SocketAddr::V4(_) => set_options_v4(&socket)?,
            SocketAddr::V6(_) => set_options_v6(&socket)?,
        }
        // Both options may be missing: GRO improves speed, and the other one serves a counter.
        let _ = setsockopt(&socket, sockopt::UdpGroSegment, &true);
        let _ = setsockopt(&socket, sockopt::RxqOvfl, &1);
        grow_buffers(&socket, receive_buffer_bytes);
        if let Some(Err(error)) = hook.map(|hook| hook(socket.as_fd())) {
            tracing::warn!(
                "socket option failed: {error}; packets without UDP checksum over IPv6 are not received"
            );
        }
        prepare(&socket)?;
        socket.bind(&local.into())?;
        let scope_id = match local {
            SocketAddr::V4(_) => 0,
            SocketAddr::V6(v6) => v6.scope_id(),
        };
        Ok(UdpSocket { socket, local, scope_id, last_overflows: AtomicU32::new(0) })
    }

    /// Sends datagrams to IPv6 groups over the interface with that index. Those to IPv4 groups leave by the interface of the
    /// address that the socket is bound to.
    pub fn set_multicast_interface(&self, ifindex: u32) -> io::Result<()> {
        match self.local {
            SocketAddr::V4(_) => Ok(()),
            SocketAddr::V6(_) => self.socket.set_multicast_if_v6(ifindex),
        }
    }

    /// Reads the port that the kernel chose, and enables ICMP errors for sent datagrams (`IP_RECVERR`).
    pub fn with_icmp_errors(mut self) -> io::Result<UdpSocket> {
        if let Some(local) = self.socket.local_addr()?.as_socket() {
            self.local = local;
        }
        match self.local {
            SocketAddr::V4(_) => setsockopt(&self.socket, sockopt::Ipv4RecvErr, &true)?,
            SocketAddr::V6(_) => setsockopt(&self.socket, sockopt::Ipv6RecvErr, &true)?,
        }
        Ok(self)
    }

    /// The ICMP error since the last call, if any.
    pub fn take_error(&self) -> Option<io::Error> {
        self.socket.take_error().ok().flatten()
    }

    /// The address and port from which packets are sent.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// The granted size of the receive buffer in bytes, as the kernel accounts it.
    pub fn receive_buffer_bytes(&self) -> usize {
        self.socket.recv_buffer_size().unwrap_or(0)
    }

    /// Adds the kernel's drops since the last call to a counter. Logs the first drop.
    pub fn record_overflows(&self, total: u32, counter: &AtomicU64) {
        let before = self.last_overflows.swap(total, Relaxed);
        if before == 0 && total > 0 {
            tracing::info!(
                "the kernel drops packets to {}: the receive buffer was full (rx_overflows)",
                self.local
            );
        }
        add(counter, u64::from(total.wrapping_sub(before)));
    }

    /// Writes the ICRCs of the run's first `count` packets, which are `bytes`, and sends the packets in one call.
    pub fn send(&self, run: &Run, bytes: &mut [u8], count: usize) -> Sent {
        let flow = Flow { source: self.local, destination: run.path.remote };
        for (packet, index) in bytes.chunks_mut(run.segment).zip(0u16..) {
            // The kernel gives segment i of a GSO send the IPv4 identification i, and a single packet 0.
            icrc::seal(&flow, packet, index);
            if let Some(bit) = run.corrupt_bit {
                corrupt(&flow, packet, bit);
            }
        }
        match self.send_sealed(run, bytes, count) {
            Ok(_) => Sent::All,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => Sent::WouldBlock,
                Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE | libc::EOPNOTSUPP) if count > 1 => {
                    Sent::SegmentationRefused
                }
                _ => Sent::Failed(error),
            },
        }
    }

    fn send_sealed(&self, run: &Run, bytes: &[u8], count: usize) -> io::Result<usize> {
        let mut control = ControlEncoder::new();
        if count > 1 {
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, &(run.segment as u16).to_ne_bytes());
        }
        let (level, class, hops) = match self.local {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        };
        if run.path.traffic_class != 0 {
            control.push(level, class, &i32::from(run.path.traffic_class).to_ne_bytes());
        }
        if run.path.hop_limit != 0 {
            control.push(level, hops, &i32::from(run.path.hop_limit).to_ne_bytes());
        }
        let remote = SockAddr::from(self.with_scope(run.path.remote));
        let _uncancelled = Uncancelled::new();
        match control.bytes() {
            [] => self.socket.send_to(bytes, &remote),
            control => {
                let buffers = [IoSlice::new(bytes)];
                let header = MsgHdr::new().with_addr(&remote).with_buffers(&buffers).with_control(control);
                self.socket.sendmsg(&header, 0)
            }
        }
    }

    /// Adds the local link's scope to a link-local peer address without one.
    fn with_scope(&self, remote: SocketAddr) -> SocketAddr {
        match remote {
            SocketAddr::V6(mut v6) if v6.scope_id() == 0 && is_link_local(*v6.ip()) => {
                v6.set_scope_id(self.scope_id);
                v6.into()
            }
            other => other,
        }
    }

    /// Receives one datagram or GRO run.
    pub fn receive(&self, buffer: &mut [u8]) -> Received {
        let mut control = Control([0; CONTROL_BYTES]);
        let mut buffers = [IoSliceMut::new(buffer)];
        let fd = self.socket.as_raw_fd();
        let _uncancelled = Uncancelled::new();
        let result = match self.local {
            SocketAddr::V4(_) => {
                recvmsg::<SockaddrIn>(fd, &mut buffers, Some(&mut control.0), MsgFlags::empty())
                    .map(|message| decode(&message, |addr| SocketAddrV4::from(*addr).into()))
            }
            SocketAddr::V6(_) => {
                recvmsg::<SockaddrIn6>(fd, &mut buffers, Some(&mut control.0), MsgFlags::empty())
                    .map(|message| decode(&message, |addr| SocketAddrV6::from(*addr).into()))
            }
        };
        match result {
            Ok(received) => received,
            Err(Errno::EAGAIN | Errno::EINTR) => Received::Nothing,
            Err(errno) => Received::Failed(errno.into()),
        }
    }
}

impl AsFd for UdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn set_options_v4(socket: &Socket) -> io::Result<()> {
    // Without fragmentation the IPv4 identification is known. PROBE ignores path MTUs reported by ICMP.
    set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::PROBE)?;
    setsockopt(socket, sockopt::IpRecvTos, &true)?;
    Ok(())
}

fn set_options_v6(socket: &Socket) -> io::Result<()> {
    socket.set_only_v6(true)?;
    set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::PROBE)?;
    setsockopt(socket, sockopt::Ipv6RecvTClass, &true)?;
    Ok(())
}

/// The forced options may exceed the system's limit but need a privilege.
fn grow_buffers(socket: &Socket, receive_bytes: usize) {
    if setsockopt(socket, sockopt::RcvBufForce, &receive_bytes).is_err() {
        let _ = socket.set_recv_buffer_size(receive_bytes);
    }
    if setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER_BYTES).is_err() {
        let _ = socket.set_send_buffer_size(SEND_BUFFER_BYTES);
    }
}

/// The buffers of a UDP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// For datagrams that have arrived.
    pub receive_bytes: usize,
    /// For datagrams that leave.
    pub send_bytes: usize,
}

impl Buffers {
    /// What a port asks the kernel for.
    pub const WANTED: Buffers =
        Buffers { receive_bytes: RECEIVE_BUFFER_BYTES, send_bytes: SEND_BUFFER_BYTES };

    /// What the kernel grants to a port of this process.
    ///
    /// # Errors
    /// When there is no socket.
    pub fn granted() -> io::Result<Buffers> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
        grow_buffers(&socket, Buffers::WANTED.receive_bytes);
        // The kernel doubles the number that it was asked for, to have room for its own data.
        Ok(Buffers {
            receive_bytes: socket.recv_buffer_size()? / 2,
            send_bytes: socket.send_buffer_size()? / 2,
        })
    }
}

fn decode<S>(message: &RecvMsg<'_, '_, S>, to_std: impl Fn(&S) -> SocketAddr) -> Received {
    let Some(source) = message.address.as_ref().map(to_std) else { return Received::Truncated };
    if message.flags.contains(MsgFlags::MSG_TRUNC) {
        return Received::Truncated;
    }
    let mut segment = message.bytes;
    let mut traffic_class = 0;
    let mut overflows = None;
    for control in message.cmsgs().into_iter().flatten() {
        match control {
            ControlMessageOwned::UdpGroSegments(bytes) => segment = usize::try_from(bytes).unwrap_or(segment),
            ControlMessageOwned::Ipv4Tos(class) => traffic_class = class,
            ControlMessageOwned::Ipv6TClass(class) => traffic_class = class as u8,
            ControlMessageOwned::RxqOvfl(total) => overflows = Some(total),
            _ => {}
        }
    }
    Received::Datagram { source, len: message.bytes, segment, traffic_class, overflows }
}

/// Control messages for a send, in the layout of `cmsg(3)`: a header of length, level and type, then the data, each
/// padded to the size of a machine word.
struct ControlEncoder {
    buffer: Control,
    len: usize,
}

impl ControlEncoder {
    const WORD: usize = size_of::<usize>();
    const HEADER: usize = Self::WORD + 2 * size_of::<i32>();

    fn new() -> ControlEncoder {
        ControlEncoder { buffer: Control([0; CONTROL_BYTES]), len: 0 }
    }

    fn push(&mut self, level: i32, kind: i32, data: &[u8]) {
        let message_len = Self::HEADER + data.len();
        let padded_len = message_len.next_multiple_of(Self::WORD);
        let Some(message) = self.buffer.0.get_mut(self.len..self.len + padded_len) else { return };
        message[..Self::WORD].copy_from_slice(&message_len.to_ne_bytes());
        message[Self::WORD..Self::WORD + 4].copy_from_slice(&level.to_ne_bytes());
        message[Self::WORD + 4..Self::HEADER].copy_from_slice(&kind.to_ne_bytes());
        message[Self::HEADER..message_len].copy_from_slice(data);
        self.len += padded_len;
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer.0[..self.len]
    }
}
