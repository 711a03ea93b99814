//! Opening of the process's NIC as the environment configures it, and its identity without an open NIC.

use std::sync::{Arc, OnceLock};

use terrace_nic::{Device, DeviceConfig, DeviceName, Error, Gid, OpenError, PathChoice, PortConfig};

use crate::errno::{Errno, Result};
use crate::log;
use crate::once::once;

/// Values that do not change during the process's life.
pub struct Identity {
    /// The node GUID in host byte order.
    pub node_guid: u64,
    /// The GID table.
    pub gids: Vec<Gid>,
}

/// Set under the lock of [`once`].
static IDENTITY: OnceLock<Identity> = OnceLock::new();

/// Opens a NIC as configured by `TERRACE_ADDR` and the other variables.
///
/// # Errors
/// The matching errno. One line on standard error describes the problem.
pub fn open_device() -> Result<Arc<Device>> {
    let _once = once();
    log::install();
    let device = open(port()?, |_| ())?;
    IDENTITY.get_or_init(|| describe(&device));
    Ok(device)
}

/// Opens another NIC with instance index 0, if that is free. The NIC forwards packets.
///
/// # Errors
/// The matching errno. No line is written, because the program did not request this NIC.
pub fn open_demultiplexer() -> Result<Arc<Device>> {
    let _once = once();
    // Without a fault plan a forwarded packet is not corrupted twice.
    let port = PortConfig { slot: Some(0), fault_plan: None, ..port()? };
    let port = port.open().map_err(|error| Errno(Error::from(&error).errno()))?;
    Device::open(DeviceConfig::new(port)).map_err(|error| Errno(error.errno()))
}

/// The identity. Opens and closes a NIC if the identity is unknown.
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
    // The NIC sends nothing, so it needs neither a fault plan nor a capture.
    let port = PortConfig { fault_plan: None, pcap: None, path: PathChoice::Udp, ..port()? };
    let device = open(port, |config| (config.engine, config.stat_socket) = (false, false))?;
    let identity = IDENTITY.get_or_init(|| describe(&device));
    device.close();
    Ok(identity)
}

fn port() -> Result<PortConfig> {
    DeviceName::from_env().and_then(|_| PortConfig::from_env()).map_err(report_open_error)
}

fn open(port: PortConfig, adjust: impl FnOnce(&mut DeviceConfig)) -> Result<Arc<Device>> {
    let mut config = port.device().map_err(report_open_error)?;
    adjust(&mut config);
    Device::open(config).map_err(|error| {
        let advice = match error.errno() {
            libc::EMFILE => "; raise the limit with `ulimit -n`",
            _ => "",
        };
        report(&format_args!("cannot open the device: {error}{advice}"), error.errno())
    })
}

fn report_open_error(error: OpenError) -> Errno {
    report(&error, Error::from(&error).errno())
}

fn describe(device: &Device) -> Identity {
    Identity { node_guid: device.node_guid(), gids: device.gids().to_vec() }
}

/// Writes a line for the user, who otherwise gets only "No IB devices found" or an errno.
fn report(error: &dyn std::fmt::Display, errno: i32) -> Errno {
    log::write_line(error);
    Errno(errno)
}
