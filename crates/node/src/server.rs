//! A memory node: files as regions that peers read and write, within a budget of memory.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use terrace_access::proto::{Mode, NAME_BYTES_MAX};
use terrace_access::signature::SignaturePage;
use terrace_memory::Pager;
use terrace_nic::{
    BackedBy, Backings, Device, Error, HostRange, Mr, MrRequest, OpenError, Paging, Pd, PortConfig,
    ProgressCallback, RegionPolicy,
};
use terrace_sync::RwLock;
use terrace_tier::{
    BackingFile, FaultModel, FaultPager, IoMethod, Tier, TierConfig, TierError, TierRegion, TierStats,
};

use crate::agent::Agent;
use crate::exports::Exported;
use crate::serving::ClientStats;

/// `ibv_access_flags` of a served region: everything but windows.
const ACCESS: u32 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6 | 1 << 8 | 1 << 9;

/// The access mode of absent memory: Terrace's own modes, and modes for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServeMode {
    /// All regions are locked in memory. Requires a budget of their total size.
    Pin,
    /// On-demand paging as by a hardware NIC: RNR NAKs for absent pages until a page fault of modelled cost
    /// ([`terrace_tier::FaultModel`]) has mapped them.
    Odp,
    /// Every access by RPC. The server copies from the mapping, with page faults.
    Rpc,
    /// Every access by RPC, through the page cache.
    RpcBuffer,
    /// Every access by RPC, bypassing the page cache.
    RpcDirect,
    /// Every access by RPC: cached pages from the page cache, others bypassing it.
    RpcTiering,
    /// The same, and hot units are promoted into memory.
    RpcTieringPromote,
    /// One-sided READs. READs of absent pages return the signature page; clients fetch the pages by RPC.
    Term,
    /// One-sided accesses. The NIC fetches absent pages before it answers.
    Wait,
}

impl ServeMode {
    /// All modes, with their names on the command line.
    pub const ALL: [(ServeMode, &'static str); 9] = [
        (ServeMode::Pin, "pin"),
        (ServeMode::Odp, "odp"),
        (ServeMode::Rpc, "rpc"),
        (ServeMode::RpcBuffer, "rpc-buffer"),
        (ServeMode::RpcDirect, "rpc-direct"),
        (ServeMode::RpcTiering, "rpc-tiering"),
        (ServeMode::RpcTieringPromote, "rpc-tiering-promote"),
        (ServeMode::Term, "term"),
        (ServeMode::Wait, "wait"),
    ];

    fn io(self) -> IoMethod {
        match self {
            ServeMode::Rpc | ServeMode::Odp => IoMethod::Mapping,
            ServeMode::RpcBuffer => IoMethod::Buffered,
            ServeMode::RpcDirect => IoMethod::Direct,
            _ => IoMethod::Tiering,
        }
    }

    fn promotes(self) -> bool {
        matches!(self, ServeMode::RpcTieringPromote | ServeMode::Term | ServeMode::Wait)
    }

    /// The mode in the descriptions for clients.
    fn client_mode(self) -> Mode {
        match self {
            ServeMode::Pin | ServeMode::Odp | ServeMode::Wait => Mode::Plain,
            ServeMode::Term => Mode::OneSided,
            _ => Mode::RpcOnly,
        }
    }
}

impl fmt::Display for ServeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ServeMode::ALL.iter().find(|(mode, _)| mode == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for ServeMode {
    type Err = String;

    fn from_str(text: &str) -> Result<ServeMode, String> {
        let known = ServeMode::ALL.iter().find(|(_, name)| *name == text);
        known.map(|(mode, _)| *mode).ok_or_else(|| {
            let names = ServeMode::ALL.map(|(_, name)| name);
            format!("{text:?} is not a mode: choose one of {}", names.join(", "))
        })
    }
}

/// A file to serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionConfig {
    /// The name by which clients open it.
    pub name: String,
    /// The path of a file or a block device.
    pub path: PathBuf,
    /// Length in bytes; required for a file that does not exist yet.
    pub size: Option<u64>,
}

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The regions.
    pub regions: Vec<RegionConfig>,
    /// The memory budget of all regions, in bytes.
    pub dram_bytes: u64,
    /// The mode.
    pub mode: ServeMode,
    /// The configuration of the port.
    pub port: PortConfig,
    /// The threads for accesses that block in page faults, which are those of [`ServeMode::Rpc`]. With one thread, the
    /// network thread executes them itself.
    pub threads: usize,
    /// The period of the migrator; `None` for the default.
    pub period: Option<Duration>,
}

/// An error of opening a server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// No port could be opened.
    #[error(transparent)]
    Port(OpenError),
    /// An error of a file, of the budget, or of the device.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// An error of the NIC.
    #[error("the NIC refuses: {0}")]
    Nic(#[from] Error),
    /// An invalid or duplicate name of a region.
    #[error("a region cannot be named {0:?}: 1 to {NAME_BYTES_MAX} bytes, and each name once")]
    Name(String),
    /// Metrics cannot be served.
    #[error("cannot serve metrics at {addr}: {reason}")]
    Metrics {
        /// The address that was requested.
        addr: SocketAddr,
        /// The reason.
        reason: String,
    },
    /// There are no regions.
    #[error("no region to serve: give at least one")]
    Nothing,
}

/// A memory node.
pub struct Server {
    device: Arc<Device>,
    agent: Arc<Agent>,
    tier: Arc<Tier>,
    regions: Vec<Served>,
    files: Arc<Files>,
}

/// A served region. Its fields are dropped in this order.
struct Served {
    name: String,
    mr: Arc<Mr>,
    region: Arc<TierRegion>,
}

/// The backing files of the regions. A file is mapped until it is removed from here.
#[derive(Default)]
struct Files(RwLock<Vec<BackingFile>>);

impl Backings for Files {
    fn find(&self, range: HostRange, _writable: bool) -> Option<BackedBy> {
        let files = self.0.read();
        let file = files.iter().find(|file| file.map() == range)?;
        Some(BackedBy { file: file.open_again().ok()?, offset: 0, range })
    }
}

impl Server {
    /// Opens the files and the port, and starts to serve.
    ///
    /// # Errors
    /// See [`ServeError`]. After an error, only files that were created remain.
    pub fn open(config: &ServerConfig) -> Result<Server, ServeError> {
        if config.regions.is_empty() {
            return Err(ServeError::Nothing);
        }
        check_names(&config.regions)?;
        let mut tier_config = TierConfig::new(config.dram_bytes);
        tier_config.io = config.mode.io();
        tier_config.threads = config.threads;
        tier_config.promote = config.mode.promotes();
        tier_config.period = config.period.unwrap_or(tier_config.period);
        tier_config.faults = config.port.faults().map_err(ServeError::Port)?;
        let tier = Tier::open(tier_config)?;
        let device = Device::open(config.port.device().map_err(ServeError::Port)?)?;
        // Peers that know only port 4791 reach the server at any instance index.
        device.join_colocated();
        // Dropping the server closes the device if one of the calls below fails.
        let mut server = Server {
            agent: Agent::attach(&device, tier.stats().buffer_bytes)?,
            device,
            tier,
            regions: Vec::new(),
            files: Arc::default(),
        };
        server.device.set_backings(server.files.clone());
        let names = config.regions.iter().map(|region| region.name.clone()).collect();
        server.device.attach(Arc::new(TierProgress { tier: server.tier.clone(), names }));
        let pd = server.device.alloc_pd()?;
        for region in &config.regions {
            server.serve(region, config.mode, &pd)?;
        }
        Ok(server)
    }

    fn serve(&mut self, config: &RegionConfig, mode: ServeMode, pd: &Arc<Pd>) -> Result<(), ServeError> {
        let file = BackingFile::open(&config.path, config.size, true)?;
        let region = self.tier.add(file.source()?)?;
        let (map, signature_key) = (file.map(), rand::random());
        let signature = SignaturePage::derive(&signature_key).shared();
        let mut pager: Arc<dyn Pager> = region.clone();
        let paging = match mode {
            ServeMode::Pin => {
                self.tier.pin(&region)?;
                None
            }
            ServeMode::Odp => {
                // Each region has the whole budget. This is a model for comparison.
                let dram_bytes = self.tier.stats().dram_bytes;
                pager = Arc::new(FaultPager::new(region.clone(), FaultModel::default(), dram_bytes)?);
                Some(Paging { pager: pager.clone(), pattern: signature, policy: RegionPolicy::Fault })
            }
            _ => Some(Paging { pager: pager.clone(), pattern: signature, policy: RegionPolicy::Wait }),
        };
        let request = MrRequest { addr: map.addr, length: map.len, iova: 0, access: ACCESS, paging };
        let mr = pd.reg_mr(request)?;
        let name = config.name.clone();
        self.files.0.write().push(file);
        self.regions.push(Served { name: name.clone(), mr: mr.clone(), region });
        self.agent.export(Exported {
            mr,
            access: ACCESS,
            pager,
            signature_key,
            mode: mode.client_mode(),
            name: Some(name),
        })?;
        Ok(())
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The counters of the tier.
    pub fn stats(&self) -> TierStats {
        named(&self.tier, &self.names())
    }

    /// The counters of each client.
    pub fn clients(&self) -> Vec<ClientStats> {
        self.agent.clients()
    }

    /// Promotes a unit of a region now. False without free memory, or if the unit is present already.
    ///
    /// # Errors
    /// If there is no such region, or the unit cannot be read or locked.
    pub fn promote(&self, name: &str, unit: usize) -> std::io::Result<bool> {
        self.tier.promote(self.region(name)?, unit)
    }

    /// Demotes a unit of a region now. False if the unit is absent.
    ///
    /// # Errors
    /// If there is no such region, or the unit cannot be written back.
    pub fn demote(&self, name: &str, unit: usize) -> std::io::Result<bool> {
        self.tier.demote(self.region(name)?, unit)
    }

    fn region(&self, name: &str) -> std::io::Result<&TierRegion> {
        let served = self.regions.iter().find(|served| served.name == name);
        served.map(|served| &*served.region).ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    /// The sources of metrics: the tier, the agent, and the regions' names.
    pub(crate) fn sources(&self) -> (Arc<Tier>, Arc<Agent>, Vec<String>) {
        (self.tier.clone(), self.agent.clone(), self.names())
    }

    /// The regions' names, in the order in which the regions were added.
    fn names(&self) -> Vec<String> {
        self.regions.iter().map(|served| served.name.clone()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Closing comes first: afterwards no grace period waits for another process, which may be stopped.
        self.device.close();
        for served in &self.regions {
            self.agent.withdraw(served.mr.rkey());
            // If deregistration fails, the region has ended with the device already.
            let _ = served.mr.dereg();
        }
        for served in &self.regions {
            self.tier.remove(&served.region);
        }
        self.files.0.write().clear();
    }
}

fn check_names(regions: &[RegionConfig]) -> Result<(), ServeError> {
    for (index, region) in regions.iter().enumerate() {
        let taken = regions[..index].iter().any(|other| other.name == region.name);
        if taken || !(1..=NAME_BYTES_MAX).contains(&region.name.len()) {
            return Err(ServeError::Name(region.name.clone()));
        }
    }
    Ok(())
}

/// The counters of the tier, with the regions' names, which are in the order in which the regions were added.
pub(crate) fn named(tier: &Tier, names: &[String]) -> TierStats {
    let mut stats = tier.stats();
    for (region, name) in stats.regions.iter_mut().zip(names) {
        region.name.clone_from(name);
    }
    stats
}

/// Drives the tier's IO, as a progress callback of the device.
struct TierProgress {
    tier: Arc<Tier>,
    names: Vec<String>,
}

impl ProgressCallback for TierProgress {
    fn advance(&self) -> bool {
        self.tier.advance()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tier.descriptor())
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some(("memory".into(), serde_json::to_value(named(&self.tier, &self.names)).ok()?))
    }
}
