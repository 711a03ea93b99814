//! A probe datagram, whose sender gets an error if the port is closed on the peer's host.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use super::open::address_of;
use super::socket::{Sent, UdpSocket};
use crate::{Gid, TxBatch};

/// Receive buffer of the probe's port, which receives nothing.
const RECEIVE_BUFFER_BYTES: usize = 2048;

/// A probe. It is sent from a separate port, so that an ICMP error concerns only the probe. An off-path attacker would
/// have to guess that port to forge an error.
#[derive(Debug)]
pub struct Probe(UdpSocket);

impl Probe {
    /// Sends a batch of one packet from an address of this host.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` for an empty batch.
    pub fn send(gid: &Gid, batch: &mut TxBatch) -> io::Result<Probe> {
        let socket = UdpSocket::bind(address_of(gid, 0), RECEIVE_BUFFER_BYTES, None)?.with_icmp_errors()?;
        let Some((run, bytes)) = batch.first() else { return Err(io::ErrorKind::InvalidInput.into()) };
        match socket.send(&run, bytes, run.count) {
            Sent::All | Sent::WouldBlock | Sent::SegmentationRefused => Ok(Probe(socket)),
            Sent::Failed(error) => Err(error),
        }
    }

    /// The result, if known: `ConnectionRefused` if the port is closed.
    pub fn take_error(&self) -> Option<io::Error> {
        self.0.take_error()
    }
}

/// The descriptor reports `POLLERR` after an ICMP error.
impl AsFd for Probe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
