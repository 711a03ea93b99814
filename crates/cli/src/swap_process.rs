//! The process of a swap device: the kernel frees memory through it, so it may not wait for memory itself.

use std::fs;
use std::io;

use rustix::process::{Resource, configure_io_flusher_behavior, getrlimit};

use crate::swap_device::SwapDeviceError;

/// The kernel does not choose a process with this value when memory runs out (`proc_pid_oom_score_adj(5)`).
const NEVER_KILLED: &str = "-1000";

/// Asks the kernel not to write pages back for this process's allocations, which may be where they are written to, and not to kill
/// it for its memory. Threads that start later inherit the first. An unprivileged process has neither, which the log says: as a
/// warning if the process serves its own kernel.
pub fn protect(serves_own_kernel: bool) {
    terrace_vm::keep_heap();
    let is_flusher = configure_io_flusher_behavior(true).map_err(io::Error::from);
    let is_kept = fs::write("/proc/self/oom_score_adj", NEVER_KILLED);
    let attempts = [
        ("a kernel short of memory may wait for itself: PR_SET_IO_FLUSHER", is_flusher),
        ("a kernel out of memory may kill this process: oom_score_adj", is_kept),
    ];
    for (refused, result) in attempts {
        let Err(error) = result else { continue };
        match serves_own_kernel {
            true => tracing::warn!(%error, "{refused} needs CAP_SYS_RESOURCE"),
            false => tracing::info!(%error, "{refused} needs CAP_SYS_RESOURCE"),
        }
    }
}

/// Locks what is mapped and what will be.
///
/// # Errors
/// `Lock` without the right to lock so much.
pub fn lock_memory() -> Result<(), SwapDeviceError> {
    terrace_vm::lock_memory().map_err(|error| {
        let limit = getrlimit(Resource::Memlock).current;
        let limit = limit.map_or("unlimited".into(), |bytes| format!("{} KiB", bytes >> 10));
        SwapDeviceError::Lock { error, limit }
    })
}
