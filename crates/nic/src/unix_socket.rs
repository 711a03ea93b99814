//! Sockets by which the processes of a host find each other: in the abstract name space, so within a network name
//! space, and with one message a datagram.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};
use rustix::process::{Pid, Uid};
use terrace_fabric::Gid;
use terrace_sync::Mutex;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// Connections that are accepted at a time: other users connect, too, and must not keep the listener's thread.
const CONNECTIONS_AT_A_TIME: usize = 16;

fn name_of(service: &str, address: SocketAddr) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("terrace/{service}/{address}").as_bytes())
}

fn open() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Listens for clients of this service, as the process that has that address and UDP port.
///
/// # Errors
/// `ADDRINUSE` when another process does; otherwise the system's.
fn listen_as(service: &str, address: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = open()?;
    bind(&socket, &name_of(service, address)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Listens at each of these addresses for clients of this service, and returns the listeners with their GIDs' indexes. They
/// are in the set of descriptors `waits`. An address is left out, with a warning, if its name is taken (names have no
/// owner, so another user may have bound one) or if a security policy does not permit the socket.
///
/// # Errors
/// `MFILE`, `NFILE`, `NOMEM` or `NOBUFS` when descriptors or memory are lacking.
pub(crate) fn listen_at(
    service: &str,
    gids: &[Gid],
    port: u16,
    waits: &OwnedFd,
) -> Result<Vec<(u8, OwnedFd)>, Errno> {
    let mut listeners = Vec::with_capacity(gids.len());
    for (gid_index, gid) in (0u8..).zip(gids) {
        let place = SocketAddr::new(gid.addr.to_canonical(), port);
        let listener =
            listen_as(service, place).and_then(|listener| watch(waits, listener.as_fd()).map(|()| listener));
        match listener {
            Ok(listener) => listeners.push((gid_index, listener)),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)) => return Err(error),
            Err(error) => {
                tracing::warn!(%error, "no socket terrace/{service}/{place}: other processes of this host do not find this one by it");
            }
        }
    }
    Ok(listeners)
}

/// Connects to the process that has that address and UDP port, without waiting.
///
/// # Errors
/// `CONNREFUSED` when no process has, `AGAIN` when its backlog is full.
pub(crate) fn connect_to(service: &str, address: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = open()?;
    connect(&socket, &name_of(service, address)?)?;
    Ok(socket)
}

/// The process at the other end, as the kernel knew it when it connected or began to listen.
pub(crate) struct PeerProcess {
    /// The user.
    pub uid: Uid,
    /// `None` if the process is not in this one's PID namespace, as those of other containers are not.
    pub pid: Option<Pid>,
}

/// The process at the other end; `None` if the kernel does not know it.
pub(crate) fn peer_of(socket: &OwnedFd) -> Option<PeerProcess> {
    // Not by rustix, for which a process without a number here is an error.
    let credentials = getsockopt(socket, PeerCredentials).ok()?;
    Some(PeerProcess { uid: Uid::from_raw(credentials.uid()), pid: Pid::from_raw(credentials.pid()) })
}

/// Whether the process at the other end is of the same user, or of root.
pub(crate) fn is_trusted(socket: &OwnedFd) -> bool {
    peer_of(socket).is_some_and(|peer| peer.uid == rustix::process::geteuid() || peer.uid.is_root())
}

/// Makes the set of descriptors `waits` readable while this descriptor is.
///
/// # Errors
/// The system's.
pub(crate) fn watch(waits: &OwnedFd, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    epoll::add(waits, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
}

/// To be called before a watched descriptor is closed: a child may have it open as well, and it would keep the set
/// readable.
pub(crate) fn unwatch(waits: &OwnedFd, fd: BorrowedFd<'_>) {
    // It can only have been removed before.
    let _ = epoll::delete(waits, fd);
}

/// A descriptor to close when the process has no other left: a connection that could not be accepted would keep its
/// listener readable, and the thread that polls the listener awake, for ever.
pub(crate) struct Spare(Mutex<Option<File>>);

impl Spare {
    pub fn new() -> Spare {
        Spare(Mutex::new(open_spare()))
    }

    /// Gives the descriptor up for `accept`, which takes a connection and closes it.
    fn turn_away(&self, accept: impl FnOnce()) {
        let mut spare = self.0.lock();
        drop(spare.take());
        accept();
        *spare = open_spare();
    }
}

fn open_spare() -> Option<File> {
    File::open("/dev/null").ok()
}

/// Accepts waiting connections, at most [`CONNECTIONS_AT_A_TIME`]. While more wait, the listener stays readable.
pub(crate) fn accept_waiting(listener: impl AsFd, spare: &Spare, mut take: impl FnMut(OwnedFd)) {
    let accept = || accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    for _ in 0..CONNECTIONS_AT_A_TIME {
        match accept() {
            Ok(socket) => take(socket),
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => return spare.turn_away(|| drop(accept())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::process::{Command, Stdio};

    use super::*;

    /// The containers of a Kubernetes pod have one network namespace and PID namespaces of their own.
    #[test]
    fn a_process_of_another_pid_namespace_is_known_by_its_user() {
        const ADDRESS: &str = "PID_TEST_LISTENER";
        let name = "unix_socket::tests::a_process_of_another_pid_namespace_is_known_by_its_user";
        if let Ok(address) = std::env::var(ADDRESS) {
            let socket = connect_to("pid-test", address.parse().expect("an address")).expect("a connection");
            let peer = peer_of(&socket).expect("known to the kernel");
            assert_eq!((peer.uid, peer.pid), (rustix::process::geteuid(), None));
            assert!(is_trusted(&socket));
            return;
        }
        let can_unshare = |arguments: &[&str]| {
            let status = Command::new("unshare").args(arguments).arg("true").stderr(Stdio::null()).status();
            status.is_ok_and(|status| status.success())
        };
        let arguments: &[&str] = if rustix::process::geteuid().is_root() { &["-pf"] } else { &["-rpf"] };
        if !can_unshare(arguments) {
            return eprintln!("skipped: no PID namespaces");
        }
        let address = SocketAddr::from(([127, 84, 7, 10], 4791));
        let listener = listen_as("pid-test", address).expect("a listener");
        let mut child = Command::new("unshare");
        child.args(arguments).arg(std::env::current_exe().expect("this program"));
        child.args(["--exact", name, "--nocapture"]).env(ADDRESS, address.to_string());
        assert!(child.status().expect("a child").success());
        // Seen from outside, the child has a number.
        let spare = Spare::new();
        let mut has_number = false;
        accept_waiting(&listener, &spare, |socket| {
            has_number = peer_of(&socket).is_some_and(|peer| peer.pid.is_some());
        });
        assert!(has_number);
    }

    /// A name that the kernel refuses is like a socket that a security policy does not permit.
    #[test]
    fn a_socket_that_is_not_permitted_is_left_out() {
        let waits = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set of descriptors");
        let addr = IpAddr::from([127, 84, 7, 8]);
        let gid = Gid { raw: [0; 16], addr, interface: String::new(), ifindex: 0 };
        let listeners = listen_at(&"too long ".repeat(20), &[gid], 4791, &waits);
        assert!(listeners.expect("a warning").is_empty());
    }

    /// Processes of any user that connect and close in a loop keep a backlog filled for ever.
    #[test]
    fn a_full_backlog_is_accepted_in_parts() {
        let address = SocketAddr::from(([127, 84, 7, 9], 4791));
        let listener = listen_as("backlog-test", address).expect("a listener");
        let _clients: Vec<_> =
            (0..BACKLOG).map(|_| connect_to("backlog-test", address).expect("a client")).collect();
        let (spare, mut left) = (Spare::new(), BACKLOG as usize);
        while left > 0 {
            let mut count = 0;
            accept_waiting(&listener, &spare, |_| count += 1);
            assert_eq!(count, left.min(CONNECTIONS_AT_A_TIME));
            left -= count;
        }
        accept_waiting(&listener, &spare, |_| panic!("no connection waits"));
    }
}
