//! Files and control groups of interrupted runs. Their names contain the process ID of the run.

use std::fs;
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
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_left).collect()
}

/// Removes the files and directories in `dir` that this process has made: it ends in the middle of a run.
pub fn remove_own(dir: &Path) {
    let own = name("");
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&own) {
            let path = entry.path();
            // What cannot be removed is left to a later run.
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }
}
