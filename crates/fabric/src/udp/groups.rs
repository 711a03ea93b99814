//! Multicast groups: one socket for each, bound to the group's address.
//!
//! Groups have one UDP port, 4791, whatever the instance indexes of their members are. The kernel delivers a copy of
//! each datagram to every socket that is bound to the group, so each process of the host gets it, of whatever user.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rustix::event::{Timespec, epoll};
use terrace_sync::Mutex;
use terrace_wire::ROCE_PORT;

use super::socket::{SocketHook, UdpSocket};
use crate::Gid;

/// Sockets that one receive reads at most. The others stay readable.
const READY_MAX: usize = 16;

/// The groups that a port has joined.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Readable while any group's socket is. Opened with the first group, and closed with the port.
    readable: OnceLock<OwnedFd>,
    count: AtomicUsize,
    joined: Mutex<Joined>,
}

#[derive(Debug, Default)]
struct Joined {
    groups: Vec<Group>,
    next_token: u64,
}

/// A joined group.
#[derive(Debug)]
pub(super) struct Group {
    /// The group's name among the events of `readable`.
    token: u64,
    pub address: IpAddr,
    /// Index of the GID whose interface the group was joined on.
    pub gid_index: u8,
    pub socket: UdpSocket,
}

impl Groups {
    /// Joins a group on the interface of that GID. Joining twice does nothing.
    pub fn join(
        &self,
        address: IpAddr,
        (gid_index, gid): (u8, &Gid),
        receive_buffer_bytes: usize,
        hook: Option<SocketHook>,
    ) -> io::Result<()> {
        let mut joined = self.joined.lock();
        if joined.groups.iter().any(|group| group.address == address) {
            return Ok(());
        }
        let local = socket_address(address, gid.ifindex);
        let socket = UdpSocket::bind_group(local, gid.ifindex, receive_buffer_bytes, hook)?;
        let token = joined.next_token;
        let data = epoll::EventData::new_u64(token);
        epoll::add(self.open_readable()?, socket.as_fd(), data, epoll::EventFlags::IN)?;
        joined.next_token += 1;
        joined.groups.push(Group { token, address, gid_index, socket });
        self.count.store(joined.groups.len(), Relaxed);
        Ok(())
    }

    /// Leaves a group. Datagrams that were not received are lost.
    pub fn leave(&self, address: IpAddr) {
        let mut joined = self.joined.lock();
        let Some(index) = joined.groups.iter().position(|group| group.address == address) else { return };
        let group = joined.groups.swap_remove(index);
        self.count.store(joined.groups.len(), Relaxed);
        // A forked child may keep the socket open, and then closing it here ends no watch.
        if let Some(readable) = self.readable.get() {
            let _ = epoll::delete(readable, group.socket.as_fd());
        }
    }

    /// Calls `receive` with every group that has datagrams. Does nothing while another thread joins or leaves one.
    pub fn for_each_readable(&self, mut receive: impl FnMut(&Group)) {
        if self.count.load(Relaxed) == 0 {
            return;
        }
        let (Some(joined), Some(readable)) = (self.joined.try_lock(), self.readable.get()) else { return };
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [none; READY_MAX];
        let ready = epoll::wait(readable, &mut events, Some(&Timespec::default())).unwrap_or(0);
        for event in &events[..ready] {
            let token = event.data.u64();
            joined.groups.iter().filter(|group| group.token == token).for_each(&mut receive);
        }
    }

    /// The descriptor to poll for datagrams, if there ever was a group.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.readable.get().map(AsFd::as_fd)
    }

    fn open_readable(&self) -> io::Result<&OwnedFd> {
        if let Some(readable) = self.readable.get() {
            return Ok(readable);
        }
        let opened = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(self.readable.get_or_init(|| opened))
    }
}

/// The address that a group's socket is bound to. Groups of a link need its interface.
fn socket_address(group: IpAddr, ifindex: u32) -> SocketAddr {
    match group {
        IpAddr::V4(_) => SocketAddr::new(group, ROCE_PORT),
        IpAddr::V6(v6) => {
            const LINK_LOCAL_SCOPE: u16 = 2;
            let is_of_link = v6.segments()[0] & 0xf <= LINK_LOCAL_SCOPE;
            SocketAddrV6::new(v6, ROCE_PORT, 0, if is_of_link { ifindex } else { 0 }).into()
        }
    }
}
