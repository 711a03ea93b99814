//! Budgets that exceed the process's limits are refused, with a message that says what to do. Each case runs in a
//! process of its own, because limits are per process.

use std::path::PathBuf;
use std::process::Command;

use terrace_baseline::{Baseline, BaselineConfig, IoMethod};

const MIB: u64 = 1 << 20;
/// The environment variable that marks such a process: the budget that it requests.
const CHILD: &str = "TERRACE_BASELINE_LIMITS_CHILD";

/// No test by itself: the process that the other tests start with [`CHILD`] set.
#[test]
fn child() {
    let Ok(budget) = std::env::var(CHILD) else { return };
    match Baseline::open(BaselineConfig::new(IoMethod::Pinned, budget.parse().unwrap())) {
        Ok(_) => println!("opened"),
        Err(error) => println!("refused: {error}"),
    }
}

/// The output of a process that requests a budget; `None` when it cannot be started here.
fn ask(budget: u64, prefix: &[&str]) -> Option<String> {
    let own = std::env::current_exe().unwrap();
    let mut command = Command::new(prefix[0]);
    command.args(&prefix[1..]).arg(own).args(["--exact", "child", "--nocapture"]);
    let output = command.env(CHILD, budget.to_string()).output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let started = said.contains("opened") || said.contains("refused");
    if !started {
        eprintln!("{prefix:?} does not work here: {}", String::from_utf8_lossy(&output.stderr));
    }
    started.then_some(said)
}

#[test]
fn a_budget_above_the_memlock_limit_is_refused() {
    // Root may lock any amount, so the process drops its privileges first. Only its own limit changes.
    let unprivileged = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all", "--"];
    let limited = |limit: &str, budget| {
        let limit = format!("--memlock={limit}");
        ask(budget, &[&["prlimit", &limit][..], &unprivileged].concat())
    };
    if let Some(said) = limited("1048576:2097152", 64 * MIB) {
        assert!(said.contains("more than this process may lock into memory (2097152 bytes"), "{said}");
        assert!(said.contains("ulimit -l"), "{said}");
    }
    // The soft limit is raised up to the hard limit.
    if let Some(said) = limited("1048576:8388608", 6 * MIB) {
        assert!(said.contains("opened"), "{said}");
    }
}

/// A control group that is removed at the end.
struct Group(PathBuf);

impl Group {
    /// Creates a group of version 1 with a limit.
    fn new(limit: u64) -> Option<Group> {
        let path = PathBuf::from(format!("/sys/fs/cgroup/memory/terrace-baseline-{}", std::process::id()));
        std::fs::create_dir(&path).ok()?;
        let group = Group(path);
        std::fs::write(group.0.join("memory.limit_in_bytes"), limit.to_string()).ok()?;
        Some(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_budget_above_the_control_groups_limit_is_refused() {
    let Some(group) = Group::new(64 * MIB) else {
        eprintln!("no right to make control groups of version 1: not tried");
        return;
    };
    let join = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", group.0.display());
    let inside = ["sh", "-c", &join, "sh"];
    if let Some(said) = ask(64 * MIB, &inside) {
        assert!(said.contains("memory limit of 67108864 bytes of the control group"), "{said}");
        assert!(said.contains("memory.limit_in_bytes"), "{said}");
    }
    if let Some(said) = ask(32 * MIB, &inside) {
        assert!(said.contains("opened"), "{said}");
    }
}
