//! Which process of this host listens at which address and port.
//!
//! A connection request goes to an address, and by the standard that means UDP port 4791: slot 0. The process that
//! listens for a service, of several processes at one address, is therefore recorded where every process of the host
//! can read it: in the names of sockets in the abstract namespace. The kernel gives a name to one process only, frees
//! it when the process ends in any manner, and keeps the names of network namespaces apart, as it does addresses.
//!
//! A process that binds an address and port has one such name, so that there is only one; once it listens there it has
//! a second name, which contains its slot. A requester that finds the second name may send its request.

use std::fmt::Write;
use std::io;
use std::net::IpAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use terrace_wire::cm::PortSpace;

use crate::errno::Errno;

/// An address and port that are bound until this is dropped.
pub struct Claim {
    name: String,
    _place: UnixDatagram,
    /// Some while the process listens there.
    listens: Option<UnixDatagram>,
}

fn place(space: PortSpace, port: u16, address: IpAddr) -> String {
    format!("terrace-cm/{:x}/{port}/{}", space as u16, address.to_canonical())
}

fn bind(name: &str) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

fn failed(error: io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}

/// Binds an address and port.
///
/// # Errors
/// EADDRINUSE if it is bound already; else the system's.
pub fn claim(space: PortSpace, port: u16, address: IpAddr) -> Result<Claim, Errno> {
    let name = place(space, port, address);
    let place = bind(&name).map_err(failed)?;
    Ok(Claim { name, _place: place, listens: None })
}

impl Claim {
    /// Publishes that the process with that slot listens there.
    ///
    /// # Errors
    /// EADDRINUSE if another process listens there; else the system's.
    pub fn listen(&mut self, slot: u8) -> Result<(), Errno> {
        let mut name = self.name.clone();
        write!(name, "/slot/{slot}").map_err(|_| Errno(libc::ENOMEM))?;
        self.listens = Some(bind(&name).map_err(failed)?);
        Ok(())
    }
}

/// The slot of the process that listens at an address and port.
pub fn find(space: PortSpace, port: u16, address: IpAddr) -> Option<u8> {
    let names = std::fs::read_to_string("/proc/net/unix").ok()?;
    find_in(&names, &place(space, port, address))
}

/// The same, from a list that may be some milliseconds old: for peers' requests, whose rate is not limited.
pub fn find_lately(space: PortSpace, port: u16, address: IpAddr) -> Option<u8> {
    const AGE_MAX: Duration = Duration::from_millis(20);
    static LIST: Mutex<Option<(Instant, String)>> = Mutex::new(None);
    // Another thread holds it, or held it when this process was forked.
    let Ok(mut list) = LIST.try_lock() else { return find(space, port, address) };
    let fresh = list.take().filter(|(read_at, _)| read_at.elapsed() < AGE_MAX);
    let (_, names) = list.insert(fresh.unwrap_or_else(|| (Instant::now(), own_names())));
    find_in(names, &place(space, port, address))
}

/// The lines of the list of sockets that are ours.
fn own_names() -> String {
    let all = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    all.lines().filter(|line| line.contains(" @terrace-cm/")).fold(String::new(), |mut own, line| {
        own.push_str(line);
        own.push('\n');
        own
    })
}

fn find_in(names: &str, place: &str) -> Option<u8> {
    names.lines().find_map(|line| {
        let (_, name) = line.split_once(" @")?;
        name.strip_prefix(place)?.strip_prefix("/slot/")?.trim_end_matches('@').parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_taken_once_and_says_where() {
        let address = IpAddr::from([127, 0, 0, 58]);
        let claim_it = || claim(PortSpace::Tcp, 7174, address);
        let mut first = claim_it().expect("free");
        assert_eq!(claim_it().err(), Some(Errno(libc::EADDRINUSE)));
        // Bound is not listening: a request now would be refused.
        assert_eq!(find(PortSpace::Tcp, 7174, address), None);
        first.listen(3).expect("free");
        assert_eq!(find(PortSpace::Tcp, 7174, address), Some(3));
        assert_eq!(find(PortSpace::Udp, 7174, address), None);
        assert_eq!(find(PortSpace::Tcp, 717, address), None);
        drop(first);
        assert_eq!(find(PortSpace::Tcp, 7174, address), None);
        drop(claim_it().expect("free again"));
    }

    #[test]
    fn foreign_names_are_passed_over() {
        let names = "Num RefCount Protocol Flags Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 1 @terrace-cm/106/1/::1\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 2 @terrace-cm/106/1/::1/slot/x\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 2 @terrace-cm/106/1/::1/slot/7\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 3\n";
        assert_eq!(find_in(names, "terrace-cm/106/1/::1"), Some(7));
        assert_eq!(find_in(names, "terrace-cm/106/1/::2"), None);
    }
}
