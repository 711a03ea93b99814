//! `terrace doctor` as root, as another user, and in a root without privileges. What it says is compared with what the test
//! finds out by itself.
//!
//! The library is the system's libibverbs, or an empty one if there is none. The loader loads it as the real one.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The user without rights.
const NOBODY: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
const NAMES: [&str; 18] = [
    "libibverbs",
    "librdmacm",
    "address",
    "udp",
    "net.core.rmem_max",
    "net.core.wmem_max",
    "open files",
    "locked memory",
    "vm.max_map_count",
    "memory cgroup",
    "/dev/shm",
    "huge pages",
    "io_uring",
    "userfaultfd",
    "remote memory",
    "process_vm_readv",
    "membarrier",
    "fuse",
];

/// An installation that every user can execute, removed when this is dropped.
struct Installation(PathBuf);

impl Installation {
    fn new(name: &str) -> Installation {
        let prefix = PathBuf::from(format!("/tmp/terrace-doctor-{}-{name}", std::process::id()));
        for folder in ["bin", "lib/terrace"] {
            std::fs::create_dir_all(prefix.join(folder)).unwrap();
        }
        let installation = Installation(prefix);
        // A child copies: executing a file fails with ETXTBSY if another test's thread forked while it was written here.
        run(Command::new("cp").arg(env!("CARGO_BIN_EXE_terrace")).arg(installation.0.join("bin/terrace")));
        let library = installation.0.join("lib/terrace/libibverbs.so.1");
        match system_library("libibverbs.so.1") {
            Some(path) => run(Command::new("cp").arg("--dereference").arg(path).arg(library)),
            None => run(Command::new("cc").args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(library)),
        }
        installation
    }

    /// Runs `terrace doctor` by a command that executes its arguments.
    fn doctor(&self, by: &[&str], arguments: &[&str]) -> Output {
        let terrace = self.0.join("bin/terrace");
        let mut command = Command::new(by.first().map_or(terrace.as_path(), Path::new));
        if let Some(rest) = by.get(1..) {
            command.args(rest).arg(&terrace);
        }
        command.arg("doctor").args(arguments).env_remove("TERRACE_ADDR").current_dir("/").output().unwrap()
    }

    /// The checks, by `--json`, and whether all that is necessary works.
    fn checks(&self, by: &[&str]) -> (Vec<Value>, bool) {
        let output = self.doctor(by, &["--addr", "127.0.0.1", "--json"]);
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{by:?}: {error}: {}", String::from_utf8_lossy(&output.stderr)));
        assert_eq!(report["version"], 1);
        let is_ready = report["is_ready"].as_bool().unwrap();
        assert_eq!(output.status.code(), Some(if is_ready { 0 } else { 1 }), "{report:#}");
        let checks = report["checks"].as_array().unwrap().clone();
        let names: Vec<&str> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
        assert_eq!(names, NAMES);
        for check in &checks {
            assert_eq!(check["state"] == "ok", check["advice"].is_null(), "{check}");
        }
        (checks, is_ready)
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The path of a library in the loader's cache.
fn system_library(name: &str) -> Option<String> {
    let cache = Command::new("/sbin/ldconfig").arg("-p").output().ok()?;
    let cache = String::from_utf8_lossy(&cache.stdout).into_owned();
    let line = cache.lines().find(|line| line.trim_start().starts_with(&format!("{name} ")))?;
    line.rsplit(" => ").next().map(str::to_owned)
}

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

fn state<'a>(checks: &'a [Value], name: &str) -> &'a str {
    checks.iter().find(|check| check["name"] == name).unwrap()["state"].as_str().unwrap()
}

fn text<'a>(checks: &'a [Value], name: &str, field: &str) -> &'a str {
    checks.iter().find(|check| check["name"] == name).unwrap()[field].as_str().unwrap()
}

fn number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Whether a command can be executed here, such as one that makes a name space.
fn works(by: &[&str]) -> bool {
    let mut command = Command::new(by[0]);
    command.args(&by[1..]).arg("true").stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Checks that do not depend on privileges.
fn assert_common(checks: &[Value]) {
    assert_eq!(state(checks, "libibverbs"), "ok");
    assert_eq!(state(checks, "address"), "ok");
    assert_eq!(state(checks, "udp"), "ok");
    assert_eq!(state(checks, "locked memory"), "ok");
    let mappings = number("/proc/sys/vm/max_map_count").unwrap();
    assert_eq!(state(checks, "vm.max_map_count") == "ok", mappings >= 65_530);
    assert_eq!(state(checks, "librdmacm") == "ok", system_library("librdmacm.so.1").is_some());
}

/// Checks of a user without privileges, whose sockets obey the system's limits.
fn assert_unprivileged(checks: &[Value]) {
    for (name, wanted) in [("net.core.rmem_max", 16 << 20), ("net.core.wmem_max", 4 << 20)] {
        let Some(limit) = number(&format!("/proc/sys/{}", name.replace('.', "/"))) else { continue };
        assert_eq!(state(checks, name), if limit >= wanted { "ok" } else { "limited" }, "{name}");
    }
}

#[test]
fn root_has_what_the_kernel_has() {
    let (checks, is_ready) = Installation::new("root").checks(&[]);
    assert!(is_ready, "{checks:#?}");
    assert_common(&checks);
    if !is_root() {
        return assert_unprivileged(&checks);
    }
    assert_eq!(state(&checks, "net.core.rmem_max"), "ok", "root exceeds the limit");
    if number("/proc/sys/kernel/yama/ptrace_scope").unwrap_or(0) < 3 {
        assert_eq!(state(&checks, "process_vm_readv"), "ok");
    }
    if number("/proc/sys/kernel/io_uring_disabled") == Some(0) {
        assert_eq!(state(&checks, "io_uring"), "ok");
    }
    assert_eq!(state(&checks, "fuse"), if Path::new("/dev/fuse").exists() { "ok" } else { "missing" });
}

#[test]
fn another_user_has_what_needs_no_privilege() {
    if !is_root() || !works(&NOBODY) {
        return eprintln!("not done: only root can become another user");
    }
    let (checks, is_ready) = Installation::new("nobody").checks(&NOBODY);
    assert!(is_ready, "{checks:#?}");
    assert_common(&checks);
    assert_unprivileged(&checks);
    let scope = number("/proc/sys/kernel/yama/ptrace_scope").unwrap_or(0);
    assert_eq!(state(&checks, "process_vm_readv"), if scope == 0 { "ok" } else { "limited" });
    let may_handle_all = number("/proc/sys/vm/unprivileged_userfaultfd") == Some(1)
        || works(&[&NOBODY[..], &["test", "-w", "/dev/userfaultfd", "-a"]].concat());
    assert_eq!(state(&checks, "userfaultfd"), if may_handle_all { "ok" } else { "limited" });
    assert_eq!(state(&checks, "remote memory"), "missing", "fork events need CAP_SYS_PTRACE");
    let may_mount = works(&[&NOBODY[..], &["test", "-w", "/dev/fuse", "-a"]].concat())
        && works(&[&NOBODY[..], &["sh", "-c", "command -v fusermount3 >&2 && exec \"$0\""]].concat());
    assert_eq!(state(&checks, "fuse"), if may_mount { "ok" } else { "missing" });
    if number("/proc/sys/kernel/io_uring_disabled") == Some(2) {
        assert!(text(&checks, "io_uring", "advice").contains("io_uring_disabled is 2"));
    }
}

#[test]
fn a_root_without_privileges_is_told_what_to_do() {
    let by = ["unshare", "--user", "--map-root-user", "--net"];
    if !works(&by) {
        return eprintln!("not done: no user name spaces here");
    }
    let installation = Installation::new("namespace");
    // The loopback of a new network name space is down.
    let (checks, is_ready) = installation.checks(&by);
    assert!(!is_ready);
    assert_eq!((state(&checks, "libibverbs"), state(&checks, "address")), ("ok", "missing"));
    let output = installation.doctor(&by, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("ip link set lo up"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("necessary, and does not work here: address"));
    let up = [&by[..], &["sh", "-c", "ip link set lo up && exec \"$@\"", "sh"]].concat();
    let (checks, is_ready) = installation.checks(&up);
    assert!(is_ready, "{checks:#?}");
    assert_common(&checks);
    assert_unprivileged(&checks);
}

#[test]
fn a_container_without_proc_and_shared_memory_is_told_what_to_mount() {
    let mounts = "mount -t tmpfs tmpfs /proc && mount --bind \"$0\" /dev/shm && exec \"$@\"";
    let on_disk = env!("CARGO_MANIFEST_DIR");
    let by = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounts, on_disk];
    if !works(&by) {
        return eprintln!("not done: no user name spaces here");
    }
    let (checks, is_ready) = Installation::new("mounts").checks(&by);
    assert!(!is_ready);
    for name in ["libibverbs", "process_vm_readv"] {
        assert_eq!(text(&checks, name, "advice"), "mount -t proc proc /proc", "{checks:#?}");
    }
    assert_eq!(state(&checks, "/dev/shm"), "missing");
    assert!(text(&checks, "/dev/shm", "meaning").contains("on a disk"), "{checks:#?}");
    assert_eq!((state(&checks, "address"), state(&checks, "udp")), ("ok", "ok"));
}

#[test]
fn a_firewall_is_found() {
    // A rule of routing does what a firewall does, and takes no firewall.
    let rule = "ip link set lo up && ip rule add pref 9 lookup local && ip rule del pref 0 && \
                ip rule add pref 5 ipproto udp dport 4791 prohibit && exec \"$@\"";
    let by = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", rule, "sh"];
    if !works(&by) {
        return eprintln!("not done: no rules of routing here");
    }
    let (checks, is_ready) = Installation::new("firewall").checks(&by);
    assert!(!is_ready && state(&checks, "udp") == "missing", "{checks:#?}");
    assert!(text(&checks, "udp", "advice").contains("4791"));
}

#[test]
fn a_low_limit_and_a_library_that_does_not_load_are_told() {
    let installation = Installation::new("limits");
    let (checks, is_ready) = installation.checks(&["prlimit", "--nofile=64"]);
    assert!(is_ready && state(&checks, "open files") == "limited");
    std::fs::write(installation.0.join("lib/terrace/libibverbs.so.1"), b"not a library").unwrap();
    let (checks, is_ready) = installation.checks(&[]);
    assert!(!is_ready && text(&checks, "libibverbs", "meaning").contains("cannot be loaded"), "{checks:#?}");
    std::fs::remove_file(installation.0.join("lib/terrace/libibverbs.so.1")).unwrap();
    let (checks, _) = installation.checks(&[]);
    assert!(text(&checks, "libibverbs", "meaning").contains("the library is missing"));
}

#[test]
fn the_text_has_a_line_for_each_check() {
    let output = Installation::new("text").doctor(&[], &["--addr", "127.0.0.1"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for name in NAMES {
        assert!(
            text.lines().any(|line| line.get(10..).is_some_and(|rest| rest.starts_with(name))),
            "{name}: {text}"
        );
    }
}
