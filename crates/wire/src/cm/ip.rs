//! IP addressing (IBTA annex A11, "RDMA IP CM service"): service IDs that contain a port, and the addresses at the
//! beginning of the private data.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of the addresses in the private data of a REQ or SIDR_REQ.
pub const IP_HEADER_BYTES: usize = 36;

/// The namespaces of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
pub enum PortSpace {
    /// Unreliable datagrams in IPoIB's groups.
    Ipoib = 0x0002,
    /// Reliable connections.
    Tcp = 0x0106,
    /// Unreliable datagrams.
    Udp = 0x0111,
    /// Any service, by native names or by port.
    Ib = 0x013f,
}

impl PortSpace {
    /// The namespace with this number.
    pub fn from_number(number: u16) -> Option<PortSpace> {
        use PortSpace::*;
        [Ipoib, Tcp, Udp, Ib].into_iter().find(|space| *space as u16 == number)
    }
}

/// The service ID of a port.
pub fn service_id(space: PortSpace, port: u16) -> u64 {
    (space as u64) << 16 | u64::from(port)
}

/// The namespace and port of a service ID; `None` if it contains no port.
pub fn service_of(service_id: u64) -> Option<(PortSpace, u16)> {
    let space = u16::try_from(service_id >> 16).ok()?;
    Some((PortSpace::from_number(space)?, service_id as u16))
}

/// The addresses at the beginning of the private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpHeader {
    /// The active side's port.
    pub source_port: u16,
    /// The active side's address.
    pub source: IpAddr,
    /// The address to which the active side connects, of the same family.
    pub destination: IpAddr,
}

/// The reason why private data does not begin with valid addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IpHeaderError {
    /// The private data is too short.
    #[error("{0} bytes are too few")]
    Length(usize),
    /// Not version 0 of the annex.
    #[error("version {0:#x}")]
    Version(u8),
    /// Neither IPv4 nor IPv6.
    #[error("IP version {0}")]
    Family(u8),
}

impl IpHeader {
    /// Reads the addresses from the beginning of private data.
    ///
    /// # Errors
    /// See [`IpHeaderError`].
    pub fn decode(private_data: &[u8]) -> Result<IpHeader, IpHeaderError> {
        let Some(bytes) = private_data.first_chunk::<IP_HEADER_BYTES>() else {
            return Err(IpHeaderError::Length(private_data.len()));
        };
        if bytes[0] != 0 {
            return Err(IpHeaderError::Version(bytes[0]));
        }
        let address = |at: usize| -> Result<IpAddr, IpHeaderError> {
            let mut raw = [0; 16];
            raw.copy_from_slice(&bytes[at..at + 16]);
            match bytes[1] >> 4 {
                4 => Ok(Ipv4Addr::new(raw[12], raw[13], raw[14], raw[15]).into()),
                6 => Ok(Ipv6Addr::from(raw).into()),
                other => Err(IpHeaderError::Family(other)),
            }
        };
        let source_port = u16::from_be_bytes([bytes[2], bytes[3]]);
        Ok(IpHeader { source_port, source: address(4)?, destination: address(20)? })
    }

    /// Writes the addresses. Addresses of different families are both written as IPv6.
    pub fn encode(&self) -> [u8; IP_HEADER_BYTES] {
        let mut bytes = [0; IP_HEADER_BYTES];
        let v4 = self.source.is_ipv4() && self.destination.is_ipv4();
        bytes[1] = if v4 { 0x40 } else { 0x60 };
        bytes[2..4].copy_from_slice(&self.source_port.to_be_bytes());
        for (at, address) in [(4, self.source), (20, self.destination)] {
            let raw = match address {
                IpAddr::V4(address) if v4 => {
                    let mut raw = [0; 16];
                    raw[12..].copy_from_slice(&address.octets());
                    raw
                }
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            };
            bytes[at..at + 16].copy_from_slice(&raw);
        }
        bytes
    }
}
