//! Files and control groups of interrupted runs. Their names contain the process ID of the run.

use std::path::{Path, PathBuf};

const PREFIX: &str = "terrace-bench-";

/// A name with the ID of this process.
pub(crate) fn name(suffix: &str) -> String {
    format!("{PREFIX}{}-{suffix}", std::process::id())
}

/// The entries of `dir` with such names whose process does not exist.
pub(crate) fn of_dead_processes(dir: &Path) -> Vec<PathBuf> {
    let is_left = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
        owner
            .and_then(|(pid, _)| pid.parse::<u32>().ok())
            .is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
    };
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_left).collect()
}
