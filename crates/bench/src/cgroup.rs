//! Limits of the server's process by control groups, version 2 or 1.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::leftovers;

const MOUNT: &str = "/sys/fs/cgroup";

/// An error of limiting the server's process.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// There is no controller that this user may use.
    #[error(
        "cannot limit the server's {resource} here ({tried}): needs root and a cgroup {resource} controller"
    )]
    Unavailable {
        /// `memory` or `IO`.
        resource: &'static str,
        /// The attempts, and their errors.
        tried: String,
    },
}

/// The limits that throttle a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle {
    /// The major and minor number of the whole disk.
    pub device: (u32, u32),
    /// I/Os per second, for reads and for writes.
    pub iops: u64,
    /// Bytes per second, for reads and for writes.
    pub bytes_per_s: u64,
}

/// A control group with limits. Dropping it removes the group, whose processes must have ended.
#[derive(Debug)]
pub struct Group {
    /// `None` without a limit.
    memory: Option<PathBuf>,
    peak_file: &'static str,
    /// The group's directory in the separate hierarchy for I/O of version 1.
    io: Option<PathBuf>,
}

impl Group {
    /// No group: processes stay in this process's.
    pub fn unlimited() -> Group {
        Group { memory: None, peak_file: "", io: None }
    }

    /// Whether this user may limit memory here; otherwise the reason.
    pub fn check() -> Result<(), GroupError> {
        Group::new(&leftovers::name("check"), 1 << 20, None).map(drop)
    }

    /// Creates a group.
    pub fn new(name: &str, limit_bytes: u64, throttle: Option<Throttle>) -> Result<Group, GroupError> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Group::below(Path::new(MOUNT), &own, name, limit_bytes, throttle)
    }

    fn below(
        mount: &Path,
        own: &str,
        name: &str,
        limit_bytes: u64,
        throttle: Option<Throttle>,
    ) -> Result<Group, GroupError> {
        let version_2 = match version_2(mount, own, name, limit_bytes) {
            Ok(group) => return group.throttled_2(throttle),
            Err(error) => error,
        };
        match version_1(mount, own, name, limit_bytes) {
            Ok(group) => group.throttled_1(mount, own, name, throttle),
            Err(version_1) => Err(GroupError::Unavailable {
                resource: "memory",
                tried: format!("cgroup v2: {version_2}; cgroup v1: {version_1}"),
            }),
        }
    }

    /// The files to which a joining process writes its process ID.
    pub fn process_lists(&self) -> impl Iterator<Item = PathBuf> {
        [&self.memory, &self.io].into_iter().flatten().map(|path| path.join("cgroup.procs"))
    }

    /// The peak memory use of the group, including page cache; `None` if this kernel does not record it.
    pub fn peak_bytes(&self) -> Option<u64> {
        fs::read_to_string(self.memory.as_ref()?.join(self.peak_file)).ok()?.trim().parse().ok()
    }

    fn throttled_2(self, throttle: Option<Throttle>) -> Result<Group, GroupError> {
        let (Some(memory), Some(Throttle { device: (major, minor), iops, bytes_per_s })) =
            (&self.memory, throttle)
        else {
            return Ok(self);
        };
        let line = format!("{major}:{minor} rbps={bytes_per_s} wbps={bytes_per_s} riops={iops} wiops={iops}");
        let parent = memory.parent().expect("a group is in the mount");
        if !words(&parent.join("cgroup.subtree_control")).any(|word| word == "io") {
            // If the controller cannot be delegated, the file below does not exist, and its error is reported.
            let _ = fs::write(parent.join("cgroup.subtree_control"), "+io");
        }
        fs::write(memory.join("io.max"), line).map_err(|error| no_io_controller("cgroup v2", &error))?;
        Ok(self)
    }

    fn throttled_1(
        mut self,
        mount: &Path,
        own: &str,
        name: &str,
        throttle: Option<Throttle>,
    ) -> Result<Group, GroupError> {
        let Some(Throttle { device: (major, minor), iops, bytes_per_s }) = throttle else {
            return Ok(self);
        };
        let path = version_1_parent(mount, own, "blkio").join(name);
        make_dir(&path).map_err(|error| no_io_controller("cgroup v1", &error))?;
        // Dropping the group removes this directory, too.
        self.io = Some(path.clone());
        for (file, limit) in
            [("read_iops", iops), ("write_iops", iops), ("read_bps", bytes_per_s), ("write_bps", bytes_per_s)]
        {
            fs::write(path.join(format!("blkio.throttle.{file}_device")), format!("{major}:{minor} {limit}"))
                .map_err(|error| no_io_controller("cgroup v1", &error))?;
        }
        Ok(self)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for path in [&self.memory, &self.io].into_iter().flatten() {
            // The kernel may need some milliseconds to release a process that has just ended.
            for _ in 0..50 {
                match fs::remove_dir(path) {
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    _ => break,
                }
            }
        }
    }
}

fn no_io_controller(version: &str, error: &io::Error) -> GroupError {
    GroupError::Unavailable { resource: "IO", tried: format!("{version}: {error}") }
}

fn words(path: &Path) -> impl Iterator<Item = String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect::<Vec<_>>().into_iter()
}

/// The path of this process in a controller's hierarchy, from `/proc/self/cgroup`; version 2 has no controller name.
fn own_path<'a>(own: &'a str, controller: &str) -> &'a str {
    own.lines()
        .filter_map(|line| line.split_once(':').and_then(|(_, rest)| rest.split_once(':')))
        .find(|(controllers, _)| controllers.split(',').any(|name| name == controller))
        .map_or("", |(_, path)| path.trim_start_matches('/'))
}

/// Creates a group's directory, and removes groups of interrupted runs beside it.
fn make_dir(path: &Path) -> io::Result<()> {
    for left in path.parent().map(leftovers::of_dead_processes).unwrap_or_default() {
        // This fails for groups in use, which stay.
        let _ = fs::remove_dir(left);
    }
    fs::create_dir(path)
}

fn create_group(path: PathBuf, limit: (&str, u64), peak_file: &'static str) -> io::Result<Group> {
    make_dir(&path)?;
    let limit_file = path.join(limit.0);
    let group = Group { memory: Some(path), peak_file, io: None };
    fs::write(limit_file, limit.1.to_string())?;
    Ok(group)
}

fn version_2(mount: &Path, own: &str, name: &str, limit_bytes: u64) -> io::Result<Group> {
    let has_memory = |path: &Path| words(path).any(|word| word == "memory");
    if !has_memory(&mount.join("cgroup.controllers")) {
        return Err(io::Error::other("no memory controller"));
    }
    // A group with processes cannot delegate controllers to children. The loop finds the nearest ancestor that delegates.
    let mut parent = mount.join(own_path(own, ""));
    while parent != mount && !has_memory(&parent.join("cgroup.subtree_control")) {
        parent.pop();
    }
    if !has_memory(&parent.join("cgroup.subtree_control")) {
        fs::write(parent.join("cgroup.subtree_control"), "+memory")?;
    }
    create_group(parent.join(name), ("memory.max", limit_bytes), "memory.peak")
}

fn version_1_parent(mount: &Path, own: &str, controller: &str) -> PathBuf {
    let mount = mount.join(controller);
    let inside = mount.join(own_path(own, controller));
    // In a container the path may be one of the host, which does not exist here.
    if inside.is_dir() { inside } else { mount }
}

fn version_1(mount: &Path, own: &str, name: &str, limit_bytes: u64) -> io::Result<Group> {
    if !mount.join("memory/memory.limit_in_bytes").exists() {
        return Err(io::Error::other("no memory controller"));
    }
    let path = version_1_parent(mount, own, "memory").join(name);
    create_group(path, ("memory.limit_in_bytes", limit_bytes), "memory.max_usage_in_bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    const THROTTLE: Throttle = Throttle { device: (254, 0), iops: 1000, bytes_per_s: 4 << 20 };

    fn read(path: PathBuf) -> String {
        fs::read_to_string(path).unwrap()
    }

    /// A directory with the files of a mount that this module uses.
    fn version_1_mount() -> tempfile::TempDir {
        let mount = tempfile::tempdir().unwrap();
        for path in ["memory/container", "blkio"] {
            fs::create_dir_all(mount.path().join(path)).unwrap();
        }
        fs::write(mount.path().join("memory/memory.limit_in_bytes"), "").unwrap();
        mount
    }

    #[test]
    fn version_1_uses_its_own_group_if_that_is_visible() {
        let mount = version_1_mount();
        let own = "4:memory:/container\n7:blkio:/elsewhere\n0::/\n";
        let group = Group::below(mount.path(), own, "g", 512 << 20, Some(THROTTLE)).unwrap();
        let (memory, io) = (mount.path().join("memory/container/g"), mount.path().join("blkio/g"));
        assert_eq!(read(memory.join("memory.limit_in_bytes")), "536870912");
        assert_eq!(read(io.join("blkio.throttle.read_iops_device")), "254:0 1000");
        assert_eq!(
            group.process_lists().collect::<Vec<_>>(),
            [memory.join("cgroup.procs"), io.join("cgroup.procs")]
        );
    }

    #[test]
    fn version_2_uses_the_nearest_ancestor_that_delegates() {
        let mount = tempfile::tempdir().unwrap();
        fs::create_dir_all(mount.path().join("user/session")).unwrap();
        fs::write(mount.path().join("cgroup.controllers"), "cpu io memory").unwrap();
        fs::write(mount.path().join("user/cgroup.subtree_control"), "memory io").unwrap();
        let group = Group::below(mount.path(), "0::/user/session\n", "g", 1 << 20, Some(THROTTLE)).unwrap();
        let path = mount.path().join("user/g");
        assert_eq!(read(path.join("memory.max")), "1048576");
        assert!(read(path.join("io.max")).starts_with("254:0 rbps=4194304 "));
        fs::write(path.join("memory.peak"), "77\n").unwrap();
        assert_eq!(group.peak_bytes(), Some(77));
    }

    #[test]
    fn without_a_controller_the_error_states_the_requirements() {
        let mount = tempfile::tempdir().unwrap();
        let message = Group::below(mount.path(), "0::/\n", "g", 1, None).unwrap_err().to_string();
        assert!(
            message.contains("needs root") && message.contains("cgroup v2: no memory controller"),
            "{message}"
        );
    }

    #[test]
    fn a_group_is_removed_if_a_limit_is_refused() {
        let mount = version_1_mount();
        fs::remove_dir(mount.path().join("blkio")).unwrap();
        let message =
            Group::below(mount.path(), "4:memory:/\n", "g", 1, Some(THROTTLE)).unwrap_err().to_string();
        assert!(message.contains("IO controller"), "{message}");
    }
}
