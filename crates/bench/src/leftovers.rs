//! Files and control groups that an interrupted run could not remove. Their names contain the process ID of their run.

use std::path::{Path, PathBuf};

const PREFIX: &str = "terrace-bench-";

/// A name with the ID of this process.
pub(crate) fn name(what: &str) -> String {
    format!("{PREFIX}{}-{what}", std::process::id())
}

/// The entries of `dir` with such names whose process does not exist any more.
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
