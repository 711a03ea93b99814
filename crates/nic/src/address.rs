//! Address vectors and address handles: from the GIDs of a program to paths of the wire.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::sync::Arc;

use terrace_fabric::Gid;
use terrace_transport::{Datagram, Target};
use terrace_wire::{Path, ROCE_PORT, port_of};

use crate::device::{Device, Pd};
use crate::error::Error;
use crate::use_count::UseCount;

/// The parts of `ibv_ah_attr` that reach the wire, and those that are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressVector {
    /// Whether there is a global route. RoCE has no other kind (IBTA annex A17).
    pub is_global: bool,
    /// The peer's GID.
    pub dgid: [u8; 16],
    /// Index of the local GID.
    pub sgid_index: u8,
    /// IPv4 type of service or IPv6 traffic class.
    pub traffic_class: u8,
    /// Time to live; 0 leaves it to the system.
    pub hop_limit: u8,
    /// IPv6 flow label; the upper 12 bits are ignored.
    pub flow_label: u32,
    /// The device's port: 1.
    pub port_num: u8,
}

impl Device {
    /// The path to a queue pair of the peer that the vector names. EINVAL without a global route, for a port other than
    /// 1, a source index without a GID, or a destination that is a multicast group or of another family than the source.
    pub fn resolve(&self, av: &AddressVector, dest_qpn: u32) -> Result<Path, Error> {
        let path = resolve(self.gids(), av, dest_qpn)?;
        match path.remote.ip().is_multicast() {
            true => Err(Error::Invalid("a multicast group has no queue pair")),
            false => Ok(path),
        }
    }
}

/// The path to `qpn` at the peer that the vector names.
fn resolve(gids: &[Gid], av: &AddressVector, qpn: u32) -> Result<Path, Error> {
    if !av.is_global {
        return Err(Error::Invalid("RoCE needs a global route in the address vector"));
    }
    if av.port_num != 1 {
        return Err(Error::Invalid("the device's only port is 1"));
    }
    let source = gids.get(usize::from(av.sgid_index)).ok_or(Error::Invalid("no GID at sgid_index"))?;
    let remote = ip_of(&av.dgid);
    if remote.is_unspecified() {
        return Err(Error::Invalid("the destination GID is zero"));
    }
    if remote.is_ipv4() != source.addr.is_ipv4() {
        return Err(Error::Invalid("source and destination GID are of different families"));
    }
    Ok(Path {
        remote: socket_address(remote, port_at(remote, qpn), source.ifindex),
        source_gid_index: av.sgid_index,
        traffic_class: av.traffic_class,
        hop_limit: av.hop_limit,
        flow_label: av.flow_label & 0xf_ffff,
    })
}

/// The address that a GID stands for: IPv4 when it is mapped into IPv6. A multicast GID of an IPv4 group may have the
/// prefix `ff0e` as well, which RoCEv1 gives it.
pub(crate) fn ip_of(gid: &[u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(*gid);
    let group = match v6.segments() {
        [0xff0e, 0, 0, 0, 0, 0xffff, high, low] => {
            Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low))).filter(Ipv4Addr::is_multicast)
        }
        _ => v6.to_ipv4_mapped(),
    };
    group.map_or(IpAddr::V6(v6), IpAddr::V4)
}

/// The UDP port for a queue pair number at an address. Groups have members of all instances, at one port.
fn port_at(remote: IpAddr, qpn: u32) -> u16 {
    if remote.is_multicast() { ROCE_PORT } else { port_of(qpn) }
}

/// A link-local address means something only together with the interface that it is reached through.
pub(crate) fn socket_address(ip: IpAddr, port: u16, ifindex: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => SocketAddrV6::new(v6, port, 0, ifindex).into(),
        _ => SocketAddr::new(ip, port),
    }
}

/// An address handle.
pub struct Ah {
    pd: Arc<Pd>,
    av: AddressVector,
    /// The path to the peer's instance 0; a queue pair number moves the port.
    path: Path,
    users: UseCount,
}

impl Pd {
    /// Makes an address handle. The errors are those of [`Device::resolve`], but the destination may be a multicast group.
    pub fn create_ah(self: &Arc<Self>, av: &AddressVector) -> Result<Arc<Ah>, Error> {
        self.users.check()?;
        Ah::new(self, av)
    }
}

impl Ah {
    fn new(pd: &Arc<Pd>, av: &AddressVector) -> Result<Arc<Ah>, Error> {
        let device = pd.device();
        let path = resolve(device.gids(), av, 0)?;
        device.quotas.ah.take()?;
        pd.users.add().inspect_err(|_| device.quotas.ah.give_back())?;
        device.activate_gid(av.sgid_index);
        Ok(Arc::new(Ah { pd: pd.clone(), av: *av, path, users: UseCount::default() }))
    }

    /// The target of datagrams to that queue pair of the peer.
    pub fn target(&self, remote_qpn: u32, remote_qkey: u32) -> Target {
        let mut path = self.path;
        path.remote.set_port(port_at(path.remote.ip(), remote_qpn));
        Target::Datagram(Box::new(Datagram { path, qpn: remote_qpn & 0xff_ffff, qkey: remote_qkey }))
    }

    /// The vector that the handle was made from.
    pub fn address_vector(&self) -> AddressVector {
        self.av
    }

    /// Destroys the handle. Work requests that used it keep their address.
    pub fn destroy(&self) -> Result<(), Error> {
        self.users.end()?;
        self.pd.users.remove();
        self.pd.device().quotas.ah.give_back();
        Ok(())
    }
}

/// An identifier for the node: the lower half of its first IPv6 address, or a form of the IPv4 address that cannot be
/// one; it differs between instances.
pub(crate) fn guid(gids: &[Gid], instance: u8) -> u64 {
    let low = gids.first().map_or(1, |gid| {
        let [.., a, b, c, d, e, f, g, h] = gid.raw;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    });
    low ^ u64::from(instance) << 40
}
