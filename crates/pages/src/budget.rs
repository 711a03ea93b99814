//! Checks a memory budget against the machine and the control group.

use std::path::{Path, PathBuf};

use crate::error::PagesError;

/// A control group without a limit reports about `i64::MAX`.
const CGROUP_LIMIT_MAX: u64 = 1 << 60;

/// Checks a budget, beside which `overhead` bytes of memory are used for other things.
///
/// # Errors
/// `MachineMemory`, `CgroupLimit`.
pub fn check_memory(budget: u64, overhead: u64) -> Result<(), PagesError> {
    let proc = Path::new("/proc");
    check_machine(proc, budget)?;
    check_cgroup(proc, budget, overhead)
}

/// The number after a name in a file like `/proc/meminfo`, which is in kB, in bytes.
pub fn field_bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

fn check_machine(proc: &Path, budget: u64) -> Result<(), PagesError> {
    let info = std::fs::read_to_string(proc.join("meminfo")).unwrap_or_default();
    match field_bytes(&info, "MemTotal") {
        Some(memory) if budget > memory => Err(PagesError::MachineMemory { budget, memory }),
        _ => Ok(()),
    }
}

fn check_cgroup(proc: &Path, budget: u64, overhead: u64) -> Result<(), PagesError> {
    let Some((limit, file)) = cgroup_limit(proc) else { return Ok(()) };
    if budget.saturating_add(overhead) > limit {
        return Err(PagesError::CgroupLimit { budget, overhead, limit, file });
    }
    Ok(())
}

/// The lowest limit on memory of this process's control groups, in bytes, and its file. `None` without a limit.
pub fn memory_limit() -> Option<(u64, PathBuf)> {
    cgroup_limit(Path::new("/proc"))
}

fn cgroup_limit(proc: &Path) -> Option<(u64, PathBuf)> {
    let groups = std::fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let mounts = std::fs::read_to_string(proc.join("self/mountinfo")).unwrap_or_default();
    lowest_limit(&limit_files(&groups, &mounts))
}

/// The lowest limit in the files.
fn lowest_limit(files: &[PathBuf]) -> Option<(u64, PathBuf)> {
    let limit_of = |file: &PathBuf| std::fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let limits = files.iter().filter_map(|file| Some((limit_of(file)?, file.clone())));
    limits.filter(|(limit, _)| *limit < CGROUP_LIMIT_MAX).min_by_key(|(limit, _)| *limit)
}

/// The files with memory limits of the process, from its own control group up to the root, for versions 1 and 2.
fn limit_files(groups: &str, mounts: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (mount, name) = if controllers.is_empty() {
            (mount_of(mounts, |kind, _| kind == "cgroup2"), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            let is_memory =
                |kind: &str, options: &str| kind == "cgroup" && options.split(',').any(|o| o == "memory");
            (mount_of(mounts, is_memory), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let Some((root, point)) = mount else { continue };
        // In a container the mount may show only the group's own subtree.
        let below = Path::new(group).strip_prefix(&root).unwrap_or(Path::new(""));
        let own = point.join(below);
        let above = own.ancestors().take_while(|path| path.starts_with(&point));
        files.extend(above.map(|path| path.join(name)));
    }
    files
}

/// Root and mount point of the first mount whose type and super options match.
fn mount_of(mounts: &str, matches: impl Fn(&str, &str) -> bool) -> Option<(PathBuf, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (kind, options) = (kind.next()?, kind.nth(1).unwrap_or(""));
        let mut place = place.split(' ').skip(3);
        matches(kind, options).then_some((place.next()?.into(), place.next()?.into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn both_versions_are_looked_at_up_to_the_root() {
        let files = limit_files("4:memory:/a/b\n0::/c\n3:cpuset:/x\n", MOUNTS);
        let wanted = [
            "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/a/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/unified/c/memory.max",
            "/sys/fs/cgroup/unified/memory.max",
        ];
        assert_eq!(files, wanted.map(PathBuf::from));
        let inside = MOUNTS.replace("0:32 / ", "0:32 /docker/1 ");
        let files = limit_files("4:memory:/docker/1/x\n", &inside);
        assert_eq!(files[0], Path::new("/sys/fs/cgroup/memory/x/memory.limit_in_bytes"));
        assert!(limit_files("nonsense\n\n", MOUNTS).is_empty());
    }

    #[test]
    fn the_lowest_limit_counts() {
        let dir = std::env::temp_dir().join(format!("terrace-pages-limits-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let files =
            [file("a", "max\n"), file("b", "4096\n"), file("c", "9223372036854771712\n"), dir.join("d")];
        assert_eq!(lowest_limit(&files), Some((4096, dir.join("b"))));
        assert_eq!(lowest_limit(&[files[0].clone(), files[2].clone()]), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_budget_beyond_the_machine_is_refused() {
        let error = check_memory(1 << 60, 0).unwrap_err();
        assert!(
            matches!(error, PagesError::MachineMemory { .. } | PagesError::CgroupLimit { .. }),
            "{error}"
        );
        assert!(check_memory(0, 0).is_ok());
        assert_eq!(field_bytes("Name:\tx\nVmLck:\t      12 kB\n", "VmLck"), Some(12 << 10));
    }
}
