//! Opens a port from the user's configuration.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, io};

use terrace_fabric::Port;
use terrace_fabric::fault::FaultyPort;
use terrace_fabric::pcap::{self, PcapPort};
use terrace_fabric::udp::{self, UdpConfig, UdpPort};
use terrace_faults::{FaultPlanError, Faults};

use crate::device::DeviceConfig;
use crate::error::Error;
use crate::model::NicModel;

/// How to open the device's port. A capture wraps the UDP sockets, and a fault plan wraps the capture: so the capture
/// shows what goes over the wire.
#[derive(Clone, Debug, Default)]
pub struct PortConfig {
    /// The local address; `None` chooses.
    pub address: Option<IpAddr>,
    /// The largest path MTU in bytes; `None` takes what fits.
    pub mtu: Option<u32>,
    /// The instance index; `None` takes the first that is free.
    pub slot: Option<u8>,
    /// A file with faults to inject.
    pub fault_plan: Option<PathBuf>,
    /// A file to capture packets to. A device that finds it in use by another one puts its instance index into the name.
    pub pcap: Option<PathBuf>,
    /// The path to same-host peers.
    pub path: PathChoice,
    /// What the NIC knows of absent memory.
    pub model: NicModel,
}

/// The path by which same-host peers are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathChoice {
    /// Without packets where that is possible; by packets only if there is a capture or a fault plan.
    #[default]
    Auto,
    /// By packets only.
    Udp,
    /// Without packets where that is possible, whatever else is configured.
    Local,
}

impl PathChoice {
    const NAMES: [(&str, PathChoice); 3] =
        [("auto", PathChoice::Auto), ("udp", PathChoice::Udp), ("local", PathChoice::Local)];
}

impl std::str::FromStr for PathChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<PathChoice, &'static str> {
        let named = PathChoice::NAMES.iter().find(|(name, _)| *name == text);
        named.map(|(_, choice)| *choice).ok_or("it is auto, udp or local")
    }
}

impl std::fmt::Display for PathChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        PathChoice::NAMES
            .iter()
            .filter(|(_, choice)| choice == self)
            .try_for_each(|(name, _)| f.write_str(name))
    }
}

/// Why no port could be opened, in words for the user.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// An environment variable has an invalid value.
    #[error("{variable} is `{value}`, which is not {expected}")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The sockets.
    #[error(transparent)]
    Udp(#[from] udp::OpenError),
    /// The fault plan.
    #[error(transparent)]
    FaultPlan(#[from] FaultPlanError),
    /// The delays of a fault plan need a timer.
    #[error("cannot inject faults: {0}")]
    Faults(#[source] io::Error),
    /// The capture file.
    #[error("cannot write the capture {path}: {source}")]
    Capture {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

impl PortConfig {
    /// The variables that `terrace run` sets: `TERRACE_ADDR`, `TERRACE_MTU`, `TERRACE_FAULT_PLAN`, `TERRACE_PCAP`,
    /// `TERRACE_PATH` and `TERRACE_NIC`. Unset and empty variables mean the default.
    ///
    /// # Errors
    /// `Variable` for an invalid address, MTU, path or NIC model.
    pub fn from_env() -> Result<PortConfig, OpenError> {
        Ok(PortConfig {
            address: parsed("TERRACE_ADDR", "an IP address")?,
            mtu: parsed("TERRACE_MTU", "a number of bytes")?,
            slot: None,
            fault_plan: path("TERRACE_FAULT_PLAN"),
            pcap: path("TERRACE_PCAP"),
            path: parsed("TERRACE_PATH", "auto, udp or local")?.unwrap_or_default(),
            model: parsed("TERRACE_NIC", "terrace or commodity")?.unwrap_or_default(),
        })
    }

    /// Opens the port, and puts the fault plan into force: the complete configuration of a device for real use.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn device(&self) -> Result<DeviceConfig, OpenError> {
        let faults = self.faults()?;
        let port = self.open_with(faults.clone())?;
        Ok(DeviceConfig { faults, local: self.wants_local(), model: self.model, ..DeviceConfig::new(port) })
    }

    /// Whether same-host peers are to be reached without packets.
    fn wants_local(&self) -> bool {
        match self.path {
            PathChoice::Auto => self.fault_plan.is_none() && self.pcap.is_none(),
            PathChoice::Udp => false,
            PathChoice::Local => true,
        }
    }

    /// Opens the port alone. Of a fault plan only the packet faults are in force then.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(&self) -> Result<Box<dyn Port>, OpenError> {
        self.open_with(self.faults()?)
    }

    /// The fault plan, in force from now on if it was not.
    ///
    /// # Errors
    /// `FaultPlan`.
    pub fn faults(&self) -> Result<Option<Arc<Faults>>, OpenError> {
        Ok(self.fault_plan.as_deref().map(Faults::of_process).transpose()?)
    }

    fn open_with(&self, faults: Option<Arc<Faults>>) -> Result<Box<dyn Port>, OpenError> {
        let udp = UdpConfig {
            addr: self.address,
            mtu: self.mtu,
            instance: self.slot,
            socket_hook: Some(terrace_memory::accept_without_checksum),
            ..UdpConfig::default()
        };
        let mut port: Box<dyn Port> = Box::new(UdpPort::open(&udp)?);
        // The capture is inside the faults: it shows what they leave of the NIC's packets.
        if let Some(path) = &self.pcap {
            port = captured(port, path)?;
        }
        if let Some(faults) = faults.filter(|faults| faults.plan().has_packet_faults()) {
            port = Box::new(FaultyPort::new(port, faults).map_err(OpenError::Faults)?);
        }
        Ok(port)
    }
}

/// A port with its capture. If several ports are given the same file (a program starts others, or opens its device
/// twice), the first has it, and the others add their instance index to its name.
fn captured(port: Box<dyn Port>, path: &Path) -> Result<Box<dyn Port>, OpenError> {
    let (path, file) = match pcap::open_exclusive(path) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let own = path_of_instance(path, port.instance());
            let file = pcap::open_exclusive(&own);
            (own, file)
        }
        other => (path.to_owned(), other),
    };
    match file.and_then(|file| PcapPort::new(port, file, &path)) {
        Ok(port) => Ok(Box::new(port)),
        Err(source) => Err(OpenError::Capture { path, source }),
    }
}

/// `run.pcap` for instance 3 becomes `run.3.pcap`.
fn path_of_instance(path: &Path, instance: u8) -> PathBuf {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some(extension) => path.with_extension(format!("{instance}.{extension}")),
        None => path.with_extension(instance.to_string()),
    }
}

fn variable(name: &'static str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// A path may have any bytes.
fn path(name: &'static str) -> Option<PathBuf> {
    variable(name).map(PathBuf::from)
}

/// The value of a variable, `None` if it is unset or empty.
pub fn parsed<T: std::str::FromStr>(
    name: &'static str,
    expected: &'static str,
) -> Result<Option<T>, OpenError> {
    let Some(value) = variable(name) else { return Ok(None) };
    match value.to_str().and_then(|value| value.parse().ok()) {
        Some(parsed) => Ok(Some(parsed)),
        None => Err(OpenError::Variable { variable: name, value: value.to_string_lossy().into(), expected }),
    }
}

impl From<&OpenError> for Error {
    /// The text goes to the log; `ibv_open_device` has only errno.
    fn from(error: &OpenError) -> Error {
        match error {
            OpenError::Udp(udp::OpenError::OutOfDescriptors) => {
                Error::System(rustix::io::Errno::MFILE.raw_os_error())
            }
            OpenError::Faults(source) | OpenError::Capture { source, .. } => {
                Error::System(source.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()))
            }
            _ => Error::NoDevice("the port could not be opened"),
        }
    }
}
