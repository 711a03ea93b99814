//! Multicast: datagrams to a group reach every UD queue pair that is attached to it (IBTA volume 1, 10.5).
//!
//! A group is an IP multicast group, which the port joins when the first queue pair is attached, and leaves with the last.
//! Datagrams to it come through a socket of each process that has joined, so no device forwards them to others. They
//! name the multicast queue pair, and no datagram to a unicast address does.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_transport::QpType;
use terrace_wire::{MULTICAST_QPN, Packet, RxMeta};

use crate::address::ip_of;
use crate::device::Device;
use crate::error::Error;
use crate::qp::QueuePair;

impl QueuePair {
    /// Attaches the queue pair to a multicast group: it receives the datagrams to the group that have its Q_Key. A GID of
    /// the form `::ffff:a.b.c.d` or `ff0e::ffff:a.b.c.d` is an IPv4 group. Attaching twice does nothing.
    ///
    /// # Errors
    /// EINVAL for another type of queue pair than UD, or a GID that is no group's; ENOMEM at one of the limits of
    /// [`Limits`](crate::Limits); EADDRNOTAVAIL if the device has no address of the group's family; the system's
    /// errors.
    pub fn attach_multicast(self: &Arc<Self>, gid: &[u8; 16]) -> Result<(), Error> {
        let group = self.group_of(gid)?;
        let device = self.device();
        device.check_open()?;
        let _changes = device.multicast.changes.lock();
        let (group_count, attached_count) = {
            let groups = device.multicast.groups.read();
            let qps = groups.get(&group).map_or(&[][..], Vec::as_slice);
            if qps.iter().any(|qp| Arc::ptr_eq(qp, self)) {
                return Ok(());
            }
            (groups.len(), qps.len())
        };
        if attached_count == 0 && group_count >= device.limits.max_mcast_groups as usize {
            return Err(Error::NoMemory("multicast groups"));
        }
        if attached_count >= device.limits.max_mcast_qp_attach as usize {
            return Err(Error::NoMemory("queue pairs of a multicast group"));
        }
        self.users.add()?;
        if attached_count == 0 {
            device.port.join(group).map_err(join_error).inspect_err(|_| self.users.remove())?;
        }
        device.multicast.groups.write().entry(group).or_default().push(self.clone());
        // The engine may sleep without the group's socket.
        device.engine.wake();
        if device.is_closed() {
            // The table would keep the device for ever.
            device.detach_all();
        }
        Ok(())
    }

    /// Detaches the queue pair from a multicast group.
    ///
    /// # Errors
    /// EINVAL if it is not attached.
    pub fn detach_multicast(self: &Arc<Self>, gid: &[u8; 16]) -> Result<(), Error> {
        let group = self.group_of(gid)?;
        let device = self.device();
        let _changes = device.multicast.changes.lock();
        let mut groups = device.multicast.groups.write();
        let qps = groups.get_mut(&group).ok_or(NOT_ATTACHED)?;
        let index = qps.iter().position(|qp| Arc::ptr_eq(qp, self)).ok_or(NOT_ATTACHED)?;
        qps.swap_remove(index);
        let is_last = qps.is_empty();
        if is_last {
            groups.remove(&group);
        }
        drop(groups);
        if is_last {
            device.port.leave(group);
        }
        self.users.remove();
        Ok(())
    }

    fn blocks_own_multicast(&self) -> bool {
        self.init.blocks_own_multicast
    }

    fn group_of(&self, gid: &[u8; 16]) -> Result<IpAddr, Error> {
        if self.qp_type() != QpType::Ud {
            return Err(Error::Invalid("only UD queue pairs receive multicast"));
        }
        Some(ip_of(gid)).filter(IpAddr::is_multicast).ok_or(Error::Invalid("the GID is no multicast group's"))
    }
}

const NOT_ATTACHED: Error = Error::Invalid("the queue pair is not attached to the group");

fn join_error(error: std::io::Error) -> Error {
    let unavailable = rustix::io::Errno::ADDRNOTAVAIL.raw_os_error();
    Error::System(error.raw_os_error().unwrap_or(unavailable))
}

impl Device {
    /// Detaches all queue pairs: the device is closed. They can be destroyed then.
    pub(crate) fn detach_all(&self) {
        self.multicast.take_all().iter().for_each(|qp| qp.users.remove());
    }

    /// Delivers a datagram that was sent to a multicast group.
    #[cold]
    pub(crate) fn deliver_to_group(&self, meta: &RxMeta, bytes: &[u8]) {
        let mut packet = Packet::default();
        if !self.read(meta, bytes, &mut packet) {
            return;
        }
        let groups = self.multicast.groups.read();
        let is_multicast = packet.bth.qpn == MULTICAST_QPN;
        let Some(qps) = groups.get(&meta.destination).filter(|_| is_multicast) else {
            self.counters.unknown_group.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let is_own = meta.source.port() == self.port.udp_port()
            && self.gids().iter().any(|gid| gid.addr == meta.source.ip());
        for qp in qps.iter().filter(|qp| !(is_own && qp.blocks_own_multicast())) {
            let mut core = qp.lock();
            if core.nic.dead {
                continue;
            }
            let (transport, host) = core.parts(qp, None);
            transport.handle_packet(|| self.clock.now(), meta, &packet, None, &host);
            self.publish_state(qp, &mut core);
        }
    }
}
