//! The budget of paged memory, and the regions that share it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use terrace_baseline::{
    Baseline, BaselineConfig, BaselineError, BaselineRegion, FaultModel, FaultPager, IoMethod, Source,
};
use terrace_faults::Faults;
use terrace_memory::{RegionPolicy, WholeRange};
use terrace_nic::ProgressCallback;
use terrace_pages::PagesError;
use terrace_pages::cached::{CachedConfig, CachedFiles, CachedRegion, CachedSource};
use terrace_vm::maps::{self, Run};
use terrace_vm::{Refusal, Swapped};

use super::backing::ProgramFile;
use super::pager::Inner;
use super::settings::{Mode, Settings};
use crate::errno::{ENOMEM, Errno, Result};
use crate::log::write_line;
use crate::shim::signals::without_signals;

/// What pages the mappings, as a device's progress callback.
#[derive(Clone)]
pub enum Budget {
    Cached(Arc<CachedFiles>),
    Baseline(Arc<Baseline>),
}

impl ProgressCallback for Budget {
    fn advance(&self) -> bool {
        match self {
            Budget::Cached(files) => files.advance(),
            Budget::Baseline(baseline) => baseline.advance(),
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(match self {
            Budget::Cached(files) => files.descriptor(),
            Budget::Baseline(baseline) => baseline.descriptor(),
        })
    }

    fn report(&self) -> Option<(String, serde_json::Value)> {
        let stats = match self {
            Budget::Cached(files) => files.stats(),
            Budget::Baseline(baseline) => baseline.stats(),
        };
        Some(("memory".into(), serde_json::to_value(stats).ok()?))
    }
}

impl Budget {
    /// Opens what the mode needs.
    ///
    /// # Errors
    /// ENOMEM if it exceeds the available memory, after a line for the user.
    pub fn open(settings: &Settings) -> Result<Budget> {
        // The settings of the device: a device is open when a region is registered.
        let faults = Faults::all_of_process().pop();
        if settings.mode == Mode::Wait {
            let config = CachedConfig { faults, ..CachedConfig::new(settings.dram_bytes) };
            return Ok(Budget::Cached(CachedFiles::open(config).map_err(|error| out_of_memory(&error))?));
        }
        let io = if settings.mode == Mode::Odp { IoMethod::Mapping } else { IoMethod::Pinned };
        let config = BaselineConfig { faults, ..BaselineConfig::new(io, settings.dram_bytes) };
        Ok(Budget::Baseline(Baseline::open(config).map_err(|error| out_of_memory(&error))?))
    }

    /// Adds a mapping of a file. The reason is for memory that cannot be paged.
    ///
    /// # Errors
    /// ENOMEM if the modes for comparison have no memory for it, after a line for the user.
    pub fn add(
        self,
        file: ProgramFile,
        run: &Run,
        settings: &Settings,
    ) -> Result<std::result::Result<Region, String>> {
        match self {
            Budget::Cached(files) => {
                let added = add_cached(files, file.shared(), run, Some(Arc::new(file)));
                Ok(added.map_err(|error| error.to_string()))
            }
            Budget::Baseline(baseline) => add_to_baseline(baseline, file, run, settings),
        }
    }
}

/// The region of a mapping.
pub enum Region {
    /// With the program's file, unless it is a swap file.
    Cached(Arc<CachedFiles>, Arc<CachedRegion>, Option<Arc<ProgramFile>>),
    /// With the pager of the ODP mode. Both modes are for comparison.
    Baseline(Arc<Baseline>, Arc<BaselineRegion>, Option<Arc<FaultPager>>),
}

impl Region {
    /// The callback that drives its pager.
    pub fn budget(&self) -> Budget {
        match self {
            Region::Cached(files, ..) => Budget::Cached(files.clone()),
            Region::Baseline(baseline, ..) => Budget::Baseline(baseline.clone()),
        }
    }

    /// What an access to absent memory does; `None` if all of it is locked.
    pub fn policy(&self) -> Option<RegionPolicy> {
        match self {
            Region::Cached(..) => Some(RegionPolicy::Wait),
            Region::Baseline(_, _, Some(_)) => Some(RegionPolicy::Fault),
            Region::Baseline(_, _, None) => None,
        }
    }

    /// The pager of a mapping that has this region.
    pub fn pager(&self, run: &Run) -> Inner {
        match self {
            Region::Cached(_, region, file) => Inner::Cached(region.clone(), file.clone()),
            Region::Baseline(_, _, Some(faults)) => {
                Inner::Baseline(faults.clone(), WholeRange::absent(run.range))
            }
            Region::Baseline(_, region, None) => {
                Inner::Baseline(region.clone(), WholeRange::absent(run.range))
            }
        }
    }

    /// Releases the region from its budget.
    pub fn remove(&self) {
        match self {
            Region::Cached(files, region, _) => files.remove(region),
            Region::Baseline(baseline, region, faults) => {
                if let Some(faults) = faults {
                    faults.stop();
                }
                baseline.remove(region);
            }
        }
    }

    /// Waits for the accesses that were begun before. Other regions of the mapping go on, and so does the mapping.
    pub fn wait_for_accesses(&self) {
        match self {
            Region::Cached(_, region, _) => region.wait_for_accesses(),
            // The pagers of the modes for comparison carry accesses out before they return.
            Region::Baseline(..) => {}
        }
    }
}

fn add_cached(
    files: Arc<CachedFiles>,
    file: Arc<OwnedFd>,
    run: &Run,
    program_file: Option<Arc<ProgramFile>>,
) -> std::result::Result<Region, PagesError> {
    let Run { range: map, file_offset, writable: is_writable, .. } = *run;
    let is_swap_file = program_file.is_none();
    let region = files.add(CachedSource { file, file_offset, map, is_writable, is_swap_file })?;
    Ok(Region::Cached(files, region, program_file))
}

/// Adds the mapping of a swap file. The C library may unmap it, because the memory was its own.
pub fn add_swapped(
    files: Arc<CachedFiles>,
    swapped: &Swapped,
) -> std::result::Result<(Run, Region), Refusal> {
    let attempt = "add the swap file's mapping";
    let failed = |source| Refusal::System { attempt, source };
    let run = maps::find(swapped.pages()).map_err(failed)?;
    let run = run.map_err(|error| failed(io::Error::other(error.to_string())))?;
    let file = swapped.open_file().map_err(failed)?;
    let region =
        add_cached(files, Arc::new(file), &run, None).map_err(|error| failed(io::Error::other(error)))?;
    Ok((run, region))
}

/// Adds a mapping for a mode of comparison.
fn add_to_baseline(
    baseline: Arc<Baseline>,
    file: ProgramFile,
    run: &Run,
    settings: &Settings,
) -> Result<std::result::Result<Region, String>> {
    let file = match file.duplicate() {
        Ok(file) => file,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let (map, file_offset, writable) = (run.range, run.file_offset, run.writable);
    let region = match baseline.add(Source { file, file_offset, map, exclusive: false, writable }) {
        Ok(region) => region,
        // It does not fit, or cannot be locked.
        Err(error) if settings.mode == Mode::Pin && !matches!(error, BaselineError::Source(_)) => {
            return Err(out_of_memory(&error));
        }
        Err(error) => return Ok(Err(error.to_string())),
    };
    let faults = match settings.mode {
        Mode::Odp => Some(fault_pager(&baseline, &region, settings)?),
        Mode::Pin | Mode::Wait => None,
    };
    Ok(Ok(Region::Baseline(baseline, region, faults)))
}

/// A pager that models the paging of hardware, for comparison. Each mapping has the whole budget.
fn fault_pager(
    baseline: &Baseline,
    region: &Arc<BaselineRegion>,
    settings: &Settings,
) -> Result<Arc<FaultPager>> {
    let pager =
        without_signals(|| FaultPager::new(region.clone(), FaultModel::default(), settings.dram_bytes));
    pager.map(Arc::new).map_err(|error| {
        baseline.remove(region);
        out_of_memory(&error)
    })
}

/// Writes a line for the user, who otherwise gets only an errno.
fn out_of_memory(error: &impl std::fmt::Display) -> Errno {
    write_line(error);
    ENOMEM
}
