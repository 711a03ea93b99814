//! The process's NIC as the environment configures it, and its identity without an open NIC.

use std::sync::{Arc, OnceLock};

use terrace_nic::{Device, DeviceConfig, Error, Gid, OpenError, PathChoice, PortConfig};

use crate::errno::{Errno, Result};
use crate::log;
use crate::once::once;

/// Values that stay the same while the process lives.
pub struct Identity {
    /// Host value of the node GUID.
    pub node_guid: u64,
    /// The GID table.
    pub gids: Vec<Gid>,
}

/// Set with [`once`] held.
static IDENTITY: OnceLock<Identity> = OnceLock::new();

/// Opens a NIC as configured by `TERRACE_ADDR` and the other variables.
///
/// # Errors
/// The errno that fits; one line on standard error says what is wrong, since an errno cannot.
pub fn open_device() -> Result<Arc<Device>> {
    let _once = once();
    log::install();
    let device = open(port()?, |_| ())?;
    IDENTITY.get_or_init(|| describe(&device));
    Ok(device)
}

/// Opens another NIC, in slot 0, if that is free: for packets that the process forwards.
///
/// # Errors
/// The errno that fits. The user is not told: the program did not ask for this NIC.
pub fn open_front() -> Result<Arc<Device>> {
    let _once = once();
    // A forwarded packet must not be corrupted twice.
    let port = PortConfig { slot: Some(0), fault_plan: None, ..port()? };
    let port = port.open().map_err(|error| Errno(Error::from(&error).errno()))?;
    Device::open(DeviceConfig::new(port)).map_err(|error| Errno(error.errno()))
}

/// The identity; opens and closes a NIC if the process has had none so far.
///
/// # Errors
/// As for [`open_device`].
pub fn get() -> Result<&'static Identity> {
    if let Some(identity) = IDENTITY.get() {
        return Ok(identity);
    }
    let _once = once();
    // Another thread may have set it meanwhile.
    if let Some(identity) = IDENTITY.get() {
        return Ok(identity);
    }
    log::install();
    // Nothing is sent, so there is nothing to corrupt and nothing to capture.
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

/// Tells the user, who otherwise sees only "No IB devices found" or an errno.
fn complain(error: &dyn std::fmt::Display, errno: i32) -> Errno {
    log::tell_user(error);
    Errno(errno)
}
