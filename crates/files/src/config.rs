//! Limits.

use rustix::process::{Resource, getrlimit};

/// Bytes of a window, a power of two. Windows of huge pages have at least one page.
pub const WINDOW_BYTES: u64 = 256 << 20;

/// The share of the mappings that the kernel permits a process: one in this many may be a window.
const MAPPINGS_SHARE: usize = 4;
/// Most windows by default.
const WINDOWS_MAX: usize = 16 << 10;
/// Mappings of a process if the kernel does not say (`vm.max_map_count`).
const MAPPINGS_MAX: usize = 65_530;

/// The share of the process's descriptors that files have: one in this many.
const DESCRIPTORS_SHARE: u64 = 4;
/// Descriptors of a process without a limit.
const DESCRIPTORS_MAX: u64 = 1 << 20;

/// Limits of all files of a process.
#[derive(Clone, Debug)]
pub struct FilesConfig {
    /// Most windows at a time. Without a window an access takes a system call.
    pub windows_max: usize,
    /// Most descriptors at a time, as far as the others can be parked. Without a descriptor an access takes a microsecond
    /// more.
    pub descriptors_max: usize,
    /// Most threads that wait for disks.
    pub workers_max: usize,
}

impl Default for FilesConfig {
    /// 16,384 windows, but at most a quarter of the mappings that the kernel permits the process; a quarter of the
    /// descriptors that the process may have now; 8 threads.
    fn default() -> FilesConfig {
        let said = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let mappings_max = said.and_then(|text| text.trim().parse().ok()).unwrap_or(MAPPINGS_MAX);
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(DESCRIPTORS_MAX);
        FilesConfig {
            windows_max: WINDOWS_MAX.min(mappings_max / MAPPINGS_SHARE),
            descriptors_max: (descriptors.min(DESCRIPTORS_MAX) / DESCRIPTORS_SHARE) as usize,
            workers_max: 8,
        }
    }
}
