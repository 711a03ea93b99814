//! A datagram that asks, of which the sender hears if the peer's host refuses it: nobody has the port.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use super::open::address_of;
use super::socket::{Sent, UdpSocket};
use crate::{Gid, TxBatch};

/// Room for what comes back to the probe's own port, which is nothing.
const RECEIVE_BUFFER_BYTES: usize = 2048;

/// One such datagram. It leaves from a port of its own, so that a refusal is about nothing else, and so that who does not see it has
/// to guess the port before it can forge one.
#[derive(Debug)]
pub struct Probe(UdpSocket);

impl Probe {
    /// Sends a batch of one packet from an address of this host.
    ///
    /// # Errors
    /// The system's; `InvalidInput` for an empty batch.
    pub fn send(gid: &Gid, batch: &mut TxBatch) -> io::Result<Probe> {
        let socket = UdpSocket::bind(address_of(gid, 0), RECEIVE_BUFFER_BYTES, None)?.hearing_errors()?;
        let Some((run, bytes)) = batch.front() else { return Err(io::ErrorKind::InvalidInput.into()) };
        match socket.send(&run, bytes, run.count) {
            Sent::All | Sent::WouldBlock | Sent::SegmentationRefused => Ok(Probe(socket)),
            Sent::Failed(error) => Err(error),
        }
    }

    /// What has become of it, if anything is known: `ConnectionRefused` if nobody has the port.
    pub fn take_error(&self) -> Option<io::Error> {
        self.0.take_error()
    }
}

/// It has an error (`POLLERR`) once it was refused.
impl AsFd for Probe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
