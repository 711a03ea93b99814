//! The process of a swap device: the kernel frees memory through it, so it may not wait for memory itself.

use std::fs;
use std::io;

use rustix::process::{Resource, configure_io_flusher_behavior, getrlimit};

use crate::swap_device::SwapDeviceError;

/// The kernel does not choose a process with this value when memory runs out (`proc_pid_oom_score_adj(5)`).
const NEVER_KILLED: &str = "-1000";

/// What the kernel has refused, and why.
pub struct Refusal(&'static str, io::Error);

/// Keeps the heap, and asks the kernel not to write pages back for this process's allocations, which may be where they are written to, and
/// not to kill it for its memory. To be called before threads start: the log's, too, would get a heap of its own. An unprivileged process is
/// refused both requests.
pub fn protect() -> Vec<Refusal> {
    terrace_vm::keep_heap();
    let is_flusher = configure_io_flusher_behavior(true).map_err(io::Error::from);
    let is_kept = fs::write("/proc/self/oom_score_adj", NEVER_KILLED);
    let attempts = [
        ("a kernel short of memory may wait for itself: PR_SET_IO_FLUSHER", is_flusher),
        ("a kernel out of memory may kill this process: oom_score_adj", is_kept),
    ];
    attempts.into_iter().filter_map(|(what, result)| Some(Refusal(what, result.err()?))).collect()
}

/// Logs what was refused: as a warning if the process serves its own kernel.
pub fn report(refusals: &[Refusal], serves_own_kernel: bool) {
    for Refusal(refused, error) in refusals {
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
