//! The one socket option that has no safe interface. It has nothing to do with memory, but this crate may have unsafe
//! code, and the code that opens a port of a NIC depends on this crate.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `UDP_NO_CHECK6_RX` of `linux/udp.h`.
const UDP_NO_CHECK6_RX: i32 = 102;

/// Lets an IPv6 UDP socket receive datagrams without a UDP checksum, which it refuses otherwise. The kernel's rxe sends
/// no checksum: the invariant CRC covers its packets.
///
/// # Errors
/// The system's.
pub fn accept_without_checksum(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, UDP_NO_CHECK6_RX)
}

/// Switches a UDP option on.
fn set(socket: BorrowedFd<'_>, option: i32) -> io::Result<()> {
    let on: i32 = 1;
    // SAFETY: an open socket, and an integer of the size that is given.
    let failed = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_UDP,
            option,
            (&raw const on).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv6Addr, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    /// `UDP_NO_CHECK6_TX`.
    const NO_CHECK6_TX: i32 = 101;

    #[test]
    fn datagrams_without_a_checksum_are_received() {
        let Ok(sender) = UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)) else {
            return println!("skipped: no IPv6 here");
        };
        let [strict, lenient] =
            [(); 2].map(|()| UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).expect("a socket"));
        accept_without_checksum(lenient.as_fd()).expect("the option exists");
        set(sender.as_fd(), NO_CHECK6_TX).expect("the option exists");
        for receiver in [&strict, &lenient] {
            receiver.set_nonblocking(true).expect("a socket");
            sender.send_to(b"data", receiver.local_addr().expect("bound")).expect("sent");
        }
        // The loopback delivers before `send_to` returns.
        assert_eq!(lenient.recv(&mut [0; 8]).expect("it is there"), 4);
        assert_eq!(strict.recv(&mut [0; 8]).expect_err("dropped").kind(), io::ErrorKind::WouldBlock);
    }
}
