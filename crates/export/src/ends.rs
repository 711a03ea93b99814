//! Our ends of a connection's queue pairs.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use terrace_nic::rc::{self, RNR_RETRIES, TIMEOUT, connect, initialize, new_pair};
use terrace_nic::{Cq, CqInit, Device, Error, Path, Pd, QpCap, QueuePair};
use terrace_node::{Control, Endpoint};

use crate::proto::QueuePairs;

/// `ibv_access_flags` of a server's queue pairs for one-sided accesses: WRITE, READ, and both placements of FLUSH.
pub const SERVED_ACCESS: u32 = 1 << 1 | 1 << 2 | 1 << 8 | 1 << 9;

/// A queue pair for one-sided accesses that is not connected yet.
pub struct OpenPair {
    pub qp: Arc<QueuePair>,
    pub endpoint: Endpoint,
}

impl OpenPair {
    /// Creates a queue pair for up to `depth` requests of ours; 0 for a server's.
    pub fn new(pd: &Arc<Pd>, cq: &Arc<Cq>, depth: u32) -> Result<OpenPair, Error> {
        let cap =
            QpCap { max_send_wr: depth, max_send_sge: if depth > 0 { 2 } else { 0 }, ..QpCap::default() };
        let (qp, endpoint) = new_pair(pd, cq, cap)?;
        Ok(OpenPair { qp, endpoint })
    }

    /// Connects it to the peer's end. Files may be cold, so RNR NAKs have no limit. `access` (`ibv_access_flags`) is what
    /// the peer may do over it.
    pub fn connect(&self, remote: Path, peer: Endpoint, access: u32) -> Result<(), Error> {
        initialize(&self.qp, access)?;
        connect(&self.qp, self.endpoint, remote, peer, TIMEOUT, RNR_RETRIES)
    }
}

/// The queue pairs of a connection.
pub struct Ends {
    pub control: Control,
    pub data: OpenPair,
    pub append: OpenPair,
}

impl Ends {
    /// Creates them.
    pub fn new(pd: &Arc<Pd>, control_cq: &Arc<Cq>, data_cq: &Arc<Cq>, depth: u32) -> Result<Ends, Error> {
        let control = Control::new(pd, control_cq)?;
        let pairs = OpenPair::new(pd, data_cq, depth).and_then(|data| {
            let append = OpenPair::new(pd, data_cq, depth);
            append.inspect_err(|_| destroy(&data.qp)).map(|append| (data, append))
        });
        match pairs {
            Ok((data, append)) => Ok(Ends { control, data, append }),
            Err(error) => {
                control.close();
                Err(error)
            }
        }
    }

    /// What the peer has to know of them.
    pub fn describe(&self, gid: [u8; 16]) -> QueuePairs {
        QueuePairs {
            gid,
            control: self.control.endpoint(),
            data: self.data.endpoint,
            append: self.append.endpoint,
        }
    }

    /// Destroys them.
    pub fn close(&self) {
        self.control.close();
        destroy(&self.data.qp);
        destroy(&self.append.qp);
    }
}

/// The protection domain of a connection, and the completion queues that are its own. Both end with the last user.
pub struct Domain {
    pub pd: Arc<Pd>,
    cqs: Vec<Arc<Cq>>,
}

impl Domain {
    /// A protection domain without completion queues of its own.
    pub fn new(device: &Arc<Device>) -> Result<Domain, Error> {
        Ok(Domain { pd: device.alloc_pd()?, cqs: Vec::new() })
    }

    /// A completion queue that ends with the domain.
    pub fn create_cq(&mut self, device: &Arc<Device>, depth: u32) -> Result<Arc<Cq>, Error> {
        let cq = device.create_cq(CqInit { depth, channel: None, cookie: 0 })?;
        self.cqs.push(cq.clone());
        Ok(cq)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Queue pairs and regions of the domain are destroyed before. Nothing else makes these calls fail.
        for cq in &self.cqs {
            let _ = cq.destroy();
        }
        let _ = self.pd.dealloc();
    }
}

/// Destroys a queue pair. Work requests in flight are lost.
pub fn destroy(qp: &Arc<QueuePair>) {
    // This fails only for one that is destroyed already.
    let _ = qp.destroy();
}

/// The path to a queue pair of a peer with this GID.
pub fn path_to(device: &Device, gid: [u8; 16], qpn: u32) -> Result<Path, Error> {
    let path = rc::path_to(device, address_of(gid), qpn)?;
    path.ok_or(Error::Invalid("no local address of the peer's family"))
}

/// The device's GID of the same family as an address.
pub fn gid_for(device: &Device, peer: IpAddr) -> Option<[u8; 16]> {
    let is_ipv4 = peer.to_canonical().is_ipv4();
    let own = device.gids().iter().find(|own| own.addr.is_ipv4() == is_ipv4)?;
    Some(gid_of(own.addr))
}

/// The GID of an address.
pub fn gid_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address of a GID.
pub fn address_of(gid: [u8; 16]) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(gid)).to_canonical()
}
