//! Checks a memory budget against the machine, the control group and the limits of the process.

use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use terrace_pages::{check_memory, field_bytes};

use crate::config::{BaselineConfig, IoMethod};
use crate::error::BaselineError;

/// The bit of `CAP_IPC_LOCK`, which permits locking any amount of memory.
const CAP_IPC_LOCK: u32 = 14;
/// Kernel memory, in bytes, for the metadata of `resident_bytes` of page cache; a control group's limit includes it.
/// Per page on ext4: 104 bytes for the buffer head once the page was written, some 20 for its entries in the page table
/// and the page cache.
pub fn kernel_bytes(resident_bytes: u64) -> u64 {
    resident_bytes / 32
}

/// Checks a budget. If memory is to be locked, raises the soft memlock limit as far as needed and permitted.
///
/// # Errors
/// `Pages`, `MemlockLimit`.
pub fn check(config: &BaselineConfig) -> Result<(), BaselineError> {
    if config.dram_bytes == 0 {
        return Ok(());
    }
    check_memory(config.dram_bytes, config.pool_bytes() + kernel_bytes(config.dram_bytes))?;
    match config.io {
        IoMethod::Pinned => check_memlock(Path::new("/proc"), config.dram_bytes),
        _ => Ok(()),
    }
}

fn check_memlock(proc: &Path, budget: u64) -> Result<(), BaselineError> {
    let status = std::fs::read_to_string(proc.join("self/status")).unwrap_or_default();
    if may_lock_anything(&status, &std::fs::read_to_string(proc.join("self/uid_map")).unwrap_or_default()) {
        return Ok(());
    }
    let used = field_bytes(&status, "VmLck").unwrap_or(0);
    let needed = budget.saturating_add(used);
    let Rlimit { current, maximum } = getrlimit(Resource::Memlock);
    if current.is_none_or(|limit| limit >= needed) {
        return Ok(());
    }
    if maximum.is_none_or(|limit| limit >= needed)
        && setrlimit(Resource::Memlock, Rlimit { current: Some(needed), maximum }).is_ok()
    {
        return Ok(());
    }
    Err(BaselineError::MemlockLimit { budget, limit: maximum.unwrap_or(0), used })
}

/// Whether `/proc/self/status` shows `CAP_IPC_LOCK`, and in the initial user namespace, where it applies.
fn may_lock_anything(status: &str, uid_map: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let whole: Vec<&str> = uid_map.split_whitespace().collect();
    effective & (1 << CAP_IPC_LOCK) != 0 && (whole.is_empty() || whole == ["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_to_lock_counts_only_outside_containers() {
        let status = "Name:\tx\nCapEff:\t000001ffffffffff\nVmLck:\t      12 kB\n";
        assert!(may_lock_anything(status, "         0          0 4294967295\n"));
        assert!(!may_lock_anything(status, "         0       1000          1\n"));
        assert!(!may_lock_anything("CapEff:\t0000000000000000\n", "0 0 4294967295"));
    }

    #[test]
    fn a_budget_beyond_the_machine_is_refused() {
        let error = check(&BaselineConfig::new(IoMethod::Pinned, 1 << 60)).unwrap_err();
        assert!(matches!(error, BaselineError::Pages(_)), "{error}");
        assert!(check(&BaselineConfig::new(IoMethod::Pinned, 0)).is_ok());
    }
}
