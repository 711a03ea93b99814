//! Which NIC this process has: what the environment asks for, opened; and what must be known of it without opening.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use terrace_nic::{Device, DeviceConfig, Error, Gid, OpenError, PortConfig};

use crate::errno::{Errno, Result};
use crate::log;

/// What does not change while the process lives.
pub struct Identity {
    /// Host value of the node GUID.
    pub node_guid: u64,
    /// The GID table.
    pub gids: Vec<Gid>,
}

static IDENTITY: OnceLock<Identity> = OnceLock::new();

/// Opens a NIC as `TERRACE_ADDR` and its like say.
///
/// # Errors
/// The errno that fits; what is wrong went to standard error in one line, since an errno cannot say it.
pub fn open_device() -> Result<Arc<Device>> {
    log::install();
    let device = open(port()?, |_| ())?;
    IDENTITY.get_or_init(|| describe(&device));
    Ok(device)
}

/// The identity; opens a NIC for a moment if the process has had none so far.
///
/// # Errors
/// As for [`open_device`].
pub fn get() -> Result<&'static Identity> {
    if let Some(identity) = IDENTITY.get() {
        return Ok(identity);
    }
    log::install();
    // Nothing is sent, so there is nothing to spoil and nothing to capture.
    let port = PortConfig { fault_plan: None, pcap: None, ..port()? };
    let device = open(port, |config| (config.engine, config.stat_socket) = (false, false))?;
    let identity = IDENTITY.get_or_init(|| describe(&device));
    device.close();
    Ok(identity)
}

fn port() -> Result<PortConfig> {
    let mut config = PortConfig::from_env().map_err(unopened)?;
    config.socket_hook = Some(accept_without_checksum);
    Ok(config)
}

fn open(port: PortConfig, adjust: impl FnOnce(&mut DeviceConfig)) -> Result<Arc<Device>> {
    let port = port.open().map_err(unopened)?;
    let mut config = DeviceConfig::new(port);
    adjust(&mut config);
    Device::open(config).map_err(|error| {
        let advice = match error.errno() {
            libc::EMFILE => "; raise the limit with `ulimit -n`",
            _ => "",
        };
        complain(&format_args!("cannot open the device: {error}{advice}"), error.errno())
    })
}

fn unopened(error: OpenError) -> Errno {
    complain(&error, Error::from(&error).errno())
}

fn describe(device: &Device) -> Identity {
    Identity { node_guid: device.node_guid(), gids: device.gids().to_vec() }
}

/// Tells the user, who sees only "No IB devices found" or an errno otherwise.
fn complain(error: &dyn std::fmt::Display, errno: i32) -> Errno {
    eprintln!("terrace: {error}");
    Errno(errno)
}

/// `UDP_NO_CHECK6_RX` of `linux/udp.h`.
const UDP_NO_CHECK6_RX: i32 = 102;

/// The kernel's rxe sends no UDP checksum, which IPv6 sockets refuse unless told otherwise; the ICRC covers the packet.
fn accept_without_checksum(socket: BorrowedFd<'_>) -> std::io::Result<()> {
    let on: i32 = 1;
    // SAFETY: an open socket, and an integer of the size that is given.
    let failed = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_UDP,
            UDP_NO_CHECK6_RX,
            (&raw const on).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if failed == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
