//! Which NIC this process has: what the environment asks for, opened; and what must be known of it without opening.

use std::sync::{Arc, OnceLock};

use terrace_nic::{Device, DeviceConfig, Error, Gid, OpenError, PathChoice, PortConfig};

use crate::errno::{Errno, Result};
use crate::{fork, log};

/// What does not change while the process lives.
pub struct Identity {
    /// Host value of the node GUID.
    pub node_guid: u64,
    /// The GID table.
    pub gids: Vec<Gid>,
}

/// Set with [`fork::once`].
static IDENTITY: OnceLock<Identity> = OnceLock::new();

/// Opens a NIC as `TERRACE_ADDR` and its like say.
///
/// # Errors
/// The errno that fits; what is wrong went to standard error in one line, since an errno cannot say it.
pub fn open_device() -> Result<Arc<Device>> {
    let _once = fork::once();
    log::install();
    let device = open(port()?, |_| ())?;
    IDENTITY.get_or_init(|| describe(&device));
    Ok(device)
}

/// Opens another NIC, in slot 0, if that is free: for packets that the process passes on.
///
/// # Errors
/// The errno that fits. Nobody is told: it is nothing that was asked for.
pub fn open_front() -> Result<Arc<Device>> {
    let _once = fork::once();
    // What it passes on must not be spoiled twice.
    let port = PortConfig { slot: Some(0), fault_plan: None, ..port()? };
    let port = port.open().map_err(|error| Errno(Error::from(&error).errno()))?;
    Device::open(DeviceConfig::new(port)).map_err(|error| Errno(error.errno()))
}

/// The identity; opens a NIC for a moment if the process has had none so far.
///
/// # Errors
/// As for [`open_device`].
pub fn get() -> Result<&'static Identity> {
    if let Some(identity) = IDENTITY.get() {
        return Ok(identity);
    }
    let _once = fork::once();
    // Another thread may have been faster.
    if let Some(identity) = IDENTITY.get() {
        return Ok(identity);
    }
    log::install();
    // Nothing is sent, so there is nothing to spoil and nothing to capture.
    let port = PortConfig { fault_plan: None, pcap: None, path: PathChoice::Udp, ..port()? };
    let device = open(port, |config| (config.engine, config.stat_socket) = (false, false))?;
    let identity = IDENTITY.get_or_init(|| describe(&device));
    device.close();
    Ok(identity)
}

fn port() -> Result<PortConfig> {
    PortConfig::from_env().map_err(unopened)
}

fn open(port: PortConfig, adjust: impl FnOnce(&mut DeviceConfig)) -> Result<Arc<Device>> {
    let mut config = port.device().map_err(unopened)?;
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
    log::tell_user(error);
    Errno(errno)
}
