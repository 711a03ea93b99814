//! Errors of opening a port. Each message names a remedy.

use std::io;
use std::net::IpAddr;

use nix::errno::Errno;

/// The reason why a [`UdpPort`](super::UdpPort) did not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The requested address is not local.
    #[error(
        "{addr} is not an address of this machine (it has: {available}); choose one of those with --addr or TERRACE_ADDR"
    )]
    NotLocal {
        /// The requested address.
        addr: IpAddr,
        /// The machine's addresses, with their interfaces.
        available: String,
    },
    /// The requested address is not a unicast address.
    #[error(
        "{addr} is not the address of one interface (it is {kind}); choose an interface's own with --addr or TERRACE_ADDR"
    )]
    NotUnicast {
        /// The requested address.
        addr: IpAddr,
        /// The kind of address.
        kind: &'static str,
    },
    /// No interface is up, not even the loopback.
    #[error("no network interface with an address is up; `ip link set lo up` gives the machine its loopback")]
    NoInterface,
    /// The requested instance index, or every one, is in use.
    #[error(
        "UDP {ports} of {addr} already in use: by other Terrace processes, another RoCEv2 stack or the kernel's rxe (`ss -unlp` shows by which); end one of them, or choose another address with --addr or TERRACE_ADDR"
    )]
    PortsInUse {
        /// The address.
        addr: IpAddr,
        /// "port 4791 is" or "ports 4791 to 5046 are".
        ports: String,
    },
    /// The path MTU is not one of RoCE's.
    #[error("{mtu} is not a path MTU; choose 256, 512, 1024, 2048 or 4096 with --mtu or TERRACE_MTU")]
    BadMtu {
        /// The requested path MTU.
        mtu: u32,
    },
    /// The interface's MTU is too small for the smallest path MTU.
    #[error(
        "interface {interface} carries only {interface_mtu} bytes per packet, too few for RoCE's smallest path MTU (256); raise it with `ip link set {interface} mtu 1500`"
    )]
    InterfaceMtu {
        /// Name of the interface.
        interface: String,
        /// Its MTU in bytes.
        interface_mtu: u32,
    },
    /// The process or the system has reached its limit of file descriptors.
    #[error("out of file descriptors while opening a UDP socket; raise the limit with `ulimit -n`")]
    OutOfDescriptors,
    /// The local addresses cannot be listed.
    #[error("cannot list the addresses of this machine: {0}")]
    Unlisted(#[source] io::Error),
    /// Any other system error.
    #[error("cannot {action} on {addr}: {source}")]
    Io {
        /// The failed action.
        action: &'static str,
        /// The address.
        addr: IpAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

impl OpenError {
    /// Classifies a system error.
    pub(super) fn from_io(action: &'static str, addr: IpAddr, source: io::Error) -> OpenError {
        match source.raw_os_error() {
            Some(nix::libc::EMFILE | nix::libc::ENFILE) => OpenError::OutOfDescriptors,
            _ => OpenError::Io { action, addr, source },
        }
    }

    /// Classifies an error of listing the addresses.
    pub(super) fn unlisted(errno: Errno) -> OpenError {
        match errno {
            Errno::EMFILE | Errno::ENFILE => OpenError::OutOfDescriptors,
            other => OpenError::Unlisted(other.into()),
        }
    }
}
