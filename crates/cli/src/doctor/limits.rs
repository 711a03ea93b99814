//! Limits of the process, its control groups and the system.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

use super::check::Check;

/// Descriptors that a program with a few devices takes, besides its own.
const OPEN_FILES_MIN: u64 = 256;
/// The kernel's own default.
const MAPPINGS_MIN: u64 = 65_530;

pub fn checks() -> Vec<Check> {
    vec![
        open_files(getrlimit(Resource::Nofile).current),
        locked_memory(getrlimit(Resource::Memlock).current),
        mappings(read_number("/proc/sys/vm/max_map_count")),
        memory_limit(terrace_pages::memory_limit()),
        shared_memory(Path::new("/dev/shm")),
        huge_pages(),
    ]
}

fn open_files(limit: Option<u64>) -> Check {
    match limit {
        Some(limit) if limit < OPEN_FILES_MIN => Check::limited(
            "open files",
            format!(
                "{limit} descriptors: a program with several devices or many same-host peers runs out of them"
            ),
            "ulimit -n 4096 (LimitNOFILE= of a service, --ulimit nofile= of a container)",
        ),
        Some(limit) => {
            Check::ok("open files", format!("{limit} descriptors; queue pairs and regions take none"))
        }
        None => Check::ok("open files", "no limit"),
    }
}

/// Registered memory is never locked, except by modes that are there for comparison. So no limit is too low for programs.
fn locked_memory(limit: Option<u64>) -> Check {
    let limit = limit.map_or("no limit".to_owned(), |bytes| format!("{} KiB", bytes >> 10));
    Check::ok(
        "locked memory",
        format!(
            "{limit}; not needed, as registered memory is not locked (modes for comparison lock it, and \
             `terrace swap-device` locks its own)"
        ),
    )
}

fn mappings(limit: Option<u64>) -> Check {
    const NAME: &str = "vm.max_map_count";
    match limit {
        Some(limit) if limit < MAPPINGS_MIN => Check::limited(
            NAME,
            format!(
                "{limit} mappings in a process: one with many same-host peers runs out of them, and the kernel copies instead"
            ),
            format!("sysctl -w {NAME}={MAPPINGS_MIN}"),
        ),
        Some(limit) => Check::ok(
            NAME,
            format!("{limit} mappings in a process; same-host peers map each other's regions"),
        ),
        None => Check::ok(NAME, "/proc does not tell the limit"),
    }
}

fn memory_limit(limit: Option<(u64, PathBuf)>) -> Check {
    const NAME: &str = "memory cgroup";
    match limit {
        None => Check::ok(NAME, "no limit on memory"),
        Some((bytes, file)) => Check::limited(
            NAME,
            format!("{} MiB: budgets (--dram) that do not fit below it are refused", bytes >> 20),
            format!("raise it where it is too low: {}", file.display()),
        ),
    }
}

/// The type of file systems in memory (TMPFS_MAGIC of linux/magic.h).
const TMPFS: i64 = 0x0102_1994;

/// Pools of pages and rings between processes are files there, or files in memory without a name.
fn shared_memory(directory: &Path) -> Check {
    let name = "/dev/shm";
    let advice = "mount -t tmpfs tmpfs /dev/shm (--shm-size= of a container)";
    let free = rustix::fs::statvfs(directory).map(|system| system.f_bavail * system.f_frsize).unwrap_or(0);
    let is_writable = rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).is_ok();
    let is_in_memory = rustix::fs::statfs(directory).is_ok_and(|system| system.f_type == TMPFS);
    match (is_writable, free >> 20) {
        (true, _) if !is_in_memory => {
            Check::missing(name, "is on a disk: pages of `terrace serve` end with the server", advice)
        }
        (true, free @ 64..) => Check::ok(
            name,
            format!("{free} MiB are free for pages of `terrace serve`, which outlive it there"),
        ),
        (true, free) => Check::limited(
            name,
            format!(
                "{free} MiB are free: a larger budget of `terrace serve` is in memory that ends with the server"
            ),
            advice,
        ),
        (false, _) => {
            Check::missing(name, "not writable: pages of `terrace serve` end with the server", advice)
        }
    }
}

fn huge_pages() -> Check {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    huge_pages_of(free_huge_bytes(Path::new("/sys/kernel/mm/hugepages")), writable_hugetlbfs(&mounts))
}

fn huge_pages_of(free_bytes: u64, mount: Option<&str>) -> Check {
    const NAME: &str = "huge pages";
    let without = "`terrace serve` keeps pages in /dev/shm, at more TLB misses";
    match (free_bytes >> 20, mount) {
        (0, _) => Check::missing(
            NAME,
            format!("none are set aside: {without}"),
            "sysctl -w vm.nr_hugepages=N, each of 2 MiB",
        ),
        (free, None) => Check::limited(
            NAME,
            format!("{free} MiB are set aside, and no writable hugetlbfs is mounted: {without}"),
            "mount -t hugetlbfs -o mode=1777 none /dev/hugepages",
        ),
        (free, Some(mount)) => Check::ok(
            NAME,
            format!("{free} MiB are free, and {mount} is writable: `terrace serve` takes them"),
        ),
    }
}

/// The memory of free huge pages of all sizes.
fn free_huge_bytes(directory: &Path) -> u64 {
    let sizes = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes_of = |entry: fs::DirEntry| -> Option<u64> {
        let name = entry.file_name().into_string().ok()?;
        let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        Some(read_number(entry.path().join("free_hugepages"))? * (kib << 10))
    };
    sizes.filter_map(bytes_of).sum()
}

/// The first mount of hugetlbfs that this user can write to.
fn writable_hugetlbfs(mounts: &str) -> Option<&str> {
    let mut paths = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == "hugetlbfs").then_some(path)
    });
    paths.find(|path| rustix::fs::access(*path, rustix::fs::Access::WRITE_OK).is_ok())
}

/// The number in a file of the kernel.
pub fn read_number(path: impl AsRef<Path>) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::State;

    #[test]
    fn few_descriptors_and_mappings_are_limits() {
        assert_eq!(open_files(Some(64)).state, State::Limited);
        assert_eq!(open_files(Some(1024)).state, State::Ok);
        assert_eq!(open_files(None).state, State::Ok);
        assert_eq!(mappings(Some(1000)).state, State::Limited);
        assert_eq!(mappings(Some(65_530)).state, State::Ok);
    }

    #[test]
    fn no_limit_on_locked_memory_is_too_low() {
        assert_eq!(locked_memory(Some(0)).state, State::Ok);
    }

    #[test]
    fn a_limit_of_a_control_group_names_its_file() {
        let check = memory_limit(Some((256 << 20, "/sys/fs/cgroup/a/memory.max".into())));
        assert_eq!(check.state, State::Limited);
        assert!(
            check.meaning.starts_with("256 MiB")
                && check.advice.unwrap().ends_with("/sys/fs/cgroup/a/memory.max")
        );
        assert_eq!(memory_limit(None).state, State::Ok);
    }

    #[test]
    fn huge_pages_need_a_mount() {
        assert_eq!(huge_pages_of(0, Some("/dev/hugepages")).state, State::Missing);
        assert_eq!(huge_pages_of(4 << 20, None).state, State::Limited);
        assert_eq!(huge_pages_of(4 << 20, Some("/dev/hugepages")).state, State::Ok);
        let mounts =
            "proc /proc proc rw 0 0\nnone /nonexistent hugetlbfs rw 0 0\nnone /tmp hugetlbfs rw 0 0\n";
        assert_eq!(writable_hugetlbfs(mounts), Some("/tmp"));
    }

    #[test]
    fn shared_memory_may_be_missing() {
        assert_eq!(shared_memory(Path::new("/nonexistent")).state, State::Missing);
        let on_disk = shared_memory(Path::new(env!("CARGO_MANIFEST_DIR")));
        assert!(on_disk.state == State::Missing && on_disk.meaning.contains("on a disk"));
    }
}
