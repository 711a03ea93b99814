//! Regions larger than memory, for unmodified programs: with `TERRACE_DRAM`, a region that is registered for on-demand
//! paging over a shared file mapping is paged to that file (`terrace_pages::cached`; the modes of comparison use
//! `terrace_baseline`). With `TERRACE_SWAP`, private memory that is registered moves into a swap file (`terrace_vm`), and is
//! paged to that.
//!
//! ```text
//!   ibv_reg_mr ──> mod: paged? ──> the mapping ──> backing: the file behind it; of private memory, its swap file
//!                        │
//!                        └──> table: one region of the budget per mapping ──> pager: the NIC's requests
//! ```

pub mod backing;
mod budget;
mod churn;
mod mapping;
mod pager;
mod ranges;
mod settings;
mod table;

use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

pub use ranges::may_be_shared;
use table::NotPaged;
pub use table::{ForkHold, Lease, before_change, hold_for_fork};
use terrace_baseline::{BaselineConfig, BaselineError, IoMethod, check_budget};
use terrace_hostmem::{HostRange, fault};
use terrace_pages::cached::CachedConfig;
use terrace_vm::{BACKED_MIN_BYTES, Refusal, SwapSpace};

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
        Ok(Some(settings)) => check(settings).err(),
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

/// The directory of swap files. It is set when a device is opened.
static SWAP_SPACE: OnceLock<SwapSpace> = OnceLock::new();

/// Checks the budget, and opens the directory of swap files.
fn check(settings: &Settings) -> std::result::Result<(), String> {
    let checked = match settings.mode {
        Mode::Wait => CachedConfig::new(settings.dram_bytes).check().map_err(BaselineError::from),
        Mode::Odp => check_budget(&BaselineConfig::new(IoMethod::Mapping, settings.dram_bytes)),
        Mode::Pin => check_budget(&BaselineConfig::new(IoMethod::Pinned, settings.dram_bytes)),
    };
    checked.map_err(|error| error.to_string())?;
    if let (Some(directory), None) = (&settings.swap, SWAP_SPACE.get()) {
        let space = match SwapSpace::open(directory) {
            Ok(space) => space,
            Err(error) => {
                // `terrace run` has checked the directory: something else is missing here, such as /proc.
                write_line(format_args!("private memory is not paged: TERRACE_SWAP: {error}"));
                return Ok(());
            }
        };
        SWAP_SPACE.get_or_init(|| space);
        fault::explain_bus_errors(ranges::explain_bus_error);
        // Blocks that can be moved have pages of their own then, and their pages serve nothing else when they are freed.
        // SAFETY: takes numbers.
        unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, BACKED_MIN_BYTES as c_int) };
    }
    Ok(())
}

/// Whether private memory that is registered moves into swap files, which forked children do not inherit.
pub fn has_swap() -> bool {
    SWAP_SPACE.get().is_some()
}

/// A lease of the memory of a range that is about to be registered, to be kept until it is deregistered; `None` where
/// memory is not paged. Memory that has a lease does not move.
///
/// # Errors
/// ENOMEM if the budget exceeds the available memory, after a line for the user.
pub fn lease(range: HostRange, access: u32) -> Result<Option<Lease>> {
    let Ok(Some(settings)) = settings() else { return Ok(None) };
    let is_on_demand = access & IBV_ACCESS_ON_DEMAND != 0;
    if range.len == 0 || !is_on_demand && !has_swap() {
        return Ok(None);
    }
    let (lease, reason) = table::lease(range, is_on_demand, SWAP_SPACE.get(), settings)?;
    match reason {
        None | Some(NotPaged::NotWanted) => {}
        Some(NotPaged::Private(refusal)) => note_private(range, &refusal),
        Some(NotPaged::Refused(refusal)) => tracing::warn!(
            addr = format_args!("{:#x}", range.addr),
            len = range.len,
            "a region stays ordinary on-demand memory outside of --dram's budget: {refusal}"
        ),
    }
    Ok(lease)
}

/// Logs why private memory is not paged. A missing privilege concerns all of it, and is logged once.
fn note_private(range: HostRange, refusal: &Refusal) {
    static IS_PRIVILEGE_LOGGED: AtomicBool = AtomicBool::new(false);
    let is_expected = match refusal {
        Refusal::Small | Refusal::NotPrivate => true,
        Refusal::Privilege => IS_PRIVILEGE_LOGGED.swap(true, Ordering::Relaxed),
        Refusal::Registered
        | Refusal::Stack
        | Refusal::Pinned
        | Refusal::OtherUserfaultfd
        | Refusal::System { .. } => false,
    };
    let (addr, len) = (format_args!("{:#x}", range.addr), range.len);
    if is_expected {
        tracing::debug!(%addr, len, "a region stays ordinary memory: {refusal}");
    } else {
        tracing::warn!(%addr, len, "a region stays ordinary memory outside of --dram's budget: {refusal}");
    }
}
