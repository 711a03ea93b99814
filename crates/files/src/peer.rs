//! The process at the other end of a socket, as whose user files are accessed.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// Groups for which there is room at first. Few processes have more.
const GROUPS: usize = 64;

/// The supplementary groups of the process that has connected a Unix socket, as it had them at that moment (`SO_PEERGROUPS`).
///
/// # Errors
/// The system's: `ENODATA` if the socket has no such peer.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; GROUPS];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        // SAFETY: the kernel writes numbers of 32 bits, no more than fit into the given bytes, and then the count of their bytes.
        let got = unsafe {
            let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERGROUPS);
            libc::getsockopt(socket.as_raw_fd(), level, name, groups.as_mut_ptr().cast(), &raw mut bytes)
        };
        let count = bytes as usize / size_of::<u32>();
        if got == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if Errno::from_io_error(&error) != Some(Errno::RANGE) || count <= groups.len() {
            return Err(error);
        }
        // The groups of a socket's peer never change.
        groups.resize(count, 0);
    }
}
