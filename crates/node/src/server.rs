//! A memory node: files as regions that peers read and write, within a budget of memory.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use terrace_access::proto::{Mode, NAME_BYTES_MAX};
use terrace_access::signature::SignaturePage;
use terrace_baseline::BaselineError;
use terrace_nic::{Device, Error, Mr, MrRequest, OpenError, Paging, Pd, PortConfig};
use terrace_pages::{MemoryStats, PagesError};

use crate::agent::Agent;
use crate::exports::Exported;
use crate::memory::{Memory, MemoryRegion};
use crate::serving::ClientStats;

/// `ibv_access_flags` of a served region: everything but windows.
const ACCESS: u32 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6 | 1 << 8 | 1 << 9;

/// The access mode of absent memory: Terrace's own modes, and modes for comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServeMode {
    /// All regions are locked in memory. Requires a budget of their total size.
    Pin,
    /// On-demand paging as by a hardware NIC: RNR NAKs for absent pages until a page fault of modelled cost
    /// ([`terrace_baseline::FaultModel`]) has mapped them.
    Odp,
    /// Every access by RPC. The server copies from the mapping, with page faults.
    Rpc,
    /// Every access by RPC, through the page cache.
    RpcBuffer,
    /// Every access by RPC, bypassing the page cache.
    RpcDirect,
    /// Every access by RPC: cached pages from the page cache, others bypassing it.
    RpcTiering,
    /// Every access by RPC, to pages in memory.
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
    /// The directory of the frames' file, on a file system in memory; `None` for the usual ones.
    pub frames_directory: Option<PathBuf>,
    /// Whether the pages stay in memory when the server ends, so that the next one finds them there. They stay in any
    /// case when its process is killed.
    pub keeps_frames: bool,
}

/// An error of opening a server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// No port could be opened.
    #[error(transparent)]
    Port(OpenError),
    /// An error of a file, of the budget, or of the device.
    #[error(transparent)]
    Pages(#[from] PagesError),
    /// The same, in a mode for comparison.
    #[error(transparent)]
    Baseline(#[from] BaselineError),
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
    /// Files lack pages at the end: the disk is full or fails.
    #[error("not all pages of {} could be made durable: where the disk has room again, `terrace recover FILE` writes those that are still in memory", one_after_another(.0))]
    NotDurable(Vec<PathBuf>),
    /// There are no regions.
    #[error("no region to serve: give at least one")]
    Nothing,
}

/// A memory node.
pub struct Server {
    device: Arc<Device>,
    agent: Arc<Agent>,
    memory: Arc<Memory>,
    registrations: Vec<Arc<Mr>>,
    regions: Vec<MemoryRegion>,
}

impl Server {
    /// Opens the files and the port, and starts to serve.
    ///
    /// # Errors
    /// See [`ServeError`]. After an error, no file remains that was created.
    pub fn open(config: &ServerConfig) -> Result<Server, ServeError> {
        if config.regions.is_empty() {
            return Err(ServeError::Nothing);
        }
        check_names(&config.regions)?;
        let paths = config.regions.iter().map(|region| &region.path);
        let missing: Vec<&PathBuf> = paths.filter(|path| !path.exists()).collect();
        let opened = Server::open_regions(config);
        if opened.is_err() {
            missing.into_iter().for_each(|path| terrace_pages::remove_unwritten(path));
        }
        opened
    }

    fn open_regions(config: &ServerConfig) -> Result<Server, ServeError> {
        let memory = Arc::new(Memory::open(config, config.port.faults().map_err(ServeError::Port)?)?);
        let device = Device::open(config.port.device().map_err(ServeError::Port)?)?;
        // Dropping the server closes the device if one of the calls below fails.
        let mut server = Server {
            agent: Agent::attach(&device, memory.stats().buffer_bytes)?,
            device,
            memory,
            registrations: Vec::new(),
            regions: Vec::new(),
        };
        // Peers that know only port 4791 reach the server at any instance index.
        server.device.join_colocated()?;
        if let Some(backings) = server.memory.backings() {
            server.device.set_backings(backings);
        }
        server.device.attach(server.memory.clone());
        let pd = server.device.alloc_pd()?;
        for region in &config.regions {
            server.serve(region, config.mode, &pd)?;
        }
        server.memory.discard_unclaimed();
        Ok(server)
    }

    fn serve(&mut self, config: &RegionConfig, mode: ServeMode, pd: &Arc<Pd>) -> Result<(), ServeError> {
        let region = self.memory.add(config, mode)?;
        let (range, pager, policy) = (region.range, region.pager.clone(), region.policy);
        self.regions.push(region);
        let signature_key = rand::random();
        let pattern = SignaturePage::derive(&signature_key).shared();
        let paging = policy.map(|policy| Paging { pager: pager.clone(), pattern, policy });
        let request = MrRequest { addr: range.addr, length: range.len, iova: 0, access: ACCESS, paging };
        let mr = pd.reg_mr(request)?;
        self.registrations.push(mr.clone());
        self.agent.export(Exported {
            mr,
            access: ACCESS,
            pager,
            signature_key,
            mode: mode.client_mode(),
            name: Some(config.name.clone()),
        })?;
        Ok(())
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Statistics of the memory and its regions.
    pub fn stats(&self) -> MemoryStats {
        self.memory.stats()
    }

    /// The counters of each client.
    pub fn clients(&self) -> Vec<ClientStats> {
        self.agent.clients()
    }

    /// Has up to so many pages leave memory now, as the policy chooses. Returns how many have left; dirty ones leave when
    /// they have been written back. In modes for comparison none do.
    pub fn evict(&self, pages_max: usize) -> usize {
        self.memory.evict(pages_max)
    }

    /// The sources of metrics.
    pub(crate) fn sources(&self) -> (Arc<Memory>, Arc<Agent>) {
        (self.memory.clone(), self.agent.clone())
    }
}

impl Server {
    /// Ends the server: what is in memory only is written to the files.
    ///
    /// # Errors
    /// [`ServeError::NotDurable`].
    pub fn close(mut self) -> Result<(), ServeError> {
        let lacking = self.end();
        if lacking.is_empty() { Ok(()) } else { Err(ServeError::NotDurable(lacking)) }
    }

    /// Returns the files that lack pages, the first time.
    fn end(&mut self) -> Vec<PathBuf> {
        // Closing comes first: afterwards no grace period waits for another process, which may be stopped.
        self.device.close();
        for mr in self.registrations.drain(..) {
            self.agent.withdraw(mr.rkey());
            // If deregistration fails, the region has ended with the device already.
            let _ = mr.dereg();
        }
        self.memory.close(&std::mem::take(&mut self.regions))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// The paths, between commas.
fn one_after_another(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
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
