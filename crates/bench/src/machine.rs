//! The description of the measured machine.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Serialize;

/// A description of this machine, for the results.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor model.
    pub cpu: String,
    /// Processors of the machine.
    pub cores: usize,
    /// Memory of the machine, in MiB.
    pub memory_mib: u64,
    /// Kernel release.
    pub kernel: String,
    /// The data directory's file system and disk.
    pub disk: String,
    /// Control groups: `v1` or `v2`.
    pub cgroups: &'static str,
    /// The version of `terrace`.
    pub version: &'static str,
    /// The load average over one minute before the first measurement, caused by other programs.
    pub load: String,
}

impl Machine {
    /// Describes this machine. Unknown fields are `?`.
    pub fn describe(data: &Path) -> Machine {
        let cpu = read("/proc/cpuinfo");
        let memory = read("/proc/meminfo");
        Machine {
            cpu: field(&cpu, "model name").unwrap_or("?").to_owned(),
            // Not those that this thread may use: it may be pinned by now.
            cores: cpu.lines().filter(|line| line.starts_with("processor")).count().max(1),
            memory_mib: (field(&memory, "MemTotal"))
                .and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
                .map_or(0, |kib| kib >> 10),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            disk: disk(data),
            cgroups: if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() { "v2" } else { "v1" },
            version: env!("CARGO_PKG_VERSION"),
            load: read("/proc/loadavg").split_whitespace().next().unwrap_or("?").to_owned(),
        }
    }

    /// The description in one line.
    pub fn line(&self) -> String {
        format!(
            "{}, {} cores, {} GiB, Linux {}, {}, cgroups {}",
            self.cpu,
            self.cores,
            (self.memory_mib + 512) >> 10,
            self.kernel,
            self.disk,
            self.cgroups
        )
    }
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value of a `name : value` line in a file of `/proc`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim())
}

/// The file system of `path`, and its device.
fn disk(path: &Path) -> String {
    let Ok(device) = fs::metadata(path).map(|metadata| metadata.dev()) else {
        return "?".into();
    };
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = read("/proc/self/mountinfo");
    // "36 35 98:0 /root /mount options - ext4 /dev/vda ..."
    let file_system = mounts
        .lines()
        .find(|line| line.split(' ').nth(2) == Some(&numbers))
        .and_then(|line| line.split_once(" - "))
        .map_or("?", |(_, rest)| rest.split(' ').next().unwrap_or("?"));
    let sys = fs::canonicalize(format!("/sys/dev/block/{numbers}")).unwrap_or_default();
    let name = sys.file_name().map_or_else(|| numbers.clone(), |name| name.to_string_lossy().into_owned());
    let model = read(sys.join("device/model"));
    match model.trim() {
        "" => format!("{file_system} on {name}"),
        model => format!("{file_system} on {name} ({model})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_kernel_and_memory() {
        let machine = Machine::describe(Path::new("/"));
        assert!(machine.memory_mib > 0 && !machine.kernel.is_empty(), "{machine:?}");
        assert!(machine.line().contains("Linux"), "{}", machine.line());
    }

    #[test]
    fn fields_of_proc_are_found() {
        assert_eq!(field("a : b\nmodel name\t: X Y\n", "model name"), Some("X Y"));
        assert_eq!(field("a : b", "c"), None);
    }
}
