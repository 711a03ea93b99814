//! The memory of a server's regions: pages in frames for Terrace's own modes, `baseline` for the modes for comparison.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use terrace_baseline::{Baseline, BaselineConfig, BaselineRegion, FaultModel, FaultPager, IoMethod};
use terrace_faults::Faults;
use terrace_memory::{Pager, Translation};
use terrace_nic::{BackedBy, Backings, HostRange, ProgressCallback, RegionPolicy};
use terrace_pages::{MemoryStats, Pages, PagesConfig};
use terrace_sync::RwLock;

use crate::server::{RegionConfig, ServeError, ServeMode, ServerConfig};

/// Characters of a file's name in the name of a pool.
const NAME_CHARS_MAX: usize = 60;

/// The memory that all regions of a server share.
pub(crate) struct Memory {
    kind: Kind,
    names: RwLock<Vec<String>>,
}

enum Kind {
    Pages(Arc<Pages>),
    Baseline { baseline: Arc<Baseline>, files: Arc<Files> },
}

/// A region in it.
pub(crate) struct MemoryRegion {
    /// In a mode for comparison.
    baseline: Option<Arc<BaselineRegion>>,
    /// Its bytes' addresses.
    pub range: HostRange,
    pub pager: Arc<dyn Pager>,
    /// What the NIC does about absent bytes. `None`: none are ever absent.
    pub policy: Option<RegionPolicy>,
}

/// How a mode for comparison accesses its files; `None` for modes whose pages are in frames.
fn io_of(mode: ServeMode) -> Option<IoMethod> {
    match mode {
        ServeMode::Term | ServeMode::Wait | ServeMode::RpcTieringPromote => None,
        ServeMode::Rpc | ServeMode::Odp => Some(IoMethod::Mapping),
        ServeMode::RpcBuffer => Some(IoMethod::Buffered),
        ServeMode::RpcDirect => Some(IoMethod::Direct),
        ServeMode::Pin => Some(IoMethod::Pinned),
        ServeMode::RpcTiering => Some(IoMethod::Tiering),
    }
}

impl Memory {
    /// # Errors
    /// `Pages` or `Baseline`.
    pub fn open(config: &ServerConfig, faults: Option<Arc<Faults>>) -> Result<Memory, ServeError> {
        let kind = match io_of(config.mode) {
            None => {
                let pages_config = PagesConfig {
                    faults,
                    directory: config.frames_directory.clone(),
                    is_kept: config.keeps_frames,
                    ..PagesConfig::new(&pool_name(&config.regions), config.dram_bytes)
                };
                Kind::Pages(Pages::open(pages_config)?)
            }
            Some(io) => {
                let baseline_config = BaselineConfig {
                    threads: config.threads,
                    faults,
                    ..BaselineConfig::new(io, config.dram_bytes)
                };
                Kind::Baseline { baseline: Baseline::open(baseline_config)?, files: Arc::default() }
            }
        };
        Ok(Memory { kind, names: RwLock::default() })
    }

    /// Adds a region.
    ///
    /// # Errors
    /// `Pages` or `Baseline`.
    pub fn add(&self, config: &RegionConfig, mode: ServeMode) -> Result<MemoryRegion, ServeError> {
        let added = match &self.kind {
            Kind::Pages(pages) => {
                let file = terrace_pages::BackingFile::open(&config.path, config.size)?;
                let region = pages.add(file)?;
                MemoryRegion {
                    baseline: None,
                    range: region.range(),
                    pager: region,
                    policy: Some(RegionPolicy::Wait),
                }
            }
            Kind::Baseline { baseline, files } => {
                let file = terrace_baseline::BackingFile::open(&config.path, config.size)?;
                let region = baseline.add(file.source()?)?;
                let range = file.map();
                files.0.write().push(file);
                let (pager, policy): (Arc<dyn Pager>, _) = match mode {
                    ServeMode::Pin => (region.clone(), None),
                    ServeMode::Odp => {
                        // Each region has the whole budget. This is a model for comparison.
                        let dram_bytes = baseline.stats().budget_bytes;
                        let model = FaultPager::new(region.clone(), FaultModel::default(), dram_bytes)?;
                        (Arc::new(model), Some(RegionPolicy::Fault))
                    }
                    _ => (region.clone(), Some(RegionPolicy::Wait)),
                };
                MemoryRegion { baseline: Some(region), range, pager, policy }
            }
        };
        self.names.write().push(config.name.clone());
        Ok(added)
    }

    /// Ends the start of a server, after all regions were added: pages that an earlier server of other regions has left
    /// are written back, and their frames are free.
    pub fn discard_unclaimed(&self) {
        if let Kind::Pages(pages) = &self.kind {
            pages.discard_unclaimed();
        }
    }

    /// Has up to so many pages leave memory, as the policy chooses. Returns how many have left; dirty ones leave when they
    /// have been written back.
    pub fn evict(&self, pages_max: usize) -> usize {
        match &self.kind {
            Kind::Pages(pages) => pages.evict(pages_max),
            Kind::Baseline { .. } => 0,
        }
    }

    /// The files that same-host peers map, for modes that map them.
    pub fn backings(&self) -> Option<Arc<dyn Backings>> {
        match &self.kind {
            Kind::Pages(_) => None,
            Kind::Baseline { files, .. } => Some(files.clone()),
        }
    }

    /// Ends the memory, after its regions' registrations have ended. Returns the files that lack pages ([`Pages::close`]).
    pub fn close(&self, regions: &[MemoryRegion]) -> Vec<PathBuf> {
        match &self.kind {
            Kind::Pages(pages) => pages.close(),
            Kind::Baseline { baseline, files } => {
                regions
                    .iter()
                    .filter_map(|region| region.baseline.as_ref())
                    .for_each(|region| baseline.remove(region));
                files.0.write().clear();
                Vec::new()
            }
        }
    }

    /// Statistics, with the regions' names.
    pub fn stats(&self) -> MemoryStats {
        let mut stats: MemoryStats = match &self.kind {
            Kind::Pages(pages) => pages.stats(),
            Kind::Baseline { baseline, .. } => baseline.stats(),
        };
        // Both are in the order in which the regions were added.
        for (region, name) in stats.regions.iter_mut().zip(&*self.names.read()) {
            region.name.clone_from(name);
        }
        stats
    }
}

/// The name of a server's pool: a server of the same first file finds the pages that an earlier one has left.
fn pool_name(regions: &[RegionConfig]) -> String {
    let path = regions.first().map(|region| without_links(&region.path)).unwrap_or_default();
    let name: String =
        path.file_name().unwrap_or_default().to_string_lossy().chars().take(NAME_CHARS_MAX).collect();
    format!("{name}-{:08x}", crc32fast::hash(path.as_os_str().as_encoded_bytes()))
}

/// The path of a file that is there, or will be, without links.
fn without_links(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or(path.to_owned());
    let of_missing = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(of_missing).unwrap_or(path)
}

/// The backing files of the regions that are mapped. A file is mapped until it is removed from here.
#[derive(Default)]
struct Files(RwLock<Vec<terrace_baseline::BackingFile>>);

impl Backings for Files {
    fn find(&self, range: HostRange, _writable: bool) -> io::Result<Option<BackedBy>> {
        let files = self.0.read();
        let file = files.iter().find(|file| file.map() == range);
        file.map(|file| Ok(BackedBy { file: file.open_again()?, offset: 0, range })).transpose()
    }
}

impl ProgressCallback for Memory {
    fn advance(&self) -> bool {
        match &self.kind {
            Kind::Pages(pages) => pages.advance(),
            Kind::Baseline { baseline, .. } => baseline.advance(),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(match &self.kind {
            Kind::Pages(pages) => pages.descriptor(),
            Kind::Baseline { baseline, .. } => baseline.descriptor(),
        })
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        Some(("memory".into(), serde_json::to_value(self.stats()).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_pool_by_each_of_its_paths() {
        let dir = std::env::temp_dir().join(format!("terrace-pool-name-{}", std::process::id()));
        let at = |path: &str| dir.join(path);
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(at("real")).unwrap();
        std::os::unix::fs::symlink(at("real"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("real/region"), at("region-link")).unwrap();
        let name = |path: &str| {
            pool_name(&[RegionConfig { name: "region".into(), path: at(path), size: Some(4096) }])
        };
        assert_eq!(name("link/region"), name("real/region"), "not yet made");
        let missing = name("real/region");
        std::fs::write(at("real/region"), []).unwrap();
        for path in ["real/region", "link/region", "region-link", "real/../link/region"] {
            assert_eq!(name(path), missing, "{path}");
        }
        assert_ne!(name("real/other"), missing);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
