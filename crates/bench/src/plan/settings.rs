//! The settings of a point, and the axes that vary them.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrace_node::ADDRESS_REQUESTS_MAX;

use crate::application::{Application, VALUE_BYTES};
use crate::bytes;
use crate::content::GRANULE_BYTES;
use crate::keys::Distribution;
use crate::workload::Workload;

/// The server's mode (`terrace serve --mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The whole region locked in memory: the upper bound.
    Pin,
    /// The model of hardware on-demand paging.
    Odp,
    /// All accesses by RPC; the server copies from the mapping, with page faults.
    Rpc,
    /// All accesses by RPC; the server uses buffered I/O.
    RpcBuffer,
    /// All accesses by RPC; the server uses direct I/O.
    RpcDirect,
    /// All accesses by RPC; the server uses tiering I/O.
    RpcTiering,
    /// All accesses by RPC; the server has pages in frames.
    RpcTieringPromote,
    /// One-sided READs; absent pages are fetched by READs that wait.
    Term,
    /// The NIC defers READs of absent pages.
    Wait,
}

impl Mode {
    /// Whether the server keeps pages in frames. Then a region for which there is memory is read whole before it is
    /// measured.
    pub fn has_frames(self) -> bool {
        matches!(self, Mode::Term | Mode::Wait | Mode::RpcTieringPromote)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Pin => "pin",
            Mode::Odp => "odp",
            Mode::Rpc => "rpc",
            Mode::RpcBuffer => "rpc-buffer",
            Mode::RpcDirect => "rpc-direct",
            Mode::RpcTiering => "rpc-tiering",
            Mode::RpcTieringPromote => "rpc-tiering-promote",
            Mode::Term => "term",
            Mode::Wait => "wait",
        })
    }
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Mode, String> {
        let value = toml::Value::String(text.to_owned());
        Mode::deserialize(value).map_err(|error| error.message().to_owned())
    }
}

/// The storage of the region's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Storage {
    /// In the data directory.
    #[default]
    Disk,
    /// In `/dev/shm`: the fastest device.
    Tmpfs,
    /// In the data directory, with the server's I/O limited by a control group: a slow device.
    Throttled,
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Storage::Disk => "disk",
            Storage::Tmpfs => "tmpfs",
            Storage::Throttled => "throttled",
        })
    }
}

/// All parameters of a point except the mode and the times.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// What the clients do in each access.
    pub application: Application,
    /// Size of the region.
    #[serde(with = "size")]
    pub region: u64,
    /// The server's memory, as a share of the region.
    pub dram_percent: u32,
    /// Bytes of each access.
    #[serde(with = "size")]
    pub size: u64,
    /// Share of WRITEs.
    pub write_percent: u32,
    /// Popularity of keys.
    pub distribution: Distribution,
    /// The exponent for Zipf.
    pub theta: f64,
    /// Client threads.
    pub threads: usize,
    /// The accesses in flight of each client thread.
    pub depth: usize,
    /// The server's threads for RPCs.
    pub server_threads: usize,
    /// The storage of the region's file.
    pub storage: Storage,
    /// Whether memory is filled before the measurement, as after a long run, in modes in which page faults determine its
    /// contents.
    pub preload: bool,
    /// Whether the data of READs is verified.
    pub verify: bool,
    /// The share of the measured time after which the hotspot switches.
    pub switch_at_percent: Option<u32>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            application: Application::Blocks,
            region: 2 << 30,
            dram_percent: 50,
            size: 4096,
            write_percent: 0,
            distribution: Distribution::Zipf,
            theta: 0.99,
            // As many in flight as in the paper. A second thread on the clients' processor would take the first one's place
            // for milliseconds at a time.
            threads: 1,
            depth: 64,
            server_threads: 1,
            storage: Storage::Disk,
            preload: true,
            verify: true,
            switch_at_percent: None,
        }
    }
}

/// Sizes in TOML: `"4K"`.
mod size {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        crate::bytes::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }

    pub fn serialize<S: Serializer>(bytes: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&crate::bytes::format(*bytes))
    }
}

/// A setting that a plan varies from point to point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Axis {
    /// [`Settings::size`]
    Size,
    /// [`Settings::theta`]
    Theta,
    /// [`Settings::write_percent`]
    WritePercent,
    /// Only READs or only WRITEs, of a size: `"Read 4K"`, `"Write 16K"`
    Operation,
    /// [`Settings::threads`]
    Threads,
    /// [`Settings::server_threads`]
    ServerThreads,
    /// [`Settings::dram_percent`]
    DramPercent,
    /// [`Settings::storage`]
    Storage,
}

impl Settings {
    /// These settings with another value on an axis. The error states why the value is invalid.
    pub fn with(&self, axis: Axis, value: &str) -> Result<Settings, String> {
        fn number<T: std::str::FromStr>(value: &str) -> Result<T, String> {
            value.parse().map_err(|_| format!("'{value}' is not a valid number"))
        }
        let mut settings = self.clone();
        match axis {
            Axis::Size => settings.size = bytes::parse(value)?,
            Axis::Theta => settings.theta = number(value)?,
            Axis::WritePercent => settings.write_percent = number(value)?,
            Axis::Operation => {
                let example = || format!("'{value}' is not an operation (examples: Read 4K, Write 16K)");
                let (operation, size) = value.split_once(' ').ok_or_else(example)?;
                settings.size = bytes::parse(size)?;
                settings.write_percent = match operation {
                    "Read" => 0,
                    "Write" => 100,
                    _ => return Err(example()),
                };
            }
            Axis::Threads => settings.threads = number(value)?,
            Axis::ServerThreads => settings.server_threads = number(value)?,
            Axis::DramPercent => settings.dram_percent = number(value)?,
            Axis::Storage => {
                let value = toml::Value::String(value.to_owned());
                settings.storage = Storage::deserialize(value).map_err(|error| error.message().to_owned())?;
            }
        }
        Ok(settings)
    }

    /// The error in these settings, if any.
    pub fn check(&self) -> Result<(), String> {
        let granule = GRANULE_BYTES as u64;
        let wrong = if self.size == 0 || !self.size.is_multiple_of(granule) {
            format!("size {} is not a multiple of {granule}", self.size)
        } else if self.size > 4 << 20 {
            format!("size {} is larger than 4M", bytes::format(self.size))
        } else if !self.region.is_multiple_of(1 << 20) || self.region == 0 || self.region > 1 << 40 {
            format!("region {} is not a multiple of 1M of at most 1T", bytes::format(self.region))
        } else if !(1..=100).contains(&self.dram_percent) {
            format!("dram-percent {} is not 1 to 100", self.dram_percent)
        } else if self.write_percent > 100 {
            format!("write-percent {} is more than 100", self.write_percent)
        } else if !(self.theta.is_finite() && (0.0..=10.0).contains(&self.theta)) {
            format!("theta {} is not 0 to 10", self.theta)
        } else if !(1..=256).contains(&self.threads) {
            format!("threads {} is not 1 to 256", self.threads)
        } else if !(1..=1024).contains(&self.depth) {
            format!("depth {} is not 1 to 1024", self.depth)
        } else if !(1..=256).contains(&self.server_threads) {
            format!("server-threads {} is not 1 to 256", self.server_threads)
        } else if self.switch_at_percent.is_some_and(|percent| !(1..=99).contains(&percent)) {
            "switch-at-percent is not 1 to 99".to_owned()
        } else if let Some(problem) = self.application_problem() {
            problem
        } else if self.region / self.size < self.threads as u64 {
            format!("a region of {} has fewer keys of {} than threads", self.region, self.size)
        } else {
            return Ok(());
        };
        Err(wrong)
    }

    /// The setting that the application does not permit, if any.
    fn application_problem(&self) -> Option<String> {
        match self.application {
            Application::Blocks => None,
            Application::FileSystem => (self.depth > usize::from(ADDRESS_REQUESTS_MAX)).then(|| {
                format!(
                    "depth {} is more than {ADDRESS_REQUESTS_MAX}, the metadata requests in flight",
                    self.depth
                )
            }),
            Application::KeyValueStore => (self.size != VALUE_BYTES as u64 || self.write_percent != 0)
                .then(|| format!("a key-value store has READs of values of {VALUE_BYTES} bytes only")),
        }
    }

    /// The server's memory in bytes: whole MiB, the size of a unit of residency.
    pub fn dram_bytes(&self) -> u64 {
        ((self.region >> 20) * u64::from(self.dram_percent) / 100).max(1) << 20
    }

    /// The workload of these settings.
    pub fn workload(&self, warm_up: Duration, measured: Duration) -> Workload {
        Workload {
            application: self.application,
            region_bytes: self.region,
            access_bytes: self.size as usize,
            write_percent: self.write_percent,
            distribution: self.distribution,
            theta: self.theta,
            threads: self.threads,
            depth: self.depth,
            verify: self.verify,
            switch_after: self.switch_at_percent.map(|percent| measured * percent / 100),
            warm_up,
            measured,
        }
    }
}
