//! Limits.

/// Bytes of a window, a power of two. Windows of huge pages have at least one page.
pub const WINDOW_BYTES: u64 = 256 << 20;

/// The share of the mappings that the kernel permits a process: one in this many may be a window.
const MAPPINGS_SHARE: usize = 4;
/// Most windows by default.
const WINDOWS_MAX: usize = 16 << 10;
/// Mappings of a process if the kernel does not say (`vm.max_map_count`).
const MAPPINGS_MAX: usize = 65_530;

/// Limits of all files of a process.
#[derive(Clone, Debug)]
pub struct FilesConfig {
    /// Most windows at a time. Without a window an access takes a system call.
    pub windows_max: usize,
    /// Most threads that wait for disks.
    pub workers_max: usize,
}

impl Default for FilesConfig {
    /// 16,384 windows, but at most a quarter of the mappings that the kernel permits the process; 8 threads.
    fn default() -> FilesConfig {
        let said = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let mappings_max = said.and_then(|text| text.trim().parse().ok()).unwrap_or(MAPPINGS_MAX);
        FilesConfig { windows_max: WINDOWS_MAX.min(mappings_max / MAPPINGS_SHARE), workers_max: 8 }
    }
}
