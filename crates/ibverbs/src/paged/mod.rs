//! Regions larger than memory, for unmodified programs: with `TERRACE_DRAM`, a region that is registered for on-demand
//! paging over a shared file mapping is paged to that file (`terrace_pages::cached`; the modes of comparison use
//! `terrace_tier`).
//!
//! ```text
//!   ibv_reg_mr ──> mod: paged? ──> maps: the mapping ──> backing: the file behind it
//!                        │
//!                        └──> table: one region of the budget per mapping ──> pager: the NIC's requests
//! ```

pub mod backing;
mod churn;
pub mod maps;
mod pager;
mod ranges;
mod settings;
mod table;

use std::sync::OnceLock;

pub use table::{ForkHold, Lease, before_change, hold_for_fork};
use terrace_hostmem::HostRange;
use terrace_pages::cached::CachedConfig;
use terrace_tier::{TierConfig, TierError};

use crate::abi::IBV_ACCESS_ON_DEMAND;
use crate::errno::{EINVAL, Result};
use crate::log::write_line;
use crate::once::once;
use settings::{Mode, Settings};

/// The settings in the environment, or the problem with them. The settings are read under the lock of [`once`] when a
/// device is opened, and do not change afterwards.
fn settings() -> &'static std::result::Result<Option<Settings>, String> {
    static SETTINGS: OnceLock<std::result::Result<Option<Settings>, String>> = OnceLock::new();
    SETTINGS.get_or_init(Settings::from_env)
}

/// Checks the environment when a device is opened, so that invalid settings are reported then.
///
/// # Errors
/// EINVAL, after a line for the user.
pub fn check_environment() -> Result<()> {
    let _once = once();
    let problem = match settings() {
        Ok(None) => return Ok(()),
        Ok(Some(settings)) => {
            let checked = match settings.mode {
                Mode::Wait => CachedConfig::new(settings.dram_bytes).check().map_err(TierError::from),
                Mode::Odp | Mode::Pin => terrace_tier::check_budget(&TierConfig::new(settings.dram_bytes)),
            };
            checked.err().map(|error| error.to_string())
        }
        Err(problem) => Some(problem.clone()),
    };
    match problem {
        None => Ok(()),
        Some(problem) => {
            write_line(problem);
            Err(EINVAL)
        }
    }
}

/// A lease of the mapping below a range that is about to be registered, if the mapping is paged to a file.
///
/// # Errors
/// ENOMEM if the budget exceeds the available memory, after a line for the user.
pub fn lease(range: HostRange, access: u32) -> Result<Option<Lease>> {
    let Ok(Some(settings)) = settings() else { return Ok(None) };
    let everything = range.len == u64::MAX;
    if access & IBV_ACCESS_ON_DEMAND == 0 || range.len == 0 || everything {
        return Ok(None);
    }
    let refusal = match maps::find(range) {
        Ok(Ok(run)) => match table::lease(range, run, settings)? {
            Ok(lease) => return Ok(Some(lease)),
            Err(refusal) => refusal,
        },
        // Ordinary memory gets no warning.
        Ok(Err(maps::NoRun::NoSharedFile)) => return Ok(None),
        Ok(Err(other)) => other.to_string(),
        Err(error) => format!("cannot read the list of mappings: {error}"),
    };
    tracing::warn!(
        addr = format_args!("{:#x}", range.addr),
        len = range.len,
        "a region stays ordinary on-demand memory outside of --dram's budget: {refusal}"
    );
    Ok(None)
}
