//! Regions larger than memory, for unmodified programs: with `TERRACE_DRAM`, a region that is registered for on-demand
//! paging over a shared file mapping is extended by that file.
//!
//! ```text
//!   ibv_reg_mr ──> mod: is it one? ──> maps: which mapping is it ──> backing: the file behind it
//!                        │
//!                        └──> table: one region of the tier per mapping ──> pager: what the NIC asks
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
use terrace_tier::TierConfig;

use crate::abi::IBV_ACCESS_ON_DEMAND;
use crate::errno::{EINVAL, Result};
use crate::log::tell_user;
use crate::once::once;
use settings::Settings;

/// The settings in the environment, or what is wrong with them.
/// Read when a device is opened, with [`once`] held; ready from then on.
fn settings() -> &'static std::result::Result<Option<Settings>, String> {
    static SETTINGS: OnceLock<std::result::Result<Option<Settings>, String>> = OnceLock::new();
    SETTINGS.get_or_init(Settings::from_env)
}

/// Checks the environment when a device is opened, so that the user learns of invalid settings then.
///
/// # Errors
/// EINVAL, after the user was told what is wrong.
pub fn check_environment() -> Result<()> {
    let _once = once();
    let problem = match settings() {
        Ok(None) => return Ok(()),
        Ok(Some(settings)) => terrace_tier::check_budget(&TierConfig::new(settings.dram_bytes))
            .err()
            .map(|error| error.to_string()),
        Err(problem) => Some(problem.clone()),
    };
    match problem {
        None => Ok(()),
        Some(problem) => {
            tell_user(problem);
            Err(EINVAL)
        }
    }
}

/// A share of the mapping below a range that is about to be registered, if the mapping is to be extended by a file.
///
/// # Errors
/// ENOMEM when the budget exceeds the memory that is available; the user is told.
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
        // Ordinary memory: not worth a warning.
        Ok(Err(maps::NoRun::NoSharedFile)) => return Ok(None),
        Ok(Err(other)) => other.to_string(),
        Err(error) => format!("cannot read the list of mappings: {error}"),
    };
    tracing::warn!(
        addr = format_args!("{:#x}", range.addr),
        len = range.len,
        "a region stays ordinary on-demand memory, without --dram's budget: {refusal}"
    );
    Ok(None)
}
