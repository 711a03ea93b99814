//! The host's registry of bound addresses and ports, and of the processes that listen there.
//!
//! The standard sends a connection request to UDP port 4791 of an address, which is the port of instance index 0.
//! Several processes may share the address. Each listening process is therefore recorded in the names of sockets in the
//! abstract namespace, which every process of the host can read. The kernel gives a name to one process only, frees it
//! when the process ends in any manner, and separates the names of network namespaces, as it does addresses.
//!
//! A process that binds an address and port binds one such name, which excludes other processes. When it listens, it
//! binds a second name, which contains its instance index. A requester that finds the second name may send its request.

use std::fmt::Write;
use std::io;
use std::net::IpAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use terrace_wire::cm::PortSpace;

use crate::errno::Errno;

/// A bound address and port. Dropping it unbinds them.
pub struct Claim {
    name: String,
    _bound: UnixDatagram,
    /// The second name's socket while the process listens.
    listening: Option<UnixDatagram>,
}

fn socket_name(space: PortSpace, port: u16, address: IpAddr) -> String {
    format!("terrace-cm/{:x}/{port}/{}", space as u16, address.to_canonical())
}

fn bind(name: &str) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

fn errno_of(error: io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Binds an address and port.
///
/// # Errors
/// EADDRINUSE if they are bound already; else the kernel's error.
pub fn claim(space: PortSpace, port: u16, address: IpAddr) -> Result<Claim, Errno> {
    let name = socket_name(space, port, address);
    let bound = bind(&name).map_err(errno_of)?;
    Ok(Claim { name, _bound: bound, listening: None })
}

impl Claim {
    /// Publishes that the process with this instance index listens.
    ///
    /// # Errors
    /// EADDRINUSE if another process listens there; else the kernel's error.
    pub fn listen(&mut self, instance: u8) -> Result<(), Errno> {
        let mut name = self.name.clone();
        write!(name, "/slot/{instance}").map_err(|_| Errno(libc::ENOMEM))?;
        self.listening = Some(bind(&name).map_err(errno_of)?);
        Ok(())
    }

    /// Withdraws what [`Claim::listen`] has published.
    pub fn stop_listening(&mut self) {
        self.listening = None;
    }
}

/// The instance index of the process that listens at an address and port.
pub fn find(space: PortSpace, port: u16, address: IpAddr) -> Option<u8> {
    find_in(&terrace_names(), &socket_name(space, port, address))
}

/// As [`find`], from a list that may be some milliseconds old. Used for peers' requests, whose rate is not limited.
pub fn find_cached(space: PortSpace, port: u16, address: IpAddr) -> Option<u8> {
    const AGE_MAX: Duration = Duration::from_millis(20);
    static LIST: Mutex<Option<(Instant, String)>> = Mutex::new(None);
    // Another thread holds the lock, or held it when this process was forked.
    let Ok(mut list) = LIST.try_lock() else { return find(space, port, address) };
    let fresh = list.take().filter(|(read_at, _)| read_at.elapsed() < AGE_MAX);
    let (_, names) = list.insert(fresh.unwrap_or_else(|| (Instant::now(), terrace_names())));
    find_in(names, &socket_name(space, port, address))
}

/// The lines of the kernel's list of sockets that contain this module's names.
fn terrace_names() -> String {
    let all = std::fs::read("/proc/net/unix").unwrap_or_default();
    // The names of other programs' sockets are any bytes.
    let all = String::from_utf8_lossy(&all);
    all.lines().filter(|line| line.contains(" @terrace-cm/")).fold(String::new(), |mut own, line| {
        own.push_str(line);
        own.push('\n');
        own
    })
}

fn find_in(names: &str, name_prefix: &str) -> Option<u8> {
    names.lines().find_map(|line| {
        let (_, name) = line.split_once(" @")?;
        name.strip_prefix(name_prefix)?.strip_prefix("/slot/")?.trim_end_matches('@').parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_bound_once_and_names_its_listener() {
        let address = IpAddr::from([127, 0, 0, 58]);
        let claim_again = || claim(PortSpace::Tcp, 7174, address);
        let mut first = claim_again().expect("free");
        assert_eq!(claim_again().err(), Some(Errno(libc::EADDRINUSE)));
        // Any process of the host may have a socket with a name of any bytes.
        let any_bytes = [&b"terrace-test-\xff"[..], &std::process::id().to_ne_bytes()].concat();
        let _foreign = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(any_bytes).expect("a name"))
            .expect("free");
        // A bound address has no listener yet: a request would be rejected.
        assert_eq!(find(PortSpace::Tcp, 7174, address), None);
        first.listen(3).expect("free");
        assert_eq!(find(PortSpace::Tcp, 7174, address), Some(3));
        assert_eq!(find_cached(PortSpace::Tcp, 7174, address), Some(3));
        assert_eq!(find(PortSpace::Udp, 7174, address), None);
        assert_eq!(find(PortSpace::Tcp, 717, address), None);
        // Where another address of the same identifier could not be published.
        first.stop_listening();
        assert_eq!(find(PortSpace::Tcp, 7174, address), None);
        first.listen(3).expect("free again");
        drop(first);
        assert_eq!(find(PortSpace::Tcp, 7174, address), None);
        drop(claim_again().expect("free again"));
    }

    #[test]
    fn foreign_names_are_ignored() {
        let names = "Num RefCount Protocol Flags Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 1 @terrace-cm/106/1/::1\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 2 @terrace-cm/106/1/::1/slot/x\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 2 @terrace-cm/106/1/::1/slot/7\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 3\n";
        assert_eq!(find_in(names, "terrace-cm/106/1/::1"), Some(7));
        assert_eq!(find_in(names, "terrace-cm/106/1/::2"), None);
    }
}
